"""docs/models.json, what the runs found, and docs/models.md, the table of it."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.parts import exchanged

from .case import MODELS, SOURCES
from .columns import COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FILE = DOCS / "models.md", DOCS / "models.json"
BEGIN = "<!-- written by python -m tests.models_zoo -->"
# what is asked of a model; "plain", Thunder without us, is there to compare with
OURS = tuple(column for column in COLUMNS if column != "plain")
TITLES = {
    "real": "real mode",
    "normed": "normed mode: bound, actual, ratio",
    "report": "report: operations, ratio",
    "norm_map": "norm map: norm",
    "bound": "modular norm, bound: unreached, smallest target",
    "typical": "typical",
    "modula": "modula",
    "steps": "five steps: loss",
    "training": "twelve steps: loss, AdamW's",
    "plain": "plain Thunder",
    "seconds": "seconds",
}
PACKAGES = ("torch", "lightning-thunder", "transformers", "torchvision", "timm")
# of what fails for a reason that no rule could mend
WHY = {
    "LISTA": "A threshold is a parameter, which may be negative: u and -u are then at least twice its modulus apart for the smallest u.",
    "orthogonal recurrent network": "The bias of its modReLU is a parameter, which may be positive: the same.",
    "JetMoE": "How many tokens each expert gets are sizes of tensors, and depend on the values of parameters, which have none on meta.",
    "Nystromformer": (
        "Six iterations towards a pseudoinverse multiply 4^6 matrices, each bounded by a number above 1: a bound beyond floats. "
        "That they converge is a fact about one iteration, which no norm of its parts has."
    ),
    "orthogonalized weight": (
        "Taken as an operator, a weight over its own length and an epsilon is bounded by one over the epsilon; "
        "five steps of degree five from there are beyond floats."
    ),
    "spectrally normed critic": "u^T W v is 0 for some weights of norm 1, and what is divided by it has no bound.",
    "spline flow": (
        "That bins have a width is known of their shares, whose running sums are written over at the ends; that a parabola between two "
        "positive slopes stays above 0 is a fact about the whole of it."
    ),
    "channel energies": "What is raised to a power has a parameter added to it, which may be negative, as may be the energies.",
    "Kalman filter": (
        "That (I - K C) P stays positive for all parameters, and with it s invertible, is an identity of matrices: "
        "with any other K of the same norm it does not."
    ),
}
Row = dict[str, Any]
TINY = 1e-6  # the part of a step that ModularNorm warns of


def installed() -> dict[str, str]:
    """The versions that rows are made with."""
    return {"Python": platform.python_version(), **{p: version(p) for p in PACKAGES}}


def load() -> dict[str, Row]:
    """The rows of the file."""
    return json.loads(FILE.read_text())["models"] if FILE.exists() else {}


def versions() -> dict[str, str]:
    """Those that the file's rows were made with."""
    return json.loads(FILE.read_text())["versions"]


def save(rows: dict[str, Row], made_with: dict[str, str]) -> None:
    """The rows of models that there are, in their order; figures to six digits."""
    kept = {name: _rounded(rows[name]) for name in MODELS if name in rows}
    FILE.write_text(json.dumps({"versions": made_with, "models": kept}, indent=1) + "\n")


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return float(f"{x:.6g}") if isinstance(x, float) else x


def succeeds(row: Row, column: str) -> bool:
    return "error" not in row[column]


def is_asked(row: Row, column: str) -> bool:
    """Whether the column was run, and eager PyTorch can do what it does."""
    return column in row and not row[column].get("error", "").startswith("NotInEager")


def summary(name: str, row: Row) -> str:
    """One line for the terminal."""
    failures = [f"{column}: {cell['error']}" for column, cell in row.items() if "error" in cell]
    return f"{name}: " + ("all" if not failures else "; ".join(failures))


def number(x: float) -> str:
    return f"{x:.3g}"


def cell(row: Row, column: str) -> str:
    """What the table says of one column of a model."""
    found = row.get(column)
    if found is None:
        return "not run"
    if not is_asked(row, column):
        return "-"
    if "error" in found:
        return "no"
    match column:
        case "real" | "plain":
            return "yes"
        case "normed":
            return f"{number(found['bound'])}, {number(found['actual'])}, {number(found['ratio'])}"
        case "report":
            ratio = found.get("ratio")
            return f"{found['operations']}, {'-' if ratio is None else number(ratio)}"
        case "norm_map":
            return number(found["norm"])
        case "bound" | "typical" | "modula":
            return f"{found['unreached']}, {number(found['smallest'])}"
        case "steps":
            return number(found["loss"])
        case "training":
            return f"{number(found['modular'])}, {number(found['adamw'])}"
    raise AssertionError(column)


