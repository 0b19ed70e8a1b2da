"""Typical sizes of inverses of matrices, and of what solves systems: triangular ones that divide by their diagonals, and any others.

In mode "bound" a matrix may be singular, unless what made it says that ``|x^T A x| >= c |x|^2`` (`symmetric_parts`): then no singular
value is less than c.  Nor is one where a matrix stays nearer to the data than the data is to singular ones.  Typically it is a multiple n Q of
an orthogonal one, as in `determinants`, and its inverse ``Q^T / n``.  At the data their derivative says how they move
(`thunder_norm.core.by_data`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.composed import values
from thunder_norm.core.context import current_mode
from thunder_norm.core.conversions import factor
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import away, is_local, is_within
from thunder_norm.core.ranges import OfEntries, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import Alternatives, fact
from thunder_norm.rules._shared import as_kind, is_typical, like, refuse, rms

_TINY = 1e-30


def _divides(args: dict[str, Any]) -> bool:
    return is_typical(args) and not args["unitriangular"]


# -- away from singular ones ----------------------------------------------------------------------------------------------


def rayleigh_away_from_0(a: Any) -> Range | None:
    """Between which positive numbers ``x^T A x / |x|^2`` is, or that of -A."""
    found = None if not isinstance(a, torch.Tensor) or isinstance(a, NormedTensor) and is_local(a) else known_range(a).rayleigh
    return None if found is None else next((r for r in (found, found.negative()) if r.is_well_above(0.0)), None)


def near_singular_value(
    a: Any, is_symmetric: bool = False, triangle: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> float | None:
    """What no singular value of matrices near the data is less than, inside "within": that of the data less how far they move.

    If `is_symmetric` no eigenvalue; of a triangle of them, which moves no farther than they do in Frobenius norm.  None where that may be 0,
    or they may be any of their norm.
    """
    if (
        not is_within()
        or not isinstance(a, NormedTensor)
        or a.ndim < 2
        or a.shape[-1] != a.shape[-2]
        or not a.numel()
        or is_complex(a)
    ):
        return None
    moves = away(a)
    cost = factor(moves, RMSToRMSTensor if triangle is None else RMSTensor, (-2, -1))
    if cost is None or a.backing.is_meta or (moves.perturbation_size is None and not a._is_constant):
        return None
    with _disable_current_modes(), torch.no_grad():
        t = values(a.backing.detach()).double()
        if not t.isfinite().all():
            return None
        t = t if triangle is None else triangle(t)
        moved = (
            0.0 if moves.perturbation_size is None else moves.perturbation_size.item() * cost * (t.shape[-1] if triangle else 1)
        )
        rounded = 1000 * torch.finfo(a.backing.dtype).eps * torch.linalg.matrix_norm(t).amax().item()
        least = (torch.linalg.eigvalsh((t + t.mT) / 2) if is_symmetric else torch.linalg.svdvals(t)).amin().item()
    found = (least - moved - rounded) * (1 - 1e-9)
    return found if found > 0 else None


def keeps_away(name: str, is_symmetric: bool = False) -> Callable[[dict[str, Any]], bool]:
    """Whether a bound for all inputs is asked for, and a matrix is known to be away from singular ones; positive definite if `is_symmetric`."""

    def condition(args: dict[str, Any]) -> bool:
        a = args[name]
        if current_mode() != "bound" or not isinstance(a, torch.Tensor):
            return False
        found = known_range(a)
        if is_symmetric and not found.is_symmetric:
            return False
        if near_singular_value(a, is_symmetric) is not None:
            return True
        return rayleigh_away_from_0(a) is not None and (
            not is_symmetric or found.rayleigh is not None and found.rayleigh.is_well_above(0.0)
        )

    return condition


def smallest_singular_value(a: NormedTensor) -> torch.Tensor:
    """What none of the singular values of a matrix is less than, which is known to be away from singular ones."""
    found, near = rayleigh_away_from_0(a), near_singular_value(a)
    if found is None:
        assert near is not None, "the rule's condition has been checked"
        return torch.full_like(a.norm_size, near)
    least = found.least_of(a.norm_size)
    return least if near is None else least.clamp(min=near)


@normed_op(torch.linalg.solve).register_norm(when=keeps_away("A"))
def solve_operator(A: RMSToRMSTensor, B: RMSToRMSTensor, *, left: bool = True) -> RMSToRMSTensor:  # noqa: N803
    """X with ``A X = B``, or ``X A = B``, for ``|x^T A x| >= c |x|^2`` and an operator B.

    Value:       |B| / c                          (attained: A = c I)
    Sensitivity: 1 / c to B, |B| / c^2 to A       (attained there)
    Source:      ``c |x|^2 <= |x| |A x|``; ``dX = A^-1 (dB - dA X)``
    Gap:         where A is c I what made it need not be able to move it
    """
    c = smallest_singular_value(A)
    size = B.norm_size / c
    return RMSToRMSTensor(size, elem_dims=B.elem_dims, sensitivity={"A": size / c, "B": 1 / c})


@normed_op(torch.linalg.solve).register_norm(when=keeps_away("A"))
def solve_away(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True) -> RMSTensor:  # noqa: N803
    """The same for a B of which an RMS norm is known: over its columns, or its rows for ``X A = B``.

    Value:       |B| / c                          (attained: A = c I)
    Sensitivity: 1 / c to B, |B| / c^2 to A       (attained there)
    Source:      `solve_operator`
    Gap:         that of `solve_operator`
    """
    c = smallest_singular_value(A)
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    along = -1 if is_vector or not left else -2
    b, k = as_kind(B, RMSTensor, tuple(sorted({*B.elem_dims, along})))
    size = b.norm_size / c
    return rms(size, b.elem_dims, sensitivity={"A": size / c, "B": k / c})


@normed_op(torch.inverse).register_norm(when=keeps_away("input"))
@normed_op(torch.linalg.inv).register_norm(when=keeps_away("input"))
@normed_op(torch.linalg.pinv).register_norm(when=keeps_away("input"))
def inverse_away(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """The inverse, for ``|x^T A x| >= c |x|^2``.

    Value:       1 / c        (attained: A = c I)
    Sensitivity: 1 / c^2      (attained there)
    Source:      ``c |x|^2 <= |x| |A x|``; ``d A^-1 = -A^-1 dA A^-1``
    Gap:         that of `solve_operator`
    """
    inverse = 1 / smallest_singular_value(input)
    return RMSToRMSTensor(inverse, elem_dims=input.elem_dims[::-1], sensitivity={"input": inverse.square()})


@dataclass(frozen=True, eq=False)
class Factor(OfEntries):
    """A fact: it is the Cholesky factor of a matrix with no smaller eigenvalue."""

    smallest_eigenvalue: torch.Tensor


@normed_op(torch.linalg.cholesky).register_norm(when=keeps_away("input", is_symmetric=True))
def cholesky_away(input: RMSToRMSTensor, *, upper: bool = False) -> RMSToRMSTensor:
    """L with ``A = L L^T``, for symmetric A with ``x^T A x >= c |x|^2``.

    Value:       sqrt(n)                        (attained: A = n I)
    Sensitivity: sqrt(n N / 2) / c, of N rows
    Source:      ``dL = L Phi(L^-1 dA L^-T)``, Phi the triangle with half the diagonal: its Frobenius norm is at most ``1 / sqrt(2)`` times that of a
                 symmetric matrix, which is at most sqrt(N) times its operator norm; |L|^2 = n, |L^-1|^2 = 1 / c
    Gap:         L is large and its inverse as well, and the factor of Phi grows as log N alone
    """
    c, root = smallest_singular_value(input), input.norm_size.sqrt()
    lipschitz = root / c * math.sqrt(input.shape[-1] / 2)
    result = RMSToRMSTensor(root, elem_dims=input.elem_dims, sensitivity={"input": lipschitz})
    result._facts = Alternatives((Factor(c),))
    return result


@normed_op(torch.linalg.matrix_sqrth).register_norm(when=keeps_away("A", is_symmetric=True))
def matrix_sqrth_away(A: RMSToRMSTensor) -> RMSToRMSTensor:  # noqa: N803
    """The symmetric X with ``X X = A``, for symmetric A with ``x^T A x >= c |x|^2``.

    Value:       sqrt(n)              (attained: A = n I)
    Sensitivity: 1 / (2 sqrt(c))      (attained: A = c I)
    Source:      ``dX`` is the integral of ``e^(-t X) dA e^(-t X)`` over t > 0, and no eigenvalue of X is less than sqrt(c)
    Gap:         that of `solve_operator`
    """
    slope = 0.5 / smallest_singular_value(A).sqrt()
    return RMSToRMSTensor(A.norm_size.sqrt(), elem_dims=A.elem_dims, sensitivity={"A": slope})


def is_of_factor(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a bound for all inputs is asked for, and an argument is the factor of a matrix that is away from singular ones."""
    return lambda args: current_mode() == "bound" and fact(args[name], Factor) is not None and not is_local(args[name])


