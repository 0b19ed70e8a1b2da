"""A report as a table for rich, as a data frame, and as a picture."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from thunder_norm.core.context import COMPOSED
from thunder_norm.core.vertices import LARGEST
from thunder_norm.errors import some_of
from thunder_norm.report.rows import Findings, ReportRow, is_infinite, is_nan
from thunder_norm.tables import pandas_for, short_location, shortened


def nonfinite(report: Findings) -> list[str]:
    """Where what is not finite appeared first: a line for NaN and one for infinity."""
    lines = []
    for what, first, test in (("NaN", report.first_nan, is_nan), ("infinite", report.first_infinite, is_infinite)):
        names = [name for name, row in report.parameters.items() if test(row)]
        if first is not None:
            where = f"{first.op} in {first.module or 'the model'}"
            lines.append(f"first {what}: {where}" + (f", {short_location(first.location)}" if first.location else ""))
        if names:
            lines.append(f"{what} parameters: {some_of(names)}")
    return lines


def in_precision(report: Findings) -> list[str]:
    """What low precision does to the results, in words: predicted and measured."""
    found = report.precision
    if found is None:
        return []
    formats = ", ".join(f"{p}: {d}" for p, d in found.formats.items()) if set(found.formats) != {"*"} else found.formats["*"]
    lines = [f"in {formats}: results move by {_number(found.typical)} typically, at most {_number(found.bound)} to first order"]
    if found.measured is None:
        return [*lines, found.measured_by]
    lines.append(f"{found.measured_by}: by {_number(found.measured_typical)}, in their norms {_number(found.measured)}")
    return lines if found.remark is None else [*lines, found.remark]


def images(report: Findings) -> list[str]:
    """What would keep convolutions together as matrices, in a report that keeps matrices: norms over channels and places."""
    if report.scope not in COMPOSED:
        return []
    for row in report.rows:
        found = _CONVOLUTION.fullmatch(row.op)
        dims = tuple(range(-1 - int(found[1]), 0)) if found else ()
        if len(row.elem_dims) < len(dims) <= len(row.shape) and math.prod(row.shape[d] for d in dims) <= LARGEST:
            return [f"{row.op} goes by its norm rule: inputs with elem_dims={dims} keep it a matrix"]
    return []


_CONVOLUTION = re.compile(r"conv(?:_transpose)?([123])d")

# Columns of the table, and how wide a console must be to have them: on 80 characters no number is cut.
_COLUMNS = {"module": 0, "op": 0, "line": 120, "kind": 100, "shape": 120}
_NUMBERS = ("norm", "sensitivity", "actual", "tightness")
# Of what an operation rounds: typically, and of what arrives what is possible.
_ROUNDINGS = {"adds": "added_typical", "arrives": "arriving_typical", "at most": "arriving"}
_SCOPES = {
    "local": "local: at the data of this run, for small movements",
    "composed": "composed: how far each result moves when the inputs move by 1, the parameters as they are",
    "within": "within {:.4g} of the data: how far each result moves when the inputs move by 1, the parameters as they are",
}


def rich_table(report: Findings, max_rows: int | None = None, width: int = 160) -> Any:
    """The operations as a `rich.table.Table`; how tight a bound is shows in its colour."""
    from rich.table import Table
    from rich.text import Text

    columns = [name for name, least in _COLUMNS.items() if width >= least]
    captions = [
        *filter(None, [_SCOPES.get(report.scope, "").format(report.radius)]),
        *images(report),
        *in_precision(report),
        *nonfinite(report),
    ]
    caption = Text("\n".join(captions)) if captions else None
    table = Table(caption=caption, header_style="bold", row_styles=["", "dim"])
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name != "module", min_width=10 if name == "module" else None)
    roundings = {} if report.precision is None else _ROUNDINGS
    for name in (*_NUMBERS, *roundings):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for count, row in shortened(report.rows, max_rows):
        if row is None:
            table.add_row(f"... {count} more operations")
            continue
        cells = {
            "module": row.module,
            "op": row.op,
            "line": short_location(row.location),
            "kind": f"{row.kind}{list(row.elem_dims)}",
            "shape": "x".join(map(str, row.shape)),
        }
        numbers = [_number(v) for v in (row.norm_size, row.sensitivity, row.actual)]
        # Text, because rich would take the dims in brackets for markup
        table.add_row(
            *(Text(cells[name]) for name in columns),
            *map(Text, numbers),
            Text(_number(row.tightness), style=_colour(row.tightness)),
            *(Text(_number(getattr(row.rounding, value, None))) for value in roundings.values()),
        )
    return table


def _colour(tightness: float | None) -> str:
    """Green for a tight bound, yellow for a loose one, red where the data is outside (a given norm, or a rule, is wrong) or NaN."""
    if tightness is None:
        return ""
    if math.isnan(tightness) or tightness > 1 + 1e-4:
        return "bold red"
    return "green" if tightness >= 0.5 else "yellow" if tightness >= 0.01 else ""


_OF_ROUNDING = ("added", "added_typical", "arriving", "arriving_typical")


def dataframe(report: Findings) -> Any:
    """See `NormReport.to_dataframe`."""
    pandas = pandas_for("NormReport.to_dataframe")
    columns = [f.name for f in dataclasses.fields(ReportRow) if f.name not in ("rule", "arguments", "rounding", "parts")]
    data = {name: [getattr(row, name) for row in report.rows] for name in columns}
    if report.precision is not None:
        data |= {name: [getattr(row.rounding, name, 0.0) for row in report.rows] for name in _OF_ROUNDING}
    if any(row.parts is not None for row in report.rows):
        data["parts"] = [row.parts for row in report.rows]
    return pandas.DataFrame({**data, "rule": [None if row.rule is None else row.rule.__name__ for row in report.rows]})


def figure(report: Findings) -> Any:
    """See `NormReport.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("NormReport.plot needs matplotlib: pip install 'thunder_norm[plot]'") from e
    rows = report.rows
    has_data = any(r.tightness is not None for r in rows)
    drawn = Figure(figsize=(10, 6.5 if has_data else 4.5), layout="constrained")
    heights = [2, 1] if has_data else [1]
    axes, *below = drawn.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    depth = range(len(rows))
    axes.plot(depth, [_positive(r.norm_size) for r in rows], label="norm_size (bound)", color="tab:blue")
    if any(r.actual is not None for r in rows):
        axes.plot(depth, [_positive(r.actual) for r in rows], ".", label="actual norm", color="tab:orange", ms=3)
    axes.plot(
        depth,
        [_positive(r.sensitivity) for r in rows],
        label="sensitivity to the inputs" if report.scope in COMPOSED else "sensitivity of the output",
        color="tab:green",
        lw=1,
    )
    axes.set(yscale="log", ylabel="norm", title="Norms by depth")
    axes.legend()
    for tightness in below:
        values = [math.nan if r.tightness is None else r.tightness for r in rows]
        tightness.plot(depth, [_positive(v) for v in values], label="tightness", color="tab:purple", lw=1)
        tightness.axhline(1, color="gray", lw=0.5)
        tightness.set(yscale="log", ylabel="tightness")
    (axes, *below)[-1].set(xlabel="operation")
    for part in (axes, *below):
        _mark_modules(part, rows)
        part.grid(alpha=0.3)
    return drawn


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