def line(name: str, row: Row) -> str:
    """A row of the table."""
    seconds = number(row["real"]["seconds"]) if "seconds" in row.get("real", {}) else "-"
    cells = [name, *(cell(row, column) for column in TITLES if column != "seconds"), seconds]
    return "| " + " | ".join(cells) + " |"


def failures(rows: dict[str, Row]) -> list[str]:
    """One line for each cause, the most frequent first: which models, and what plain Thunder says where our traces fail."""
    models: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, row in rows.items():
        for column in OURS:
            if is_asked(row, column) and not succeeds(row, column):
                models[row[column]["error"]].setdefault(name, []).append(column)
    found = []
    for text, columns in sorted(models.items(), key=lambda item: -len(item[1])):
        line = f"- {len(columns)}: `{text}`: " + ", ".join(columns) + "."
        own = [name for name in columns if {"real", "normed"} & set(columns[name]) and "error" in rows[name].get("plain", {})]
        if own:
            line += f" Plain Thunder, of {own[0]}: `{rows[own[0]]['plain']['error']}`."
        found.append(" ".join([line, *(f"{name}: {WHY[name]}" for name in columns if name in WHY)]))
    return found


def tiny_targets(rows: dict[str, Row]) -> list[str]:
    """The models with a target below a millionth in mode "typical", and it."""
    found = {name: row["typical"].get("smallest", math.inf) for name, row in rows.items() if "typical" in row}
    return [f"{name} ({number(t)})" for name, t in found.items() if t < TINY]


def trained_less(rows: dict[str, Row]) -> list[str]:
    """The models whose loss twelve steps lower less than half as much as AdamW's do, and what is left of it after both."""
    found = {name: row["training"] for name, row in rows.items() if "training" in row and succeeds(row, "training")}
    return [
        f"{name} ({cell({'training': t}, 'training')})" for name, t in found.items() if 1 - t["modular"] < (1 - t["adamw"]) / 2
    ]


def small_steps(rows: dict[str, Row]) -> list[str]:
    """What the table says of steps that are small, or lower a loss little."""
    return [
        f"- A target below {TINY:g} in mode `typical`: {', '.join(tiny_targets(rows)) or 'none'}.",
        f"- Twelve steps lower the loss less than half as much as AdamW's: {', '.join(trained_less(rows)) or 'none'}.",
    ]


def counts(rows: dict[str, Row]) -> list[str]:
    """How many models of each source succeed in each column."""
    by_source = {source: [row for name, row in rows.items() if MODELS[name].source == source] for source in SOURCES}
    columns = [column for column in TITLES if column != "seconds"]
    head = [
        "| | models | " + " | ".join(TITLES[c].partition(":")[0] for c in columns) + " |",
        "| --- " * (2 + len(columns)) + "|",
    ]
    lines = []
    for source, found in [*by_source.items(), ("all", list(rows.values()))]:
        run = Counter(c for row in found for c in columns if is_asked(row, c))
        good = Counter(c for row in found for c in columns if c in row and succeeds(row, c))
        cells = (f"{good[c]}" if run[c] == len(found) else f"{good[c]} of {run[c]}" for c in columns)
        lines.append(f"| {source} | {len(found)} | " + " | ".join(cells) + " |")
    return head + lines


def render(rows: dict[str, Row]) -> str:
    """Counts, versions, the tables and the failures."""
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    parts = [*counts(rows), "", f"Measured with {packages}, CPU, one thread."]
    for source in SOURCES:
        parts += ["", f"## {source}", "", "| model | " + " | ".join(TITLES.values()) + " |", "| --- " * (1 + len(TITLES)) + "|"]
        parts += [line(name, row) for name, row in rows.items() if MODELS[name].source == source]
    parts += ["", "## Small steps", "", *small_steps(rows)]
    return "\n".join([*parts, "", "## What fails, and why", "", *failures(rows)])


def write(rows: dict[str, Row]) -> None:
    """The page, from the rows, which are in the file."""
    PAGE.write_text(exchanged(PAGE.read_text(), BEGIN, render(rows)))
