"""A profile as a table for rich, as a few lines, and as a data frame."""

from __future__ import annotations

import dataclasses
from typing import Any

from thunder_norm.errors import ProfileError
from thunder_norm.profiling.rows import ProfileRow
from thunder_norm.profiling.totals import Measured
from thunder_norm.tables import pandas_for, short_location, shortened

# Columns of the table, and how wide a console must be to have them: no number is cut.
_TEXTS = {"module": 0, "op": 0, "line": 110, "shape": 140, "dtype": 200}
_NUMBERS = {
    "FLOPs": 0,
    "backward": 0,
    "read": 175,
    "written": 175,
    "output": 120,
    "temporary": 200,
    "parameters": 200,
    "saved": 0,
    "live": 140,
    "peak": 0,
}


def rich_table(report: Measured, max_rows: int | None, width: int, backward: bool) -> Any:
    """The operations as a `rich.table.Table`, the peak stands out."""
    from rich.table import Table
    from rich.text import Text

    if max_rows is not None and max_rows < 0:
        raise ProfileError(f"max_rows must be >= 0, got {max_rows}")
    texts = [name for name, least in _TEXTS.items() if width >= least]
    numbers = [name for name, least in _NUMBERS.items() if width >= least]
    table = Table(header_style="bold", row_styles=["", "dim"])
    for name in texts:
        table.add_column(name, overflow="fold", no_wrap=name != "module", min_width=10 if name == "module" else None)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    rows = report.schedule if backward else report.rows
    peak = report.peak_bytes
    for count, row in shortened(rows, max_rows):
        if row is None:
            table.add_row(f"... {count} more operations")
            continue
        cells = _cells(row)
        style = "bold red" if row.peak_bytes == peak else ""
        table.add_row(*(Text(cells[name]) for name in texts), *(Text(cells[name], style=style) for name in numbers))
    return table


def _cells(row: ProfileRow) -> dict[str, str]:
    return {
        "module": row.module,
        "op": row.op,
        "line": short_location(row.location),
        "shape": "x".join(map(str, row.shape)),
        "dtype": str(row.dtype).removeprefix("torch.") if row.dtype is not None else "",
        "FLOPs": ("? " if row.unknown else "") + flops_text(row.flops).rstrip(),
        "backward": flops_text(row.backward_flops).rstrip(),
        "read": bytes_text(row.bytes_read),
        "written": bytes_text(row.bytes_written),
        "output": bytes_text(row.output_bytes),
        "temporary": bytes_text(row.temporary_bytes),
        "parameters": bytes_text(row.parameter_bytes),
        "saved": bytes_text(row.saved_bytes),
        "live": bytes_text(row.live_bytes),
        "peak": bytes_text(row.peak_bytes),
    }


def summary(report: Measured) -> str:
    """The totals of a profile."""
    program = "PyTorch's eager program" if report.target == "eager" else "Thunder's program"
    lines = [
        f"{program}: {flops_text(report.forward_flops)}FLOPs forward, {flops_text(report.backward_flops)}FLOPs backward"
        + ("" if report.count == "matmul" else ", everything counted"),
        f"memory: {bytes_text(report.peak_bytes)} at most, {bytes_text(report.resident_bytes)} of it parameters, buffers and inputs; "
        f"{bytes_text(report.saved_bytes)} saved for the backward",
    ]
    if report.unknown:
        names = ", ".join(f"{name} ({n})" for name, n in report.unknown.items())
        lines.append(f"counted as zero, no FLOP rule: {names}")
    return "\n".join(lines)


def flops_text(n: int) -> str:
    """1234567 as "1.23 M"."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P", "E"))


def bytes_text(n: int) -> str:
    """2048 as "2.00 KiB"."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def _scaled(n: int, base: int, units: tuple[str, ...]) -> str:
    value, i = float(n), 0
    while value >= base and i < len(units) - 1:
        value, i = value / base, i + 1
    digits = 0 if i == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[i]}"


def dataframe(report: Measured) -> Any:
    """See `Profile.to_dataframe`."""
    pandas = pandas_for("Profile.to_dataframe")
    columns = [f.name for f in dataclasses.fields(ProfileRow) if f.name != "kernels"]
    rows = report.schedule
    data = {name: [getattr(row, name) for row in rows] for name in columns}
    extra = {
        "kernels": [tuple(k.op for k in row.kernels) for row in rows],
        "unknown": [row.unknown for row in rows],
    }
    return pandas.DataFrame({**data, **extra})
