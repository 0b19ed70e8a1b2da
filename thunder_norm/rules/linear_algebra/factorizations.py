"""Factors of matrices that say whether they could be found, orthogonal factors, and what systems without a solution come nearest to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, is_typical, refuse, root
from thunder_norm.rules.linear_algebra import inverses
from thunder_norm.rules.linear_algebra.inverses import SINGULAR, keeps_away
from thunder_norm.scalars import times

_TINY = 1e-30


# -- with a number that says whether there is a result, which has no norm ------------------------------------------------


@normed_op(torch.linalg.cholesky_ex).register_norm(when=keeps_away("input", is_symmetric=True))
def cholesky_ex_away(input: RMSToRMSTensor, *, upper: bool = False, check_errors: bool = False) -> tuple:
    """`cholesky_away`.

    Gap:         that of `cholesky_away`
    """
    return inverses.cholesky_away(input, upper=upper), None


@normed_op(torch.linalg.cholesky_ex).register_norm(when=is_typical)
def cholesky_ex(input: RMSToRMSTensor, *, upper: bool = False, check_errors: bool = False) -> tuple:
    """`cholesky`.

    Untried:     in mode "bound" it does not apply
    """
    return inverses.cholesky(input, upper=upper), None


@normed_op(torch.linalg.inv_ex).register_norm(when=keeps_away("input"))
def inv_ex_away(input: RMSToRMSTensor, *, check_errors: bool = False) -> tuple:
    """`inverse_away`.

    Gap:         that of `solve_operator`
    """
    return inverses.inverse_away(input), None


@normed_op(torch.linalg.inv_ex).register_norm(when=is_typical)
def inv_ex(input: RMSToRMSTensor, *, check_errors: bool = False) -> tuple:
    """`inv`.

    Untried:     in mode "bound" it does not apply
    """
    return inverses.inv(input), None


@normed_op(torch.linalg.solve_ex).register_norm(when=keeps_away("A"))
def solve_ex_away(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True, check_errors: bool = False) -> tuple:  # noqa: N803
    """`solve_away`.

    Gap:         that of `solve_operator`
    """
    return inverses.solve_away(A, B, left=left), None


@normed_op(torch.linalg.solve_ex).register_norm(when=is_typical)
def solve_ex(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True, check_errors: bool = False) -> tuple:  # noqa: N803
    """`solve`.

    Untried:     in mode "bound" it does not apply
    """
    return inverses.solve(A, B, left=left), None


# -- what comes nearest to a solution ------------------------------------------------------------------------------------


@normed_op(torch.linalg.lstsq).register_norm(when=is_typical)
def lstsq(A: RMSToRMSTensor, B: RMSTensor, rcond: float | None = None, *, driver: str | None = None) -> tuple:  # noqa: N803
    """X for which ``|A X - B|`` is smallest, and what else torch gives, without norms.  Typical: `solve`, by the pseudoinverse.

    Untried:     in mode "bound" it does not apply
    """
    return inverses.solve(A, B), None, None, None


# -- orthogonal factors ----------------------------------------------------------------------------------------------------


def _orthogonal(a: RMSToRMSTensor, complete: bool) -> tuple[RMSToRMSTensor, RMSToRMSTensor]:
    if {*a.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"orthogonal factors are those of matrices in the last two dimensions, got {a.elem_dims}")
    rows, columns = a.shape[-2:]
    inner = rows if complete else min(rows, columns)
    of_q, of_r = root(inner / max(rows, 1)), root(columns / max(inner, 1))
    out, into = (a.shape[d] for d in a.elem_dims)
    unit = root(out / max(into, 1))  # a singular value of a matrix of norm 1
    largest = times(a.norm_size, unit)
    moves = torch.full_like(largest, math.inf if current_mode() == "bound" else math.sqrt(2) * unit)
    turns = times(moves / largest.clamp(min=_TINY), of_q)
    q = RMSToRMSTensor(torch.full_like(largest, of_q), elem_dims=(-2, -1), sensitivity={"A": turns})
    return q, RMSToRMSTensor(times(largest, of_r), elem_dims=(-2, -1), sensitivity={"A": times(moves, of_r)})


@normed_op(torch.linalg.qr).register_norm(when=lambda args: not are_local(args))
def linalg_qr(A: RMSToRMSTensor, mode: str = "reduced") -> tuple:  # noqa: N803
    """Q with orthonormal columns, [.., M, K], and R above the diagonal, [.., K, N], of A = Q R, [.., M, N]: K the shorter side.

    A: operator norm, of singular values at most s
    Value:       sqrt(K / M) for Q, whose singular values are 1;  s sqrt(N / K) for R, whose are A's     (attained: an equality)
    Sensitivity: no number: where the columns of A depend on each other those of Q turn
    Typical:     as of s times an orthogonal matrix, in units of singular values sqrt(2) / s for Q, and sqrt(2) for R
    Gap:         no sensitivity is attained where there is no number
    Source:      Stewart 1977: ``|dQ|_F <= sqrt(2) |A^-1| |dA|_F``, and ``|dR|_F <= sqrt(2) |A| |A^-1| |dA|_F``
    Raises NormMismatchError where the operator is not one of matrices in the last two dimensions.
    """
    q, r = _orthogonal(A, mode == "complete")
    return None if mode == "r" else q, r


@normed_op(torch.linalg.polar).register_norm(when=lambda args: not are_local(args))
def linalg_polar(A: RMSTensor) -> tuple:  # noqa: N803
    """U with orthonormal columns, [.., M, N], and H, symmetric and not negative, [.., N, N], of A = U H.

    A: RMS r over the last two dimensions
    Value:       sqrt(N / M), the operator norm of U;  r sqrt(M / N) for H                        (attained: an equality)
    Sensitivity: no number for U, which turns where A has small singular values;  ``sqrt(2 M / N)`` for H
    Typical:     sqrt(2) / r times the value for U
    Gap:         matrices whose H moves sqrt(2) times as far in Frobenius norm have a singular value of 0
    Source:      Araki and Yamagami 1981: ``| |A| - |B| |_F <= sqrt(2) |A - B|_F``
    """
    a, c = as_kind(A, RMSTensor, (-2, -1))
    rows, columns = A.shape[-2:]
    of_u, of_h = root(columns / max(rows, 1)), root(rows / max(columns, 1))
    r = a.norm_size
    turns = torch.full_like(r, math.inf) if current_mode() == "bound" else times(math.sqrt(2) / r.clamp(min=_TINY), of_u * c)
    u = RMSToRMSTensor(torch.full_like(r, of_u), elem_dims=(-2, -1), sensitivity={"A": turns})
    return u, RMSTensor(times(r, of_h), elem_dims=(-2, -1), sensitivity={"A": math.sqrt(2) * of_h * c})


# -- inverses of what has a factor ---------------------------------------------------------------------------------------


@normed_op(torch.cholesky_inverse).register_norm(when=inverses.is_of_factor("input"))
def cholesky_inverse_away(input: RMSToRMSTensor, upper: bool = False) -> RMSToRMSTensor:
    """``(L L^T)^-1``, where no eigenvalue of ``L L^T`` is less than c.

    Value:       1 / c               (attained: L = sqrt(c) I)
    Sensitivity: 2 |L| / c^2         (attained there)
    Source:      ``dX = -X (dL L^T + L dL^T) X``
    Gap:         that of `solve_operator`
    """
    inverse = inverses.smallest_eigenvalue(input).reciprocal()
    moves = 2 * input.norm_size * inverse.square()
    return RMSToRMSTensor(inverse, elem_dims=input.elem_dims, sensitivity={"input": moves})


@normed_op(torch.cholesky_inverse).register_norm(when=is_typical)
def cholesky_inverse(input: RMSToRMSTensor, upper: bool = False) -> RMSToRMSTensor:
    """``(L L^T)^-1``.  Typical: 1 / n^2, and 2 / n^3.

    Untried:     in mode "bound" it does not apply
    """
    inverse = input.norm_size.clamp(min=_TINY).reciprocal()
    return RMSToRMSTensor(inverse.square(), elem_dims=input.elem_dims, sensitivity={"input": 2 * inverse.pow(3)})


def _is_typical_and_negative(args: dict[str, Any]) -> bool:
    return args["n"] < 0 and is_typical(args)


@normed_op(torch.matrix_power).register_norm(when=_is_typical_and_negative)
@normed_op(torch.linalg.matrix_power).register_norm(when=_is_typical_and_negative)
def negative_matrix_power(A: RMSToRMSTensor, n: int) -> RMSToRMSTensor:  # noqa: N803
    """A^n of a square matrix, n negative.  Typical: m^n, and ``|n| m^(n - 1)``, for A of operator norm m.

    Source:      that of `inv`
    Untried:     in mode "bound" it does not apply
    """
    m = A.norm_size.clamp(min=_TINY)
    return RMSToRMSTensor(m.pow(n), elem_dims=A.elem_dims, sensitivity={"A": -n * m.pow(n - 1)})


# -- written in others ---------------------------------------------------------------------------------------------------


def _is_global(args: tuple, kwargs: dict[str, Any]) -> bool:
    """At the data the derivative of the whole is known."""
    return not are_local({"args": args, "kwargs": kwargs})


@written_as(torch.linalg.cond, when=_is_global)
def _cond(A: torch.Tensor, p: float | str | None = None) -> torch.Tensor:  # noqa: N803
    """The norm of a matrix times that of its inverse, or of its pseudoinverse where it is not square."""
    p = 2 if p is None else p
    inverse = torch.linalg.inv(A) if A.shape[-2] == A.shape[-1] else torch.linalg.pinv(A)
    return torch.linalg.matrix_norm(A, p) * torch.linalg.matrix_norm(inverse, p)


@written_as(torch.linalg.tensorsolve)
def _tensorsolve(A: torch.Tensor, B: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:  # noqa: N803
    """X with ``tensordot(A, X, X.ndim) = B``: a system of matrices once dimensions are put together."""
    a = A if dims is None else torch.movedim(A, tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    shape = a.shape[B.ndim :]
    return torch.linalg.solve(a.reshape(B.numel(), -1), B.flatten()).reshape(shape)


for _op in (torch.linalg.cholesky_ex, torch.linalg.inv_ex, torch.linalg.solve_ex, torch.linalg.lstsq, torch.cholesky_inverse):
    refuse(normed_op(_op), SINGULAR)
