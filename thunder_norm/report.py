"""The report: every operation of a normed program with its norm, its sensitivity and how tight the bound is."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.context import Mode
from thunder_norm.eager import Noted, run_eagerly
from thunder_norm.errors import NormMismatchError
from thunder_norm.norm_map import NormMap
from thunder_norm.op_names import op_key
from thunder_norm.parameters import Policy, tensor_names
from thunder_norm.sensitivity import with_perturbation
from thunder_norm.tensors import NormedTensor


@dataclass(frozen=True)
class ReportRow:
    """One operation.

    Attributes:
        op: the operation.
        module: dotted path of the module whose forward called it.
        location: ``file.py:line:  text`` of the user's call.
        kind: which norm.
        elem_dims: the dimensions it runs over.
        shape: of the result.
        norm_size: bound on the result's norm.
        sensitivity: of the model's output to a perturbation of this result (0 if it does not depend on it).
        actual: the result's own norm, where there is data.
        tightness: actual / norm_size, at most 1 in mode "bound".
    """

    op: str
    module: str
    location: str
    kind: str
    elem_dims: tuple[int, ...]
    shape: tuple[int, ...]
    norm_size: float
    sensitivity: float
    actual: float | None
    tightness: float | None


@dataclass(frozen=True)
class NormReport:
    """What `norm_report` returns: `rows` in order of execution, and the same for parameters by name."""

    rows: tuple[ReportRow, ...]
    parameters: Mapping[str, ReportRow]

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def without_data(self) -> NormReport:
        """The same without actual norms: for a program whose inputs are placeholders."""
        return NormReport(tuple(replace(r, actual=None, tightness=None) for r in self.rows), self.parameters)

    def table(self, *, width: int = 160) -> str:
        """The operations as a text table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=None, header_style="bold", row_styles=["", "dim"])
        for name in ("module", "op", "line", "kind", "shape"):
            table.add_column(name, overflow="fold", no_wrap=name in ("op", "line", "kind", "shape"))
        for name in ("norm", "sensitivity", "actual", "tightness"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.module,
                row.op,
                _short(row.location),
                f"{row.kind}{list(row.elem_dims)}",
                "x".join(map(str, row.shape)),
                *(_number(v) for v in (row.norm_size, row.sensitivity, row.actual, row.tightness)),
            )
        console = Console(file=io.StringIO(), width=width)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined]

    __str__ = table

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw norm, actual norm and sensitivity by depth (needs matplotlib, the extra `plot`).

        Args:
            path: where to save the picture; if None it is only returned.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError("NormReport.plot needs matplotlib: pip install 'thunder_norm[plot]'") from e
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        axes = figure.subplots()
        depth = range(len(self.rows))
        axes.plot(depth, [_positive(r.norm_size) for r in self.rows], label="norm_size (bound)", color="tab:blue")
        if any(r.actual is not None for r in self.rows):
            axes.plot(depth, [_positive(r.actual) for r in self.rows], ".", label="actual norm", color="tab:orange", ms=3)
        axes.plot(
            depth, [_positive(r.sensitivity) for r in self.rows], label="sensitivity of the output", color="tab:green", lw=1
        )
        axes.set(yscale="log", xlabel="operation", ylabel="norm", title="Norms by depth")
        _mark_modules(axes, self.rows)
        axes.legend()
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def norm_report(target: Any, *args: Any, **kwargs: Any) -> NormReport:
    """Norm, sensitivity and tightness of every operation of a normed program.

    Args:
        target: a function or module jitted with `NormTransform`, or a norm map.
        *args: the arguments to run it with; for a norm map those of its last call if none are given.
        **kwargs: as `args`, by name (for a norm map `normed_state_dict` too).

    Raises:
        NormMismatchError: `target` is neither, or there are no arguments to run it with.
    """
    if isinstance(target, NormMap):
        return _of_norm_map(target, args, kwargs)
    transform = _transform_of(target)
    if not args and not kwargs:
        raise NormMismatchError("norm_report of a jitted function needs the arguments to run it with: norm_report(jm, *args)")
    model = getattr(target, "_model", None)
    if model is None:
        model = _AsModule(target._lc_cd.fn)
        own: dict[str, torch.Tensor] = {}
    else:
        own = {**target._overrides_parameters, **target._overrides_buffers}
    return _report(model, args, kwargs, transform.parameters, transform.mode, own)


def _transform_of(target: Any) -> Any:
    from thunder_norm.transforms.norm import NormTransform

    for transform in getattr(target, "_lc_transforms", ()):
        if isinstance(transform, NormTransform):
            return transform
    raise NormMismatchError(f"norm_report needs a norm map or a function jitted with NormTransform, got {type(target).__name__}")


