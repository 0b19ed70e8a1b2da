"""Norm rules for functions of square matrices."""

from __future__ import annotations

import torch

from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError


@normed_op(torch.linalg.matrix_exp).register_norm(takes_complex=True)
@normed_op(torch.matrix_exp).register_norm(takes_complex=True)
def matrix_exp(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """e^A of a square matrix.

    input, output: operator norm
    Value:        e^n      (attained: A = n I)
    Sensitivity:  e^n      (attained there)
    Source:       |A^k| <= n^k in the series; the derivative along E is the integral of e^(s A) E e^((1 - s) A) over s in [0, 1]
    Raises NormMismatchError where the operator is not from the last two dimensions to themselves.
    """
    if {*input.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"a matrix exponential is one of matrices in the last two dimensions, got {input.elem_dims}")
    size = input.norm_size.exp()
    return RMSToRMSTensor(size, elem_dims=input.elem_dims, sensitivity={"input": size})
