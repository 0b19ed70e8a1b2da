"""Factors of matrices by elimination, and systems that are solved by them: those are systems of the matrices themselves.

    LU, pivots = torch.linalg.lu_factor(A)
    x = torch.linalg.lu_solve(LU, pivots, b)

How far factors move has no bound (another row may become the pivot), but that of a solution has where `torch.linalg.solve` has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity, lift, norm_counts
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.known_ranges import range_of
from thunder_norm.core.local import are_local, is_local
from thunder_norm.core.programs import written_as
from thunder_norm.core.ranges import OfEntries, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import Source, fact, with_fact
from thunder_norm.rules._shared import argument, as_kind, refuse
from thunder_norm.rules.linear_algebra.inverses import SINGULAR
from thunder_norm.scalars import times

_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class FactorsOf(OfEntries):
    """A fact: they are the factors of a matrix, in one tensor, as the functions that solve systems take them."""

    matrix: Source
    known: Range | None

    @staticmethod
    def of(a: NormedTensor) -> FactorsOf:
        return FactorsOf(Source.of(a), range_of(a))

    def tensor(self) -> torch.Tensor:
        """The matrix."""
        a = self.matrix.moving()
        a._range = self.known
        return a


def _is_of_a_matrix(place: int, name: str) -> Callable[[tuple, dict], bool]:
    """Factors that move, made of parameters or of tensors with norms."""

    def condition(args: tuple, kwargs: dict[str, Any]) -> bool:
        factors = argument(args, kwargs, place, name)
        if isinstance(factors, NormedTensor):
            return not is_local(factors)
        return current_sensitivity() == "global" and norm_counts(factors)

    return condition


def _matrix(factors: torch.Tensor) -> torch.Tensor:
    found = fact(factors if isinstance(factors, NormedTensor) else lift(factors, RMSTensor, (-2, -1)), FactorsOf)
    if found is None:
        raise NormMismatchError(f"the factors are not those of a matrix of known norm, and {SINGULAR}")
    return found.tensor()


# -- with pivots from among the rows --------------------------------------------------------------------------------------


def _is_global(args: dict[str, Any]) -> bool:
    """At the data the derivative is known."""
    return not are_local(args)


@dataclass(frozen=True)
class _Sizes:
    """Norms of L, of U, and of both in one tensor, and how far the latter two move with the matrix."""

    of_l: torch.Tensor
    of_u: torch.Tensor
    of_both: torch.Tensor
    move: torch.Tensor
    kind: type[NormedTensor]
    dims: tuple[int, ...]

    @staticmethod
    def of(A: NormedTensor, pivot: bool) -> _Sizes:  # noqa: N803 - torch's name
        if not pivot:
            raise NormMismatchError("without pivots an elimination divides by entries that a norm does not keep away from 0")
        count = min(A.shape[-2:])
        if current_mode() == "bound":
            a, _ = as_kind(A, LinfTensor, ())
            n, ones = a.norm_size, torch.ones_like(a.norm_size)
            upper = times(n, 2.0 ** max(count - 1, 0))
            return _Sizes(ones, upper, torch.maximum(upper, ones), ones * math.inf, LinfTensor, ())
        a, c = as_kind(A, RMSTensor, (-2, -1))
        n = a.norm_size
        upper = times(n, math.sqrt(0.5) * count**0.25)
        move = (n.clamp(min=_TINY).square().reciprocal() * 0.6 + 0.5 * count).sqrt() * c
        return _Sizes(torch.full_like(n, 0.3), upper, (upper.square() + 0.09).sqrt(), move, RMSTensor, (-2, -1))

    def tensor(self, size: torch.Tensor) -> NormedTensor:
        return self.kind(size, elem_dims=self.dims, sensitivity={"A": self.move})


@normed_op(torch.linalg.lu_factor_ex).register_norm(when=_is_global)
def lu_factor_ex(A: RMSToRMSTensor | RMSTensor, *, pivot: bool = True, check_errors: bool = False) -> tuple:  # noqa: N803
    """L without its diagonal of ones, and U, in one tensor, and which rows were exchanged: ``P A = L U``.

    A: [.., M, N] of entries of at most m, K the lesser of M and N
    Value:       the larger of 1, for L, and ``2^(K - 1) m`` for U        (attained: Wilkinson's matrix)
    Sensitivity: no number: where another row becomes the pivot the factors jump
    Typical:     of entries of RMS r: 0.3 for L, ``r K^(1/4) / sqrt(2)`` for U, in one ``sqrt(0.6 / r^2 + K / 2)``: measured, K from 4 to 64
    Gap:         no sensitivity is attained where there is no number
    Source:      Wilkinson 1961: no entry more than doubles in a step
    Raises NormMismatchError without pivots.
    """
    sizes = _Sizes.of(A, pivot)
    return with_fact(sizes.tensor(sizes.of_both), FactorsOf.of(A)), None, None


@written_as(torch.linalg.lu_factor)
def _lu_factor(A: torch.Tensor, *, pivot: bool = True) -> Any:  # noqa: N803
    """The same of matrices that have factors, or an error."""
    return tuple(torch.linalg.lu_factor_ex(A, pivot=pivot, check_errors=True)[:2])


@normed_op(torch.linalg.lu).register_norm(when=_is_global)
def linalg_lu(A: RMSToRMSTensor | RMSTensor, *, pivot: bool = True) -> tuple:  # noqa: N803
    """P, L and U of ``A = P L U``: entries of P and L are at most 1, those of U as in `lu_factor_ex`.

    Gap:         that of `lu_factor_ex`
    """
    sizes = _Sizes.of(A, pivot)
    ones = torch.ones_like(sizes.of_u)
    exchanges = LinfTensor(ones, elem_dims=(), sensitivity={"A": ones * math.inf if current_mode() == "bound" else 0.0})
    # ones on the diagonal, beside entries below it
    lower = sizes.of_l if current_mode() == "bound" else torch.full_like(sizes.of_l, math.sqrt(0.09 + 1 / max(A.shape[-2], 1)))
    return exchanges, sizes.tensor(lower), sizes.tensor(sizes.of_u)


@normed_op(torch.lu_unpack).register_norm(allow_plain_tensors=True)
def lu_unpack(LU_data: LinfTensor, LU_pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> tuple:  # noqa: N803
    """P, L and U of factors in one tensor: permutations, what is below the diagonal with ones on it, and the rest.

    Value:       1;  the larger of 1 and n;  n      (attained)
    Sensitivity: 0;  1;  1                          (attained)
    """
    n = LU_data.norm_size
    ones = torch.ones_like(n)
    exchanges = LinfTensor(ones, elem_dims=(), sensitivity={"LU_data": 0.0})
    lower = LinfTensor(n.clamp(min=1.0), elem_dims=(), sensitivity={"LU_data": 1.0})
    return exchanges, lower, LinfTensor(n, elem_dims=(), sensitivity={"LU_data": 1.0})


@written_as(torch.lu)
def _older_lu(A: torch.Tensor, pivot: bool = True, get_infos: bool = False, out: None = None) -> Any:  # noqa: N803
    """`lu_factor_ex`, and whether there are factors where it is asked for."""
    found = torch.linalg.lu_factor_ex(A, pivot=pivot)
    return tuple(found) if get_infos else tuple(found[:2])


@written_as(torch.lu_solve, when=_is_of_a_matrix(1, "LU_data"))
def _older_lu_solve(b: torch.Tensor, LU_data: torch.Tensor, LU_pivots: torch.Tensor) -> torch.Tensor:  # noqa: N803
    return torch.linalg.solve(_matrix(LU_data), b)


@written_as(torch.linalg.lu_solve, when=_is_of_a_matrix(0, "LU"))
def _lu_solve(LU: torch.Tensor, pivots: torch.Tensor, B: torch.Tensor, *, left: bool = True, adjoint: bool = False) -> Any:  # noqa: N803
    """X with ``A X = B``, ``X A = B``, or the same of A^T, for the factors of A."""
    a = _matrix(LU)
    return torch.linalg.solve(a.mT if adjoint else a, B, left=left)


# -- what has no norm -----------------------------------------------------------------------------------------------------


for _op in (torch.linalg.lu_solve, torch.lu_solve):
    refuse(normed_op(_op), SINGULAR)
for _op in (torch.linalg.ldl_factor, torch.linalg.ldl_factor_ex, torch.linalg.ldl_solve):
    refuse(
        normed_op(_op),
        "factors L D L^T of an indefinite matrix may be of any size, and torch has no derivative of them: torch.linalg.lu_factor and "
        "lu_solve have norms and derivatives, and torch.linalg.solve",
    )
