"""Rules in words: the formulas that a report takes from docstrings."""

from __future__ import annotations

import dataclasses
import types

from thunder_norm.core.registry import registered_ops
from thunder_norm.report.explanation import Formulas, formulas_of


def test_formulas_of_a_docstring():
    def rule():
        """y = f(x).

        x: [n],  RMS
        Value:       |f| <= |x|   (attained: a spike;
                     and constants)
        Sensitivity: 1
        Source:      somewhere
        """

    def other():
        """y = g(x): as `rule`."""

    def loose():
        """y = h(x).

        Value sqrt(n), attained; sensitivity 1.

        Raises NormMismatchError for others.
        """

    other = types.FunctionType(other.__code__, {"rule": rule}, "other")
    other.__doc__ = "y = g(x): as `rule`."
    assert formulas_of(rule) == Formulas("y = f(x).", "|f| <= |x| (attained: a spike; and constants)", "1")
    assert formulas_of(other) == Formulas("y = g(x): as `rule`.", "|f| <= |x| (attained: a spike; and constants)", "1")
    assert formulas_of(loose) == Formulas("y = h(x).", "", "", "Value sqrt(n), attained; sensitivity 1.")
    assert formulas_of(lambda: None) == Formulas("", "", "")


def test_formulas_of_all_registered_rules_can_be_read():
    rules = [r.fn for op in registered_ops().values() for r in op.rules]
    found = [formulas_of(rule) for rule in rules]
    assert len(found) > 300
    assert all("\n" not in text for f in found for text in dataclasses.astuple(f))
    assert sum(bool(f.value and f.sensitivity) for f in found) > 80
