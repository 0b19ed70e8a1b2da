"""What a report says in words: the kind of each parameter and why, and the rule of each operation with its formulas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from thunder_norm.report.rows import ReportRow


@dataclass(frozen=True)
class Formulas:
    """What a rule's docstring says: the operation, the value and the sensitivities."""

    operation: str
    value: str
    sensitivity: str
    text: str = ""  # the docstring, where it does not say these one by one


def formulas_of(rule: Callable) -> Formulas:
    """The formulas in the docstring of a rule; where it refers to another one of its file, as in "as `matmul`", of that one.

    >>> from thunder_norm.rules.linear_algebra.linear import linear
    >>> formulas_of(linear).sensitivity
    '|W|, |x|, 1'
    """
    doc = inspect.getdoc(rule) or ""
    operation = doc.partition("\n")[0]
    for source in (doc, *_referred(rule, doc)):
        value, sensitivity = _section(source, "Value"), _section(source, "Sensitivity")
        if value or sensitivity:
            return Formulas(operation, value, sensitivity)
    body = re.split(r"\n\s*(?:Raises|Source)\b", doc)[0].partition("\n")[2]
    return Formulas(operation, "", "", " ".join(body.split()))


def _referred(rule: Callable, doc: str) -> list[str]:
    names = re.findall(r"`(\w+)`", doc)
    found = [getattr(rule, "__globals__", {}).get(name) for name in names]
    return [inspect.getdoc(f) or "" for f in found if callable(f) and f is not rule]


def _section(doc: str, header: str) -> str:
    """The text after ``header:``, with the indented lines that continue it."""
    found = re.search(rf"^{header}:[ \t]*(.*(?:\n[ \t]+\S.*)*)", doc, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def explain_row(number: int, row: ReportRow) -> str:
    """One operation of a report as text: where, the norms of its inputs and what converting them costs, the rule's formulas."""
    module = row.module or "the model"
    lines = [f"{number}. {row.op} in {module}: {row.kind}{list(row.elem_dims)} {row.norm_size:.4g}"]
    if row.location:
        lines.append(f"  {row.location}")
    for a in row.arguments:
        if a.given == a.taken:
            lines.append(f"  {a.name}: {a.given}")
        else:
            lines.append(f"  {a.name}: {a.given}, taken as {a.taken}" + ("" if a.factor is None else f", factor {a.factor:.4g}"))
    rule = row.rule
    if rule is not None:
        formulas = formulas_of(rule)
        lines.append(f"  rule {rule.__module__.rpartition('.')[2]}.{rule.__name__}: {formulas.operation}")
        if formulas.value:
            lines.append(f"    value        {formulas.value}")
        if formulas.sensitivity:
            lines.append(f"    sensitivity  {formulas.sensitivity}")
        if formulas.text:
            lines.append(f"    {formulas.text}")
    return "\n".join(lines)
