"""Gradients of primitives that Thunder has no rule for, or a wrong one; one family of operations per file."""

from thunder_norm.functions.vjp_rules import contractions, indexing, neural, reductions  # noqa: F401 - registers the rules
