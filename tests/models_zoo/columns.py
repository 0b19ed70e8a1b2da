"""The columns of the table: each is a function of a model that returns its figures, or raises what went wrong.

A column never compares with our own output of another day: real mode is compared with eager, a bound with the norm that the result has,
the norm map on the meta device with the norms that `ModularNorm` finds without a trace.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.within_norms import actual_norm
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

from .case import Built, Model, built, tensors
from .training import five_steps, twelve_steps

Figures = dict[str, Any]


class WrongResult(AssertionError):
    """A result that is not eager's, or not within its bound."""


def jit(module: Any) -> Any:
    return thunder.jit(module, transforms=[NormTransform()])


def assert_eager(found: Any, model: Model) -> None:
    """Every tensor of a result is what eager PyTorch computes, to single precision."""
    expected = [t.detach() for t in tensors(built(model)())]  # with gradients, which a program may take itself
    got = tensors(found)
    if len(got) != len(expected):
        raise WrongResult(f"{len(got)} tensors instead of {len(expected)}")
    for x, y in zip(got, expected, strict=True):
        try:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * max(1.0, y.double().abs().max().item() if y.numel() else 0.0))
        except AssertionError as e:
            raise WrongResult(str(e).replace("\n", " ")) from None


def real(model: Model) -> Figures:
    """Real mode: plain tensors in, plain tensors out, as eager has them; the seconds of the first call."""
    b = built(model)
    start = time.perf_counter()
    with torch.no_grad():
        found = b(jit(b.module))
    seconds = time.perf_counter() - start
    assert_eager(found, model)
    return {"seconds": seconds}


def plain(model: Model) -> Figures:
    """What Thunder says without us, once what stops every model of transformers 5 is out of its way (docs/upstream.md)."""
    b = built(model)
    capturing = sys.modules.get("transformers.utils.output_capturing")
    out_of_the_way = mock.patch.object(capturing, "is_torchdynamo_compiling", lambda: False)
    with torch.no_grad(), out_of_the_way if capturing else contextlib.nullcontext():
        assert_eager(b(thunder.jit(b.module)), model)
    return {}


def normed_outputs(result: Any) -> list[NormedTensor]:
    return [t for t in tree_leaves(result, is_leaf=lambda t: isinstance(t, NormedTensor)) if isinstance(t, NormedTensor)]


def normed_mode(model: Model) -> Figures:
    """The first result's bound, the norm it has, and their ratio; every result is eager's and within its bound."""
    b = built(model)
    with torch.no_grad():
        result = b(normed(jit(b.module)))
    assert_eager(tree_map(lambda t: t.backing if isinstance(t, NormedTensor) else t, result), model)
    found = normed_outputs(result)
    if not found:
        raise WrongResult("no result has a norm")
    for y in found:
        if not actual_norm(y) <= y.norm_size * (1 + 1e-5):
            raise WrongResult(f"norm {actual_norm(y):.6g} above the bound {y.norm_size:.6g}")
    bound, actual = found[0].norm_size.item(), actual_norm(found[0]).item()
    return {"bound": bound, "actual": actual, "ratio": actual / bound if bound else math.nan}


def report(model: Model) -> Figures:
    """The number of operations that `norm_report` lists, the share of them with a finite norm, and the last one's actual norm over it."""
    b = built(model)
    rows = norm_report(jit(b.module), *b.args, **b.kwargs).rows
    if not rows:
        raise WrongResult("no rows")
    ratio = rows[-1].tightness
    if ratio is not None and ratio > 1.001:
        raise WrongResult(f"norm {rows[-1].actual:g} above the bound {rows[-1].norm_size:g}")
    return {"operations": len(rows), "finite": sum(math.isfinite(r.norm_size) for r in rows) / len(rows), "ratio": ratio}


def norm_map(model: Model) -> Figures:
    """The first output's norm, by a norm map of a model on the meta device, where inputs and parameters have norm 1.

    Buffers, and arguments that are not floating, are on meta as well; or they keep their data, where norms depend on it.
    """
    try:
        return _mapped(model, keep_data=False)
    except Exception:  # noqa: BLE001 - a program may make tensors on the CPU, or a norm depend on values
        return _mapped(model, keep_data=True)


def _mapped(model: Model, keep_data: bool) -> Figures:
    b = built(model)
    inputs = _inputs_of_norm_1(b)
    buffers = dict(b.module.named_buffers(remove_duplicate=False)) if keep_data else {}
    b.module.to("meta")
    for name, buffer in buffers.items():
        path, _, attribute = name.rpartition(".")
        setattr(b.module.get_submodule(path), attribute, buffer)

    def on_meta(t: Any) -> Any:
        is_kept = type(t) is not torch.Tensor or (keep_data and not t.is_floating_point())
        return t if is_kept else t.to("meta")

    (args, kwargs), (norms, norms_by_name) = tree_map(on_meta, ((b.args, b.kwargs), inputs), is_leaf=_is_tensor)
    compute = build_norm_map(b.module, *args, parameters="unit", **kwargs)
    found = normed_outputs(compute(*norms, **norms_by_name))
    if not found:
        raise WrongResult("no result has a norm")
    return {"norm": found[0].norm_size.item(), "buffers": "data" if keep_data else "meta"}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _inputs_of_norm_1(b: Built) -> tuple[tuple, dict[str, Any]]:
    """The norms that the first operations want, as `ModularNorm` finds them; RMS over the last dimension where it fails."""
    try:
        return ModularNorm(b.module, *b.args, mode="typical", **b.kwargs).inputs
    except Exception:  # noqa: BLE001 - its own column says why
        return tree_map(
            lambda t: RMSTensor(1.0) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, (b.args, b.kwargs)
        )


def modular(mode: str) -> Callable[[Model], Figures]:
    """How many parameters no output depends on, and the smallest target of the others."""

    def column(model: Model) -> Figures:
        b = built(model)
        norm = ModularNorm(b.module, *b.args, mode=mode, **b.kwargs)
        reached = [t for name, t in norm.targets.items() if t > 0]
        if not reached:
            raise WrongResult("no parameter has a target")
        return {"unreached": len(norm.unreached), "smallest": min(reached)}

    return column


# in the order in which a row is made: what needs no trace first
COLUMNS: dict[str, Callable[[Model], Figures]] = {
    "bound": modular("bound"),
    "typical": modular("typical"),
    "modula": modular("modula"),
    "steps": five_steps,
    "real": real,
    "normed": normed_mode,
    "report": report,
    "norm_map": norm_map,
    "plain": plain,
    "training": twelve_steps,
}