def smallest_eigenvalue(factor: NormedTensor) -> torch.Tensor:
    """What no eigenvalue of ``L L^T`` is less than."""
    known = fact(factor, Factor)
    assert known is not None, "the rule's condition has been checked"
    return known.smallest_eigenvalue


@normed_op(torch.cholesky_solve).register_norm(when=is_of_factor("L"))
def cholesky_solve_away(B: RMSTensor, L: RMSToRMSTensor, upper: bool = False) -> RMSTensor:  # noqa: N803
    """X with ``L L^T X = B``, where no eigenvalue of ``L L^T`` is less than c.

    Value:       |B| / c                                 (attained: L = sqrt(c) I)
    Sensitivity: 1 / c to B, 2 |L| |B| / c^2 to L        (attained there)
    Source:      ``dX = -A^-1 (dL L^T + L dL^T) X``
    Gap:         that of `solve_operator`
    """
    c = smallest_eigenvalue(L)
    b, k = as_kind(B, RMSTensor, tuple(sorted({*B.elem_dims, -2})))
    size = b.norm_size / c
    return rms(size, b.elem_dims, sensitivity={"B": k / c, "L": 2 * L.norm_size * size / c})


# -- typical sizes --------------------------------------------------------------------------------------------------------


def _solution(a: RMSToRMSTensor, b: RMSTensor) -> RMSTensor:
    inverse = a.norm_size.clamp(min=_TINY).reciprocal()
    size = b.norm_size * inverse
    return like(b, size, sensitivity={"B": inverse, "A": size * inverse})


