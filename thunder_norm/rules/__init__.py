"""Norm rules, one file per family of operations; importing the package registers them.

Within one operation the rule registered first is tried first, hence the fixed order.
"""

# isort: off
from thunder_norm.rules import (
    linear,
    conv,
    embedding,
    attention,
    softmax,
    normalization,
    mean_square,
    written_out,
    rotary,
    elementwise,
    limits,
    powers,
    steps,
    binary,
    shape,
    indexing,
    joining,
    masking,
    casts,
    patches,
    reductions,
    pooling,
    losses,
    factories,
)

__all__ = [
    "attention",
    "binary",
    "casts",
    "conv",
    "elementwise",
    "embedding",
    "factories",
    "indexing",
    "joining",
    "limits",
    "linear",
    "losses",
    "masking",
    "mean_square",
    "normalization",
    "patches",
    "pooling",
    "powers",
    "reductions",
    "rotary",
    "shape",
    "softmax",
    "steps",
    "written_out",
]