class _AsModule(torch.nn.Module):
    """A function as a module without parameters."""

    def __init__(self, fn: Callable):
        super().__init__()
        self.forward = fn


def _of_norm_map(norm_map: NormMap, args: tuple, kwargs: dict) -> NormReport:
    state = kwargs.pop("normed_state_dict", None)
    if args or kwargs:
        leaves, _ = tree_flatten((args, kwargs))
    else:
        leaves, state = norm_map.last_call
    given = norm_map.given(state)
    inputs = norm_map.placeholders(leaves)
    call_args, call_kwargs = tree_unflatten(inputs, norm_map.example_spec)
    policy: Policy = given.norms if given.norms else ("unit" if given.otherwise == "unit" else "measured")
    model = norm_map.model if isinstance(norm_map.model, torch.nn.Module) else _AsModule(norm_map.model)
    report = _report(model, call_args, call_kwargs, policy, norm_map.mode, {})
    has_data = {id(v) for v in leaves if isinstance(v, torch.Tensor) and not isinstance(v, NormedTensor)}
    return report if has_data and not any(isinstance(v, NormedTensor) for v in leaves) else report.without_data()


def _report(
    model: torch.nn.Module, args: tuple, kwargs: dict, policy: Policy, mode: Mode, own: Mapping[str, torch.Tensor]
) -> NormReport:
    tensors = {**tensor_names(model), **own}
    # one detached tensor for each: only norm scalars are differentiated
    detached = {id(t): t.detach() for t in tensors.values()}
    args, kwargs = tree_map(_perturbed, (args, kwargs))
    result, environment = run_eagerly(
        model,
        args,
        kwargs,
        policy=policy,
        mode=mode,
        tensors={name: detached[id(t)] for name, t in tensors.items()},
        perturbed=True,
    )
    rows = environment.noted
    moving = [y.perturbation_size for y in tree_flatten(result)[0] if isinstance(y, NormedTensor) and _moves(y)]
    parameters = list(environment.lifted.items())
    targets = [n.out for n in rows] + [p for _, p in parameters]
    gains = _gains(moving, targets)
    reported = tuple(_row(n, g) for n, g in zip(rows, gains, strict=False))
    by_name = {
        name: _row(Noted(_parameter, name.rpartition(".")[0], "", p), g)
        for (name, p), g in zip(parameters, gains[len(rows) :], strict=True)
    }
    return NormReport(reported, by_name)


def _parameter() -> None:
    """Stands in for the operation in the rows of parameters."""


def _perturbed(x: Any) -> Any:
    return with_perturbation(x) if isinstance(x, NormedTensor) and x.perturbation_size is None else x


def _moves(y: NormedTensor) -> bool:
    return y.perturbation_size is not None and y.perturbation_size.requires_grad


def _gains(moving: list[torch.Tensor], targets: list[NormedTensor]) -> list[float]:
    wanted = [i for i, t in enumerate(targets) if _moves(t)]
    gains = [0.0] * len(targets)
    if moving and wanted:
        grads = torch.autograd.grad(sum(moving), [targets[i].perturbation_size for i in wanted], allow_unused=True)
        for i, g in zip(wanted, grads, strict=True):
            gains[i] = 0.0 if g is None else g.item()
    return gains


def _row(noted: Noted, gain: float) -> ReportRow:
    out = noted.out
    size = out.norm_size.item()
    actual = None
    if out.backing.device.type != "meta":
        actual = type(out).of(out.backing, out.elem_dims).norm_size.item()
    key = op_key(noted.func)
    return ReportRow(
        op="parameter" if noted.func is _parameter else key if isinstance(key, str) else noted.func.__name__,
        module=noted.module,
        location=noted.location,
        kind=type(out).__name__,
        elem_dims=out.elem_dims,
        shape=tuple(out.shape),
        norm_size=size,
        sensitivity=gain,
        actual=actual,
        tightness=None if actual is None or size == 0 else actual / size,
    )


def _short(location: str) -> str:
    """``model.py:41`` of ``/path/to/model.py:41:  text``."""
    path, _, rest = location.partition(":")
    return f"{Path(path).name}:{rest.partition(':')[0]}" if location else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _positive(value: float | None) -> float:
    return value if value is not None and value > 0 else math.nan


def _mark_modules(axes: Any, rows: tuple[ReportRow, ...]) -> None:
    """A faint line where a numbered block (h.0, layer.3, ...) begins."""
    previous = None
    for i, row in enumerate(rows):
        block = next((part for part in row.module.split(".") if part.isdigit()), None)
        if block is not None and block != previous:
            axes.axvline(i, color="gray", lw=0.5, alpha=0.5)
        previous = block
