"""Norm rules for functions of square matrices."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, refuse, root
from thunder_norm.scalars import times


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


for _op in (torch.matrix_power, torch.linalg.matrix_power):
    refuse(
        normed_op(_op), "a negative power of a matrix is one of its inverse, and a norm does not keep it away from singular ones"
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


def _with_eigenvalues(A: RMSToRMSTensor) -> tuple[LinfTensor, torch.Tensor]:  # noqa: N803
    """The eigenvalues of a matrix, and what its singular values are at most."""
    if {*A.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"eigenvalues are those of matrices in the last two dimensions, got {A.elem_dims}")
    n = A.norm_size
    moves = torch.full_like(n, math.inf) if current_mode() == "bound" else torch.ones_like(n)
    return LinfTensor(n, elem_dims=(), sensitivity={"A": moves}), n


@normed_op(torch.linalg.eigvals).register_norm(when=_is_global, takes_complex=True)
def eigvals(A: RMSToRMSTensor) -> LinfTensor:  # noqa: N803
    """The eigenvalues of a square matrix, complex numbers.

    A: operator norm n
    Value:       n       (attained: A = n I)
    Sensitivity: no number: of ``[[0, 1], [e, 0]]`` they are the roots of e
    Typical:     1, as of a normal matrix
    Gap:         no sensitivity is attained where there is no number
    Source:      no eigenvalue is larger than the largest singular value;  Bauer and Fike 1960
    Raises NormMismatchError where the operator is not from the last two dimensions to themselves.
    """
    return _with_eigenvalues(A)[0]


@normed_op(torch.linalg.eig).register_norm(takes_complex=True)
def linalg_eig(A: RMSToRMSTensor) -> tuple:  # noqa: N803
    """Eigenvalues, as of `eigvals`, and eigenvectors of length 1, in columns: how far these move torch does not say either.

    Value:       the values' as of `eigvals`;  1 / sqrt(N) for the RMS of a vector           (attained: an equality)
    Sensitivity: no number
    Typical:     N / n times the value for the vectors, as where the values are as far apart as their number leaves
    Gap:         that of `eigvals`
    """
    values, n = _with_eigenvalues(A)
    count = A.shape[-1]
    size = root(1 / max(count, 1))
    vectors = RMSTensor(torch.full_like(n, size), elem_dims=(-2,), sensitivity={"A": times(_of_vectors(n, count), size)})
    return values, vectors


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


def _of_vectors(size: torch.Tensor, count: int) -> torch.Tensor:
    """How far vectors move with a matrix of that size, whose `count` singular values or eigenvalues are typically that far apart over them."""
    return count / size.clamp(min=_TINY) if current_mode() != "bound" else torch.full_like(size, math.inf)


_TINY = 1e-30


@normed_op(torch.linalg.svd).register_norm(when=_is_global)
def linalg_svd(A: RMSToRMSTensor, full_matrices: bool = True, *, driver: str | None = None) -> tuple:  # noqa: N803
    """Singular vectors and values of [.., M, N]: columns of [.., M, M or K], K numbers, rows of [.., N or K, N], K the shorter side.

    A: operator norm n from RMS over N to RMS over M
    Value:       the values' as of `svdvals`;  the vectors' operator norms, that of matrices with singular values 1     (attained)
    Sensitivity: the values' as of `svdvals`;  no number for the vectors: where two values meet they turn
    Typical:     K / n times the value for the vectors, as where the values are as far apart as their number leaves
    Source:      Weyl 1912; Wedin 1972: vectors move by the difference over the gap between values
    Raises NormMismatchError where the operator is not from the last dimension to the one before.
    """
    values = svdvals(A)
    rows, columns = A.shape[-2:]
    count = min(rows, columns)

    def vectors(out: int, into: int) -> RMSToRMSTensor:
        size = root(into / max(out, 1))
        moves = times(_of_vectors(A.norm_size, count), size)
        return RMSToRMSTensor(torch.full_like(A.norm_size, size), elem_dims=(-2, -1), sensitivity={"A": moves})

    return vectors(rows, rows if full_matrices else count), values, vectors(columns if full_matrices else count, columns)


@written_as(torch.svd)
def _older_svd(input: torch.Tensor, some: bool = True, compute_uv: bool = True) -> torch.return_types.svd:  # type: ignore[name-defined]
    """`linalg_svd`, whose third result torch.svd gives as columns."""
    if not compute_uv:
        of_rows, of_columns = (input.new_zeros(*input.shape[:-2], n, n) for n in input.shape[-2:])
        return torch.return_types.svd((of_rows, torch.linalg.svdvals(input), of_columns))
    u, s, vh = torch.linalg.svd(input, full_matrices=not some)
    return torch.return_types.svd((u, s, vh.mT))


@normed_op(torch.linalg.eigh).register_norm(when=_is_global)
def linalg_eigh(A: RMSTensor, UPLO: str = "L") -> tuple:  # noqa: N803
    """Eigenvalues and eigenvectors, in columns, of the symmetric [.., N, N] whose triangle below (above, for U) is that of A.

    A: RMS r over the last two dimensions
    Value:       the values' as of `eigvalsh`;  1, the operator norm of the vectors     (attained)
    Sensitivity: the values' as of `eigvalsh`;  no number for the vectors: where two values meet they turn
    Typical:     sqrt(N) / r for the vectors, as where the values are as far apart as their number leaves
    Gap:         that of `eigvalsh`
    """
    x, c = as_kind(A, RMSTensor, (-2, -1))
    count = A.shape[-1]
    moves = times(_of_vectors(times(x.norm_size, root(count)), count), c)
    vectors = RMSToRMSTensor(torch.ones_like(x.norm_size), elem_dims=(-2, -1), sensitivity={"A": moves})
    return eigvalsh(A, UPLO), vectors
