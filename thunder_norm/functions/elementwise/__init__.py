"""Derivatives of functions element by element, each written once and used in both directions."""

from thunder_norm.functions.elementwise import binary, complex_parts, unary  # noqa: F401 - registers the rules
