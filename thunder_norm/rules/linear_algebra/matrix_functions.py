"""Norm rules for functions of square matrices."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, refuse, times


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


def _is_global(args: dict[str, Any]) -> bool:
    """At the data the derivative is known."""
    return not are_local(args)


def _is_positive_power(args: dict[str, Any]) -> bool:
    return args["n"] >= 0 and _is_global(args)


@normed_op(torch.matrix_power).register_norm(when=_is_positive_power)
@normed_op(torch.linalg.matrix_power).register_norm(when=_is_positive_power)
def matrix_power(A: RMSToRMSTensor, n: int) -> RMSToRMSTensor:  # noqa: N803
    """A^n of a square matrix, n not negative.

    A, output: operator norm m
    Value:        m^n            (attained: A = m I)
    Sensitivity:  n m^(n - 1)    (attained there)
    Source:       the derivative along E is the sum of A^k E A^(n - 1 - k)
    Raises NormMismatchError where the operator is not from the last two dimensions to themselves.
    """
    if {*A.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"a matrix power is one of matrices in the last two dimensions, got {A.elem_dims}")
    size = A.norm_size.pow(n)
    return RMSToRMSTensor(size, elem_dims=A.elem_dims, sensitivity={"A": n * A.norm_size.pow(max(n - 1, 0))})


refuse(
    normed_op(torch.linalg.matrix_power),
    "a negative power of a matrix is one of its inverse, and a norm does not keep it away from singular ones",
)


@normed_op(torch.linalg.svdvals).register_norm(when=_is_global)
def svdvals(A: RMSToRMSTensor) -> LinfTensor:  # noqa: N803
    """The singular values of [.., M, N].

    A: operator norm n from RMS over N to RMS over M
    Value:       n sqrt(M / N), the largest of them     (attained)
    Sensitivity: sqrt(M / N)                            (attained: along A)
    Source:      Weyl 1912: no singular value moves by more than the largest of the difference
    Raises NormMismatchError where the operator is not from the last dimension to the one before.
    """
    if A.elem_dims != (-2, -1):
        raise NormMismatchError(f"singular values are those of matrices in the last two dimensions, got {A.elem_dims}")
    c = math.sqrt(A.shape[-2] / max(A.shape[-1], 1))
    return LinfTensor(times(A.norm_size, c), elem_dims=(), sensitivity={"A": c})


@normed_op(torch.linalg.eigvalsh).register_norm(when=_is_global)
def eigvalsh(A: RMSTensor, UPLO: str = "L") -> RMSTensor:  # noqa: N803
    """The eigenvalues of the symmetric [.., N, N] whose triangle below (above, for U) is that of A.

    A: RMS r over the last two dimensions
    Value:       sqrt(2 N) r     (attained: all below the diagonal)
    Sensitivity: sqrt(2 N)       (attained there, along itself)
    Gap:         A that is symmetric has sqrt(N) r; that is not known
    Source:      Hoffman and Wielandt 1953: eigenvalues move by at most the Frobenius norm of the difference, of which A's triangle has half
    """
    x, c = as_kind(A, RMSTensor, (-2, -1))
    gain = math.sqrt(2 * A.shape[-1])
    return RMSTensor(times(x.norm_size, gain), elem_dims=(-1,), sensitivity={"A": gain * c})