def _inverse(a: RMSToRMSTensor) -> RMSToRMSTensor:
    if {*a.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"an inverse is one of matrices in the last two dimensions, got {a.elem_dims}")
    size = a.norm_size.clamp(min=_TINY).reciprocal()
    return RMSToRMSTensor(size, elem_dims=a.elem_dims[::-1], sensitivity={"input": size.square()})


@normed_op(torch.linalg.solve_triangular).register_norm(when=_divides)
def solve_triangular(
    A: RMSToRMSTensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, A not of ones on its diagonal.  Typical: |B| / n; 1 / n to B, |B| / n^2 to A.

    Source:      ``dX = A^-1 (dB - dA X)``
    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B)


@normed_op(torch.linalg.solve).register_norm(when=is_typical)
def solve(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True) -> RMSTensor:  # noqa: N803
    """X with ``A X = B``, or ``X A = B``.  Typical: |B| / n; 1 / n to B, |B| / n^2 to A.

    Source:      ``dX = A^-1 (dB - dA X)``
    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B)


@normed_op(torch.inverse).register_norm(when=is_typical)
@normed_op(torch.linalg.inv).register_norm(when=is_typical)
def inv(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """The inverse of a matrix.  Typical: 1 / n, and 1 / n^2.

    Source:      ``d A^-1 = -A^-1 dA A^-1``
    Untried:     in mode "bound" it does not apply
    """
    return _inverse(input)


@normed_op(torch.pinverse).register_norm(when=is_typical)
@normed_op(torch.linalg.pinv).register_norm(when=is_typical)
def pinv(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """The pseudoinverse of a matrix of full rank.  Typical: 1 / n, and 1 / n^2.

    Source:      that of n Q, Q with orthonormal rows or columns, is ``Q^T / n``
    Untried:     in mode "bound" it does not apply
    """
    return _inverse(input)


# -- factors ----------------------------------------------------------------------------------------------------------------


@normed_op(torch.linalg.matrix_sqrth).register_norm(when=is_typical)
def matrix_sqrth(A: RMSToRMSTensor) -> RMSToRMSTensor:  # noqa: N803
    """The symmetric X with ``X X = A``.  Typical: sqrt(n), and 1 / (2 sqrt(n)).

    Untried:     in mode "bound" it does not apply
    """
    size = A.norm_size.clamp(min=_TINY).sqrt()
    return RMSToRMSTensor(size, elem_dims=A.elem_dims, sensitivity={"A": 0.5 / size})


@normed_op(torch.linalg.cholesky).register_norm(when=is_typical)
def cholesky(input: RMSToRMSTensor, *, upper: bool = False) -> RMSToRMSTensor:
    """L with ``A = L L^T``.  Typical: sqrt(n), and 1 / (2 sqrt(n)).

    Source:      |L|^2 = |A|; of A = n I it is sqrt(n) I
    Untried:     in mode "bound" it does not apply
    """
    if {*input.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"a Cholesky factor is one of matrices in the last two dimensions, got {input.elem_dims}")
    size = input.norm_size.clamp(min=_TINY).sqrt()
    return RMSToRMSTensor(size, elem_dims=input.elem_dims, sensitivity={"input": 0.5 / size})


@normed_op(torch.cholesky_solve).register_norm(when=is_typical)
def cholesky_solve(B: RMSTensor, L: RMSToRMSTensor, upper: bool = False) -> RMSTensor:  # noqa: N803
    """X with ``L L^T X = B``.  Typical: |B| / n^2; 1 / n^2 to B, 2 |B| / n^3 to L.

    Source:      that of `solve`, twice
    Untried:     in mode "bound" it does not apply
    """
    inverse = L.norm_size.clamp(min=_TINY).reciprocal()
    size = B.norm_size * inverse.square()
    return like(B, size, sensitivity={"B": inverse.square(), "L": 2 * size * inverse})


SINGULAR = (
    "a norm does not keep a matrix away from singular ones; norm_report's default, at the data, and mode='typical' have a size"
)
for _op in (
    torch.linalg.solve,
    torch.linalg.inv,
    torch.inverse,
    torch.linalg.pinv,
    torch.pinverse,
    torch.linalg.cholesky,
    torch.linalg.matrix_sqrth,
    torch.cholesky_solve,
):
    refuse(normed_op(_op), SINGULAR)
