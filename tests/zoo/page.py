"""The generated part of docs/subclasses.md."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.parts import END

PAGE = Path(__file__).parents[2] / "docs" / "subclasses.md"
BEGIN = "<!-- written by python -m tests.zoo --write -->"
HEADER = "| program | subclasses as | torch.compile: forward | backward | thunder_norm: forward | backward |"


@dataclass(frozen=True)
class Row:
    """One program: forward and backward, for torch.compile and for us."""

    name: str
    roles: str
    compiled: tuple[str, str]
    ours: tuple[str, str]

    def markdown(self) -> str:
        return "| " + " | ".join((self.name, self.roles, *self.compiled, *self.ours)) + " |"


def parsed(line: str) -> Row:
    """The inverse of `Row.markdown`."""
    name, roles, *cells = (cell.strip() for cell in line.strip().strip("|").split(" | "))
    return Row(name, roles, (cells[0], cells[1]), (cells[2], cells[3]))


def render(rows: Sequence[Row]) -> str:
    """Counts, versions and the table."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning-thunder", "torchao"))
    lines = [
        f"{len(rows)} programs that run in eager mode, {sum(r.ours[1] != '-' for r in rows)} of them with gradients:",
        "",
        "| | forward | backward |",
        "| --- | --- | --- |",
        *(f"| {who} | {count(rows, who, 0)} | {count(rows, who, 1)} |" for who in ("torch.compile", "thunder_norm")),
        "",
        f"Measured with {packages}, Python {platform.python_version()}, CPU.",
        "",
        HEADER,
        "| --- | --- | --- | --- | --- | --- |",
        *(row.markdown() for row in rows),
    ]
    return "\n".join(lines)


def count(rows: Sequence[Row], who: str, direction: int) -> int:
    """How many programs work."""
    return sum((r.ours if who == "thunder_norm" else r.compiled)[direction] == "yes" for r in rows)


def rows_of(page: str) -> list[Row]:
    """The rows of a page's table."""
    _, _, table = page.partition(HEADER)
    lines = table.partition(END)[0].strip().splitlines()
    return [parsed(line) for line in lines[1:] if line.startswith("|")]
