"""Two reports of the same program beside each other: of two checkpoints, of two inputs."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thunder_norm.errors import NormMismatchError, some_of, with_details
from thunder_norm.report.rows import Findings, ReportRow
from thunder_norm.tables import pandas_for, shortened

_COMPARED = ("norm_size", "sensitivity", "actual")
_HEADS = ("norm", "sensitivity", "actual")
MAX_ROWS = 60


@dataclass(frozen=True)
class Difference:
    """One operation, or one parameter, in two reports.

    Attributes:
        name: module and operation, numbered where the module does that several times; or a parameter's name.
        before: its row in the first report.
        after: its row in the second.
    """

    name: str
    before: ReportRow
    after: ReportRow

    @property
    def is_of_one_kind(self) -> bool:
        """Whether both have the same norm: what is in different ones is not compared."""
        return (self.before.kind, self.before.elem_dims) == (self.after.kind, self.after.elem_dims)

    def ratio(self, what: str) -> float:
        """After over before, of "norm_size", "sensitivity" or "actual"; 1 where both are 0, NaN where one is not known."""
        before, after = getattr(self.before, what), getattr(self.after, what)
        if before is None or after is None or not self.is_of_one_kind:
            return math.nan
        if before == after or math.isnan(before) and math.isnan(after):
            return 1.0
        return math.nan if math.isnan(after) else after / before if before else math.inf

    @property
    def change(self) -> float:
        """By how many times one of the three is larger or smaller: at least 1; NaN where something became NaN or stopped to be."""
        ratios = [self.ratio(what) for what in _COMPARED if getattr(self.before, what) is not None]
        sizes = [math.inf if r in (0, math.inf) else max(r, 1 / r) for r in ratios]
        return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=1.0)


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `NormReport.compare` returns; prints the largest differences first.

    Attributes:
        operations: those that both reports have, in order.
        parameters: the same for parameters, by name.
        only_before: names of operations and parameters that the second report lacks.
        only_after: names of those that the first lacks.
    """

    operations: tuple[Difference, ...]
    parameters: Mapping[str, Difference]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def sorted(self) -> list[Difference]:
        """Operations and parameters, those that changed most first; what became NaN before all."""
        found = [*self.operations, *self.parameters.values()]
        return sorted(found, key=lambda d: -math.inf if math.isnan(d.change) else -d.change)

    def table(self, *, width: int = 120, max_rows: int | None = MAX_ROWS) -> str:
        """Ratios as text, largest change first.

        Args:
            width: in characters.
            max_rows: how many rows to show, half of them from the end; all if None.

        Raises:
            NormMismatchError: max_rows is negative.
        """
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width)
        console.print(self._rich(max_rows))
        return console.file.getvalue()  # type: ignore[attr-defined]

    def _rich(self, max_rows: int | None) -> Any:
        from rich.table import Table
        from rich.text import Text

        missing = [(f"only {when}", names) for when, names in (("before", self.only_before), ("after", self.only_after)) if names]
        lines = [f"{when}: {some_of(names, 6)}" for when, names in missing]
        table = Table(caption=Text("\n".join(["after / before", *lines])), header_style="bold", row_styles=["", "dim"])
        table.add_column("", overflow="fold")
        for head in _HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        for count, row in shortened(self.sorted(), max_rows):
            if row is None:
                table.add_row(f"... {count} more")
                continue
            ratios = [row.ratio(what) for what in _COMPARED]
            cells = ["" if getattr(row.before, what) is None else f"{r:.4g}" for what, r in zip(_COMPARED, ratios, strict=True)]
            table.add_row(Text(row.name), *map(Text, cells))
        return table

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.operations)} operations and {len(self.parameters)} parameters>"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield self._rich(MAX_ROWS)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each operation and parameter (needs pandas, the extra `dataframe`).

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = pandas_for("Comparison.to_dataframe")
        found = [*self.operations, *self.parameters.values()]
        columns: dict[str, list[Any]] = {"name": [d.name for d in found]}
        for what in _COMPARED:
            columns[f"{what}_before"] = [getattr(d.before, what) for d in found]
            columns[f"{what}_after"] = [getattr(d.after, what) for d in found]
            columns[f"{what}_ratio"] = [d.ratio(what) for d in found]
        return pandas.DataFrame(columns)


def compared(before: Findings, after: Findings) -> Comparison:
    """See `NormReport.compare`."""
    scopes = [f"{r.scope!r}" + ("" if r.radius is None else f" {r.radius}") for r in (before, after)]
    if scopes[0] != scopes[1]:
        raise NormMismatchError(
            with_details(
                f"reports of different scopes: {scopes[0]} and {scopes[1]}",
                why="their sensitivities are of different things",
                instead="norm_report(..., sensitivity=...) with the same one for both",
            )
        )
    counts = Counter((r.module, r.op) for r in before.rows) | Counter((r.module, r.op) for r in after.rows)
    first, second = _named(before.rows, counts), _named(after.rows, counts)
    return Comparison(
        tuple(Difference(name, row, second[name]) for name, row in first.items() if name in second),
        {n: Difference(n, row, after.parameters[n]) for n, row in before.parameters.items() if n in after.parameters},
        _lacking((first, before.parameters), (second, after.parameters)),
        _lacking((second, after.parameters), (first, before.parameters)),
    )


def _lacking(one: tuple[Mapping, Mapping], other: tuple[Mapping, Mapping]) -> tuple[str, ...]:
    return tuple(name for mine, theirs in zip(one, other, strict=True) for name in mine if name not in theirs)


def _named(rows: Iterable[ReportRow], total: Counter) -> dict[str, ReportRow]:
    """Operations by module, name and how often the module has done that before, where one of the reports has several."""
    met: Counter = Counter()
    found = {}
    for row in rows:
        key = row.module, row.op
        met[key] += 1
        found[": ".join(filter(None, key)) + (f" #{met[key]}" if total[key] > 1 else "")] = row
    return found
