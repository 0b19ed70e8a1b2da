"""Norm rules for norms of matrices."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, dims_tuple, negative, root
from thunder_norm.rules.reducing.reductions import Dim, reduction, vector_norm
from thunder_norm.scalars import times


def _is_of_matrix(ord: float | str | None, input: torch.Tensor, dim: Dim) -> bool:
    return (input.ndim if dim is None else 1 if isinstance(dim, int) else len(dim)) == 2 and ord not in (None, "fro", "nuc")


def _is_spectral(args: dict[str, Any]) -> bool:
    return args["ord"] in (2, -2) and _is_of_matrix(args["ord"], args["input"], args["dim"])


def _nuclear_norm(x: RMSTensor, dim: Dim, keepdim: bool) -> RMSTensor:
    """Sum of K singular values: at most sqrt(K) times the Frobenius norm (attained: an orthogonal matrix)."""
    reduced = dims_tuple(dim, x.ndim)
    if len(reduced) != 2:
        raise NormMismatchError(f"the nuclear norm is of a matrix, not over {len(reduced)} dimensions")
    return reduction(x, dim, keepdim, root(ed.numel(x.shape, reduced) * min(x.shape[d] for d in reduced)))


def _of_sums(x: RMSTensor, ord: float, dim: Dim) -> LinfTensor:
    """The largest (smallest) of the sums of moduli along rows, or along columns for 1."""
    if abs(ord) != 1 and not math.isinf(ord):
        raise NormMismatchError(f"a matrix has no norm {ord!r}: 1, 2, inf, the negative ones of these, 'fro' and 'nuc' are known")
    rows, columns = (-2, -1) if dim is None else [negative(d, x.ndim) for d in dim]  # type: ignore[union-attr]
    along = rows if abs(ord) == 1 else columns
    length = x.shape[along]
    found, c = as_kind(x, RMSTensor, (along,))
    return LinfTensor(times(found.norm_size, length), elem_dims=(), sensitivity={"input": c * length})


@normed_op(torch.linalg.norm).register_norm(when=_is_spectral)
@normed_op(torch.linalg.matrix_norm).register_norm(when=_is_spectral)
def spectral_norm(
    input: RMSToRMSTensor,
    ord: float | str | None = "fro",
    dim: Dim = (-2, -1),
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> LinfTensor:
    """The largest singular value of matrices [M, N], the smallest for -2.

    input: operator norm n from RMS over N to RMS over M
    Value:       n sqrt(M / N)     (attained: for 2, and for -2 by multiples of an orthogonal matrix)
    Sensitivity: sqrt(M / N)       (attained there)
    Source:      Weyl 1912: no singular value moves by more than the largest of the difference
    Raises NormMismatchError where the operator is not over these dimensions.
    """
    if {*input.elem_dims} != {*dims_tuple(dim, input.ndim)}:
        raise NormMismatchError(f"the spectral norm over {dim} is not that of the operators over {input.elem_dims}")
    out, into = (input.shape[d] for d in input.elem_dims)
    c = math.sqrt(out / max(into, 1))
    return LinfTensor(times(input.norm_size, c), elem_dims=(), sensitivity={"input": c})


@normed_op(torch.linalg.matrix_norm).register_norm
def matrix_norm(
    input: RMSTensor, ord: float | str = "fro", dim: Dim = (-2, -1), keepdim: bool = False, dtype: torch.dtype | None = None
) -> RMSTensor | LinfTensor:
    """Norms of matrices [M, N], K the shorter side: as `linalg_norm` says."""
    return linalg_norm(input, ord, dim, keepdim, dtype)


@normed_op(torch.linalg.norm).register_norm
def linalg_norm(
    input: RMSTensor, ord: float | str | None = None, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> RMSTensor | LinfTensor:
    """`linalg_vector_norm`, and norms of matrices [M, N] of RMS n, K the shorter side.

    Value:       Frobenius and 2 (-2) as of a vector, the nuclear norm sqrt(K) times that         (attained: constants, orthogonal ones)
                 inf (-inf), the largest sum of a row: N n, n the largest RMS of rows; 1 (-1): M n, of columns   (attained: constants)
    Sensitivity: the same factor: norms are Lipschitz in themselves, and so is the smallest of sums
    """
    if ord == "nuc":
        return _nuclear_norm(input, dim, keepdim)
    if ord in (None, "fro", 2, -2):  # no singular value is above the Frobenius norm
        return vector_norm(input, 2.0, dim, keepdim)
    if isinstance(ord, str):
        raise NormMismatchError(f"a matrix has no norm {ord!r}: 1, 2, inf, the negative ones of these, 'fro' and 'nuc' are known")
    if _is_of_matrix(ord, input, dim):
        return _of_sums(input, ord, dim)
    return vector_norm(input, ord, dim, keepdim)


@normed_op(torch.norm).register_norm
def norm(
    input: RMSTensor, p: float | str | None = "fro", dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> RMSTensor:
    """`linalg_vector_norm`, the Frobenius and the nuclear norm by their older name."""
    if p == "nuc":
        return _nuclear_norm(input, dim, keepdim)
    if isinstance(p, str) and p != "fro":
        raise NormMismatchError(f"the matrix norm {p!r}: only vector norms, 'fro' and 'nuc' have a rule")
    return vector_norm(input, 2.0 if p is None or isinstance(p, str) else p, dim, keepdim)
