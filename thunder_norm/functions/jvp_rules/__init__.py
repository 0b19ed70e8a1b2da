"""How primitives push tangents forward, one family of operations per file."""

from thunder_norm.functions.jvp_rules import (  # noqa: F401 - registers the rules
    composites,
    contractions,
    indexing,
    linear,
    reductions,
)
