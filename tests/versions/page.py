"""docs/versions.md, from what is kept of the runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.parts import exchanged

from .rows import ROWS, Row

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"

BEGIN = "<!-- written by python -m tests.versions -->"
HEADER = "| | Python | torch | lightning-thunder | transformers | torchao | tests | passed | failed | skipped | commit |"


def file_of(row: Row) -> Path:
    """Where the result of a row is kept."""
    return RESULTS / (re.sub(r"\W+", "_", row.name.lower()) + ".json")


def render() -> str:
    """The table, a line for each row that was run, and what failed."""
    lines = [HEADER, "| --- " * (HEADER.count("|") - 1) + "|"]
    failed: list[str] = []
    for row in ROWS:
        if file_of(row).exists():
            r = json.loads(file_of(row).read_text())
            failed += [f"- {row.name}: `{name}`" for name in r["failed"]]
            counts = [r["counts"].get("passed", 0), r["counts"].get("failed", 0) + r["counts"].get("error", 0)]
            cells = [row.name, *r["versions"].values(), r["tests"], *counts, r["counts"].get("skipped", 0), r["commit"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, *(["", "Failed at that commit:", "", *failed] if failed else [])])


def write_page() -> None:
    """Write the table of docs/versions.md again."""
    PAGE.write_text(exchanged(PAGE.read_text(), BEGIN, render()))
