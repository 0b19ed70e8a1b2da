"""The first case of each rule, found once for all tests that look at every rule."""

from __future__ import annotations

from thunder_norm.audit import Case
from thunder_norm.audit.samples import cases_of
from thunder_norm.core.registry import NormedOp, NormRule

# by identity; the rule is kept with its cases, so that no other one has its place
_FOUND: dict[tuple[int, int], tuple[NormRule, list[Case]]] = {}


def first_cases(op: NormedOp, rule: NormRule) -> list[Case]:
    """One, or none where no sample of the operation runs the rule."""
    key = id(op), id(rule)
    if key not in _FOUND:
        _FOUND[key] = rule, cases_of(op, rule, 1)
    return _FOUND[key][1]
