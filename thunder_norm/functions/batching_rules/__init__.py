"""Batching rules, one family of operations a file.

A rule is handed values whose batch dimension, where they have one, is the first; see ``register_batching``.
"""

from thunder_norm.functions.batching_rules import (  # noqa: F401 - registers the rules
    convolution,
    elementwise,
    indexing,
    neural,
    products,
    reductions,
    scans,
    shapes,
)
