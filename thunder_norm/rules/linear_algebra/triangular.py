"""Norm rules for triangular systems with ones on the diagonal: the transforms of chunks in (gated) delta networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import as_kind, rms
from thunder_norm.rules.linear_algebra.inverses import near_singular_value

_OP = normed_op(torch.linalg.solve_triangular)


@dataclass(frozen=True)
class _System:
    """How ``A X = B`` or ``X A = B`` is solved, step by step.

    Attributes:
        axis: the dimension of B and X along which entries are found one after the other, negative.
        is_falling: whether the last comes first.
    """

    axis: int
    is_falling: bool

    @classmethod
    def of(cls, upper: bool, left: bool, unitriangular: bool) -> _System:
        if not unitriangular:
            raise NormMismatchError(
                "solve_triangular divides by the diagonal, which a norm does not keep away from 0: with unitriangular=True it is 1"
            )
        return cls(-2 if left else -1, upper is left)

    def weights(self, a: torch.Tensor) -> torch.Tensor:
        """[.., N, N] with entry i, j: how much of what is found at j the equation for i has; strictly triangular."""
        a = a if self.axis == -2 else a.mT
        return a.triu(1) if self.is_falling else a.tril(-1)


@_OP.register_norm
def solve_triangular(
    A: LinfTensor,  # noqa: N803 - torch's names
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B`` (or ``X A = B``), A [.., N, N] with ones on its diagonal and entries of at most m beside it.

    b is B's norm over its elem_dims without the dimension along which the system runs.

    Value:       ``b (1 + m)^(N - 1)``    (attained: all of A -m, all of B b, the last entry of X)
    Sensitivity: B: ``(1 + m)^(N - 1)``; A: ``(N - 1) b (1 + m)^(N - 2)``    (attained there)
    Local:       B: the largest row sum of ``|A^-1|``; A: the same of ``|A^-1| L x``, L ones below the diagonal, x the norms in X
    Source:      ``x_i = b_i - sum_(j < i) a_ij x_j``; ``dX = A^-1 (dB - dA X)``; ``|A^-1| <= (1 - m L)^-1``, entry by entry
    """
    system = _System.of(upper, left, unitriangular)
    b, c = as_kind(B, RMSTensor, tuple(d for d in B.elem_dims if d != system.axis))
    n, m = b.norm_size, A.norm_size
    steps = max(A.shape[-1] - 1, 0)
    if is_local(A, B):
        to_b, to_a = _at_data(system, data(A), data(B), b.elem_dims)
        return rms(n * to_b, b.elem_dims, sensitivity={"A": to_a, "B": to_b * c})
    growth = (1 + m).pow(steps)
    slope = steps * (1 + m).pow(max(steps - 1, 0))
    return rms(n * growth, b.elem_dims, sensitivity={"A": n * slope, "B": growth * c})


def _at_data(system: _System, a: torch.Tensor, b: torch.Tensor, dims: ed.Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """Sensitivities to B and A, [.., N] in X's norm over `dims`; batch dimensions among them share the largest entries."""
    weights = system.weights(a.to(NORM_DTYPE))
    eye = torch.eye(a.shape[-1], dtype=weights.dtype, device=a.device)
    inverse = torch.linalg.inv(eye + weights)
    rows = b.to(NORM_DTYPE) if system.axis == -2 else b.to(NORM_DTYPE).mT
    found = inverse @ rows
    batch = tuple(d for d in dims if d < -2)
    over = (*batch, -1) if -3 - system.axis in dims else batch
    sizes = found.square().mean(over, keepdim=True).sqrt() if over else found.abs()
    shared = tuple(d for d in batch if d >= -inverse.ndim)
    moduli = inverse.abs().amax(shared, keepdim=True) if shared else inverse.abs()
    before = system.weights(torch.ones_like(inverse))
    return moduli.sum(-1).amax(), (moduli @ (before @ sizes)).amax()


def _least(A: Any, upper: bool, unitriangular: bool) -> float | None:  # noqa: N803
    """What no singular value of the triangle is less than near the data."""
    return None if unitriangular else near_singular_value(A, triangle=torch.triu if upper else torch.tril)


@_OP.register_norm(when=lambda args: _least(args["A"], args["upper"], args["unitriangular"]) is not None)
def solve_triangular_near(
    A: RMSTensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, or ``X A = B``, near data whose triangle has no singular value below c there, [.., N, N].

    Value:       |B| / c
    Sensitivity: 1 / c to B, ``N |B| / c^2`` to the RMS of all of A
    Source:      ``dX = A^-1 (dB - dA X)``, |dA| at most its Frobenius norm
    Untried:     it does not apply away from data
    """
    _, by_a = as_kind(A, RMSTensor, (-2, -1))
    c = _least(A, upper, unitriangular)
    assert c is not None, "the rule's condition has been checked"
    b, by_b = as_kind(B, RMSTensor, tuple(sorted({*B.elem_dims, -2 if left else -1})))
    size = b.norm_size / c
    return rms(size, b.elem_dims, sensitivity={"A": size * (A.shape[-1] / c * by_a), "B": by_b / c})


def _typical(
    A: RMSTensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, of independent entries of RMS r beside ones on A's diagonal.

    Value:       ``b g``, ``g^2 = ((1 + r^2)^N - 1) / (N r^2)``, the mean of ``(1 + r^2)^i``
    Sensitivity: B: g; A: ``b g^2 sqrt((N - 1) / 2)``
    Source:      ``E x_i^2 = b^2 + r^2 sum_(j < i) E x_j^2``
    """
    count, n = A.shape[-1], B.norm_size
    square = A.norm_size.square()
    is_small = square < 1e-12
    safe = torch.where(is_small, torch.ones_like(square), square)
    mean = torch.where(is_small, 1 + square * (count - 1) / 2, torch.expm1(count * torch.log1p(safe)) / (max(count, 1) * safe))
    growth = mean.sqrt()
    to_a = n * mean * math.sqrt(max(count - 1, 0) / 2)
    return rms(n * growth, B.elem_dims, sensitivity={"A": to_a, "B": growth})


for _mode in ("typical", "modula"):
    _OP.register_norm(mode=_mode, when=lambda args: args["unitriangular"])(_typical)  # others: `inverses`


@written_as(torch.triangular_solve)
def _older(
    b: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> torch.return_types.triangular_solve:  # type: ignore[name-defined]
    """`solve_triangular`, and the matrix again."""
    a, is_upper = (A.mT, not upper) if transpose else (A, upper)
    solution = torch.linalg.solve_triangular(a, b, upper=is_upper, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((solution, A.clone()))
