"""The part of docs/subclasses.md about operators of torch's database: ``python -m tests.op_coverage --write`` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.parts import exchanged

PAGE = Path(__file__).parents[1] / "docs" / "subclasses.md"
BEGIN = "<!-- written by python -m tests.op_coverage --write -->"


def compiled(function: Callable, check: Callable[[Callable], None]) -> str:
    """What torch.compile makes of a program without breaking the graph: ``yes``, or what it raises."""
    torch._dynamo.reset()
    try:
        check(torch.compile(function, backend="aot_eager", fullgraph=True))
    except Exception as e:  # noqa: BLE001 - that is what the table says
        return f"fails: {type(e).__name__}"
    return "yes"


def render(results: Mapping[str, tuple[str, str]], of_compile: Mapping[str, str]) -> str:
    """Counts, versions, and a row for each operator that does not agree."""
    counted = {name: r for name, r in results.items() if r[0] != "skipped"}
    rest = {name: reason for name, (verdict, reason) in sorted(counted.items()) if verdict != "yes"}
    return "\n".join(
        [
            f"{len(counted) - len(rest)} of {len(counted)} operators agree; measured with torch {version('torch')}. The others:",
            "",
            "| operator | torch.compile, fullgraph | thunder_norm |",
            "| --- | --- | --- |",
            *(f"| {name} | {of_compile[name]} | {shown(reason)} |" for name, reason in rest.items()),
        ]
    )


def shown(reason: str) -> str:
    """A reason as a cell of the table."""
    kind, _, message = reason.partition(": ")
    return f"refused: {message}" if kind.startswith("Unsupported") else reason


def write(results: Mapping[str, tuple[str, str]], of_compile: Mapping[str, str]) -> None:
    """Exchange the part of the page."""
    PAGE.write_text(exchanged(PAGE.read_text(), BEGIN, render(results, of_compile)))
