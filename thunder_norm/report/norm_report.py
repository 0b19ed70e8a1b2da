"""The report: every operation of a normed program with its norm, its sensitivity and how tight the bound is."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm import first_calls
from thunder_norm.core.context import COMPOSED, Sensitivity, check_sensitivity, not_composed
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.model_state.shards import as_one_process, is_spread, spread_of, whole_data
from thunder_norm.norms.lifts.lifting import Otherwise
from thunder_norm.norms.lifts.parameters import Policy, tensor_names
from thunder_norm.norms.maps.encoding import WithoutModel
from thunder_norm.norms.maps.norm_map import NormMap
from thunder_norm.norms.transform import NormTransform
from thunder_norm.report import saving
from thunder_norm.report import views as report_views
from thunder_norm.report.comparison import Comparison, compared
from thunder_norm.report.explanation import explain_row
from thunder_norm.report.precision.prediction import in_precision
from thunder_norm.report.rows import Findings
from thunder_norm.report.runs import AsModule, Program
from thunder_norm.scalars import is_number
from thunder_norm.tables import shortened

# Rows of a report that is printed; `table(max_rows=None)` has all.
MAX_ROWS = 200


@dataclass(frozen=True, repr=False)
class NormReport(Findings):
    """What `norm_report` returns: `Findings`, and ways to look at them."""

    def without_data(self) -> NormReport:
        """The same without actual norms: for a program whose inputs are placeholders."""
        return replace(self, rows=tuple(replace(r, actual=None, tightness=None) for r in self.rows))

    def select(self, module: str) -> NormReport:
        """The part of the report that a module and its submodules make, by dotted path.

        Raises:
            NormMapKeyError: there is nothing of that module in the report.
        """

        def is_inside(path: str) -> bool:
            return path == module or path.startswith(f"{module}.") or module == ""

        rows = tuple(r for r in self.rows if is_inside(r.module))
        parameters = {name: r for name, r in self.parameters.items() if is_inside(name)}
        if not rows and not parameters:
            known = sorted({r.module for r in self.rows})
            close = difflib.get_close_matches(module, known, n=3)
            raise NormMapKeyError(
                with_details(
                    f"no operation of the report is in module {module!r}", did_you_mean=", ".join(map(repr, close)) or None
                )
            )
        inferred = {
            name: i for name, i in self.inferred.items() if name in parameters or any(is_inside(u.module) for u in i.uses)
        }
        return replace(self, rows=rows, parameters=parameters, inferred=inferred)

    def compare(self, after: NormReport) -> Comparison:
        """This report and another of the same program beside each other: of a later checkpoint, of other data.

        Operations are matched by module, name and order, parameters by name.

        Raises:
            NormMismatchError: the other is no report, or their sensitivities are of different scopes.
        """
        if not isinstance(after, Findings):
            raise NormMismatchError(f"a report is compared with another report, got {type(after).__name__}")
        return compared(self, after)

    def explain(self, *, max_rows: int | None = None) -> str:
        """In words: the kind of each parameter and why, then each operation with its rule, formulas and conversions.

        Args:
            max_rows: how many operations to explain, half of them from the end; all if None.

        Raises:
            NormMismatchError: max_rows is negative.
        """
        warnings = [i.warning for i in self.inferred.values() if i.warning is not None]
        parts = [i.explain() for i in self.inferred.values()]
        if warnings:
            parts.insert(
                0, f"{len(warnings)} of {len(parts)} parameters have uses that disagree about their norm, see the warnings."
            )
        for n, row in shortened(self.rows, max_rows):
            parts.append(f"... {n} more operations" if row is None else explain_row(n, row))
        return "\n\n".join(parts)

    def table(self, *, width: int = 160, max_rows: int | None = None) -> str:
        """The operations as a text table.

        Args:
            width: in characters; a narrow table has fewer columns.
            max_rows: how many operations to show, half of them from the end; all if None.

        Raises:
            NormMismatchError: max_rows is negative.
        """
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        console.print(report_views.rich_table(self, max_rows, width))
        return console.file.getvalue()  # type: ignore[attr-defined]

    def __str__(self) -> str:
        table = self.table(max_rows=MAX_ROWS)
        return f"{table}\n{self.explain(max_rows=MAX_ROWS)}\n" if self.explains else table

    def __repr__(self) -> str:
        return f"<NormReport of {len(self.rows)} operations and {len(self.parameters)} parameters>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield report_views.rich_table(self, MAX_ROWS, options.max_width)
        if self.explains:
            yield Text(self.explain(max_rows=MAX_ROWS))

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each operation (needs pandas, the extra `dataframe`).

        Raises:
            ImportError: pandas is not installed.
        """
        return report_views.dataframe(self)

    def save(self, path: str | Path) -> None:
        """Write the report to a file, for `load_norm_report`.

        Raises:
            SavedFileError: a kind of norm of your own, or another value that has no name; the file stays as it was.
            OSError: the file cannot be written.
        """
        saving.save(self, path)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw norm, actual norm, sensitivity and tightness by depth (needs matplotlib, the extra `plot`).

        Args:
            path: where to save the picture; if None it is only returned.

        Returns:
            The matplotlib figure: norms and sensitivity above, tightness below if there are actual norms.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = report_views.figure(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def norm_report(
    target: Any,
    *args: Any,
    explain: bool = False,
    sensitivity: Sensitivity | None = None,
    radius: float | None = None,
    precision: torch.dtype | Mapping[str, torch.dtype] | None = None,
    per: int | None = None,
    **kwargs: Any,
) -> NormReport:
    """Norm, sensitivity and tightness of every operation of a normed program.

    Args:
        target: a function or module jitted with `NormTransform`, or a norm map.  Parameters may be sharded (`fully_shard`, or any
            DTensors): the report is that of the whole ones, which are gathered for it, so all ranks are to call it.
        *args: the arguments to run it with; for a norm map those of its last call if none are given.
        explain: print explanations under the table: why each parameter has its kind, and the rule of each operation.
        sensitivity: "local", at the data of this run: each operation is bounded from the norms that its arguments have, and to first
            order; or "global", for all inputs of these norms; or "composed", for all inputs too, with the parameters as they are and
            ellipsoids in place of a constant for each operation.  None: "local" where there is data (arguments that are not on meta,
            measured parameters, mode "bound"), else the transform's own.  A norm map's is "global".  With "composed" the rows of
            operations show how far each result moves when the inputs move by 1, those of parameters how far the output does.
        radius: sensitivities for all inputs within this distance of the data, in the norms of the inputs: composed, with the slopes that
            activations may have there (scope "within").  Parameters are as they are.
        precision: predict what the program does in this dtype: how much each operation's rounding adds, and how much of it arrives at
            the results, at most and typically, next to what is measured (`ReportRow.rounding`, `NormReport.precision`).  Or dtypes by
            patterns of operations and modules, the last that fits counts: ``{"*": torch.bfloat16, "lm_head": torch.float32}``.  With
            dtypes of 8 bits matrix products take their operands in them, each scaled to its largest entry, and all else is bfloat16.
        per: a dimension of results: rows have the actual norm of what is at each of its indices (`ReportRow.parts`), over the other
            elem_dims.  With [..., token, feature] -2 is each token, and with [batch, head, token, feature] -3 is each head.
        **kwargs: as `args`, by name (for a norm map `normed_state_dict` too).

    Raises:
        NormMismatchError: `target` is neither, there are no arguments to run it with, or the uses of a parameter disagree about
            its norm and no norm fits all of them; no such sensitivity; "composed" of a norm map, without data or measured parameters,
            in another mode than "bound", or without a normed input; a precision without data, in another mode, or no format; a
            radius that is negative, or with another sensitivity than "within"; `per` without data, or no dimension of any result.
        NormMapKeyError: a pattern of `precision` fits nothing.
    """
    if sensitivity is not None:
        check_sensitivity(sensitivity)
    with first_calls.shown("norm report"), torch.inference_mode(False), torch.enable_grad():
        report = _report_of(target, args, kwargs, _scope(sensitivity, radius), radius or 0.0, precision, per)
    return replace(report, explains=True) if explain else report


def load_norm_report(path: str | Path) -> NormReport:
    """The report that `NormReport.save` wrote to a file.

    Args:
        path: of the file.

    Raises:
        SavedFileError: no such file, a damaged one, or one of a newer format.
        OSError: the file cannot be read.
    """
    return saving.load(path, NormReport)


def _report_of(
    target: Any,
    args: tuple,
    kwargs: dict,
    sensitivity: Sensitivity | None,
    radius: float,
    precision: torch.dtype | Mapping[str, torch.dtype] | None,
    per: int | None,
) -> NormReport:
    if isinstance(target, NormMap):
        if isinstance(target.model, WithoutModel):
            target.model()  # says that there is none
        not_composed(sensitivity or "global", "a norm map")
        if per is not None:
            raise NormMismatchError("per is about data, which a norm map has none of: norm_report(thunder.jit(...), x, per=...)")
        if precision is not None:
            raise NormMismatchError(
                "precision is about roundings of data, which a norm map has none of: norm_report(thunder.jit(...), x)"
            )
        with as_one_process(target.model):
            return _of_norm_map(target, args, kwargs)
    transform = _transform_of(target)
    if not args and not kwargs:
        raise NormMismatchError("norm_report of a jitted function needs the arguments to run it with: norm_report(jm, *args)")
    model = getattr(target, "_model", None)
    if model is None:
        model = AsModule(target._lc_cd.fn)
        own: dict[str, torch.Tensor] = {}
    else:
        own = {**target._overrides_parameters, **target._overrides_buffers}
    with as_one_process(model):
        return _of_jitted(transform, model, args, kwargs, _whole(model, own), sensitivity, radius, precision, per)


def _whole(model: torch.nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a jitted model, inside `as_one_process`: of one that is spread the whole one that stands for it in the model."""
    found = {}
    for name, mine in tensor_names(model).items():
        t, spread = own.get(name, mine), spread_of(mine)
        # a plain one is what the last forward of a sharded module gathered, and may be gone
        is_models = spread is not mine and (t is spread or not is_spread(t))
        found[name] = mine if is_models else whole_data(t)
    return found


def _of_jitted(
    transform: NormTransform,
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    own: dict[str, torch.Tensor],
    sensitivity: Sensitivity | None,
    radius: float,
    precision: torch.dtype | Mapping[str, torch.dtype] | None,
    per: int | None,
) -> NormReport:
    has_data = not any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_flatten((args, kwargs, list(own.values())))[0])
    if sensitivity is None:
        sensitivity = (
            "local" if has_data and transform.parameters == "measured" and transform.mode == "bound" else transform.sensitivity
        )
    if per is not None and not has_data:
        raise NormMismatchError("per is about data, and there are tensors on meta")
    if per is not None and type(per) is not int:
        raise NormMismatchError(f"per is a dimension of results, an integer, got {per!r}: -2 for tokens of [..., token, feature]")
    if sensitivity in COMPOSED:
        _check_composed(sensitivity, transform, has_data, (args, kwargs))
    program = Program(model, args, kwargs, transform.parameters, transform.mode, own, scope=sensitivity, radius=radius, per=per)
    if precision is not None:
        _check_precision(program, has_data)
    found = program.run().findings(sensitivity, radius) if precision is None else in_precision(program, precision)
    dims = max((len(r.shape) for r in found.rows), default=0)
    if per is not None and found.rows and not -dims <= per < dims:
        raise NormMismatchError(f"per={per}: no result has that dimension, the one with most has {dims}")
    return _report(found)


def _report(findings: Findings) -> NormReport:
    return NormReport(**{f.name: getattr(findings, f.name) for f in fields(findings)})


def _check_precision(program: Program, has_data: bool) -> None:
    """Refuse what has no roundings."""
    if not has_data or program.mode != "bound" or program.scope in COMPOSED:
        raise NormMismatchError(
            'precision is about roundings of data: it needs data, mode "bound", and sensitivity "local" or "global"'
        )
    given = tree_flatten((program.args, program.kwargs, program.tensors))[0]
    found = {t.dtype for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()} - {torch.float32, torch.float64}
    if found:
        raise NormMismatchError(
            f"precision compares with a program in float32 or float64, and this one has tensors of {', '.join(sorted(map(str, found)))}: "
            "give it the model and the inputs in float32 (model.float())"
        )


def _scope(sensitivity: Sensitivity | None, radius: float | None) -> Sensitivity | None:
    """The sensitivity that is asked for, "within" where there is a radius."""
    if radius is None:
        if sensitivity == "within":
            raise NormMismatchError('sensitivity "within" needs a radius: norm_report(..., radius=r)')
        return sensitivity
    if sensitivity not in (None, "within"):
        raise NormMismatchError(f'a radius is of sensitivity "within", not of {sensitivity!r}')
    if not is_number(radius) or not radius >= 0:
        raise NormMismatchError(f"radius must be a distance >= 0, got {radius!r}")
    return "within"


def _check_composed(sensitivity: Sensitivity, transform: NormTransform, has_data: bool, inputs: Any) -> None:
    """Refuse what has no ellipsoids."""
    if not has_data or transform.parameters != "measured" or transform.mode != "bound":
        raise NormMismatchError(
            f'sensitivity "{sensitivity}" is for parameters as they are: it needs data, NormTransform(parameters="measured") and mode "bound"'
        )
    if not any(isinstance(x, NormedTensor) for x in tree_flatten(inputs)[0]):
        raise NormMismatchError(
            f'sensitivity "{sensitivity}" says how far results move with the inputs, and none is normed: RMSTensor.of(x)'
        )


def _transform_of(target: Any) -> Any:
    for transform in getattr(target, "_lc_transforms", ()):
        if isinstance(transform, NormTransform):
            return transform
    raise NormMismatchError(f"norm_report needs a norm map or a function jitted with NormTransform, got {type(target).__name__}")


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
    model = norm_map.model if isinstance(norm_map.model, torch.nn.Module) else AsModule(norm_map.model)
    otherwise: Otherwise = "unit" if given.otherwise == "unit" else "measured"
    program = Program(model, call_args, call_kwargs, policy, norm_map.mode, {}, otherwise)
    report = _report(program.run().findings(program.scope))
    has_data = {id(v) for v in leaves if isinstance(v, torch.Tensor) and not isinstance(v, NormedTensor)}
    return report if has_data and not any(isinstance(v, NormedTensor) for v in leaves) else report.without_data()
