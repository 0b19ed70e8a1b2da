"""Products of rows with the matrices of their groups: a mixture of experts whose tokens are sorted by expert."""

from __future__ import annotations

import torch

from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules.linear_algebra.contraction import Bound, contract, scaled


@normed_op(torch.ops.aten._grouped_mm.default).register_norm(
    allow_plain_tensors="constant", lift_dims={"mat2": lambda t, args: (-1, -2)}
)
def grouped_mm(
    input: RMSTensor, mat2: RMSToRMSTensor, offs: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> NormedTensor:
    """y_t = x_t W_e, e the group of row t.

    input: [tokens, in], RMS over the last dimension;  mat2: [groups, in, out], largest operator norm of a W_e over (-1, -2)
    Value:        |y| <= |x| |W|      (attained: rank-one W_e)
    Sensitivity:  |W|, |x|
    Untried:      the kernel takes no doubles; the rule is searched as that of the same product by hand
    Source:       aten::_grouped_mm; transformers::grouped_mm_fallback is the same
    Raises NormMismatchError for groups of other shapes.
    """
    if input.ndim != 2 or mat2.ndim != 3:
        raise NormMismatchError(
            f"a grouped product has a rule for rows and a stack of matrices, not for {input.ndim} and {mat2.ndim} dimensions"
        )
    bound = contract(input, mat2, ("t", "i"), ("e", "i", "o"), ("e", "t", "o"))  # by all experts, of which a row takes one
    return scaled(Bound(bound.kind, tuple(d for d in bound.elem_dims if d >= -2), bound.factor), input, mat2, ("input", "mat2"))
