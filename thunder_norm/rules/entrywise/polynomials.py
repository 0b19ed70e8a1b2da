"""Norm rules for torch's families of orthogonal polynomials, of a degree known as a number.

A polynomial p of degree k with k real roots is largest on ``|x| <= r`` at an end or at a root of p', and steepest at an end or at a
root of p''.  These are found once for each degree by bisection between the roots of p; then ``max |p(min(r, c))|`` over the critical
points c, and r itself, is exact, grows with r, and is differentiable in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._pointwise import typical_pointwise
from thunder_norm.rules._shared import like, maximum, refuse

_LARGEST_DEGREE = 30

X = TypeVar("X", float, torch.Tensor)
# k -> (a, b, c) of p_(k+1) = (a x + b) p_k - c p_(k-1), where p_(-1) = 0 and p_0 = 1
Recurrence = Callable[[int], tuple[float, float, float]]


@dataclass(frozen=True)
class Family:
    """Polynomials by their recurrence, with all roots in ``|x| <= bound(degree)``."""

    step: Recurrence
    bound: Callable[[int], float] = lambda degree: 1.0

    def derivatives(self, degree: int, x: X) -> tuple[X, X, X]:
        """The polynomial of that degree, its first and its second derivative, at x."""
        zero: Any = x * 0.0
        last = (zero, zero, zero)
        p, dp, ddp = zero + 1.0, zero, zero
        for k in range(degree):
            a, b, c = self.step(k)
            factor = x * a + b
            now = (factor * p - last[0] * c, factor * dp + p * a - last[1] * c, factor * ddp + dp * (2 * a) - last[2] * c)
            last, (p, dp, ddp) = (p, dp, ddp), now
        return p, dp, ddp

    def inner(self, degree: int) -> float:
        """The largest modulus at 0 and at critical points; outside of those |p| is convex."""
        return max(math.fabs(self.derivatives(degree, x)[0]) for x in (0.0, *_roots(self, degree, 1)))

    def largest(self, degree: int, order: int, reach: torch.Tensor) -> torch.Tensor:
        """The largest modulus of the polynomial or of its derivative on ``|x| <= reach``."""
        found = []
        for sign in (1.0, -1.0):
            critical = {math.fabs(c) for c in _roots(self, degree, order + 1) if c * sign >= 0}
            for x in (reach, *(reach.clamp(max=c) for c in sorted(critical))):
                found.append(torch.abs(self.derivatives(degree, x * sign)[order]))
        return maximum(found)


@functools.cache
def _roots(family: Family, degree: int, order: int = 0) -> tuple[float, ...]:
    """The roots of the polynomial or of a derivative of it, all real and increasing."""
    if degree <= order:
        return ()
    if order:  # by Rolle's theorem between those of the derivative before
        brackets = _roots(family, degree, order - 1)
    else:  # those of two successive degrees interlace
        ends = family.bound(degree) * 1.01
        brackets = (-ends, *_roots(family, degree - 1), ends)
    return tuple(_bisect(lambda x: family.derivatives(degree, x)[order], *pair) for pair in itertools.pairwise(brackets))


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    rises = f(high) > f(low)
    for _ in range(100):
        middle = (low + high) / 2
        if (f(middle) > 0) == rises:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _chebyshev(first: float, shift: float = 0.0) -> Recurrence:
    """2 x p_k - p_(k-1), from p_1 = first x + shift."""
    return lambda k: (first, shift, 0.0) if k == 0 else (2.0, 0.0, 1.0)


def _shifted(step: Recurrence) -> Recurrence:
    """The same polynomials of 2 x - 1."""

    def of(k: int) -> tuple[float, float, float]:
        a, b, c = step(k)
        return 2 * a, b - a, c

    return of


_T, _U, _V, _W = _chebyshev(1), _chebyshev(2), _chebyshev(2, -1), _chebyshev(2, 1)
FAMILIES = {
    torch.special.chebyshev_polynomial_t: Family(_T),
    torch.special.chebyshev_polynomial_u: Family(_U),
    torch.special.chebyshev_polynomial_v: Family(_V),
    torch.special.chebyshev_polynomial_w: Family(_W),
    torch.special.shifted_chebyshev_polynomial_t: Family(_shifted(_T)),
    torch.special.shifted_chebyshev_polynomial_u: Family(_shifted(_U)),
    torch.special.shifted_chebyshev_polynomial_v: Family(_shifted(_V)),
    torch.special.shifted_chebyshev_polynomial_w: Family(_shifted(_W)),
    torch.special.hermite_polynomial_h: Family(lambda k: (2.0, 0.0, 2.0 * k), lambda k: math.sqrt(2 * k + 2)),
    torch.special.hermite_polynomial_he: Family(lambda k: (1.0, 0.0, float(k)), lambda k: math.sqrt(4 * k + 4)),
    torch.special.laguerre_polynomial_l: Family(
        lambda k: (-1 / (k + 1), (2 * k + 1) / (k + 1), k / (k + 1)), lambda k: 4.0 * k + 3
    ),
    torch.special.legendre_polynomial_p: Family(lambda k: ((2 * k + 1) / (k + 1), 0.0, k / (k + 1))),
}
_DEGREE = "its bound depends on the degree, which must be known: give it as a number"


def _register(op: Callable, family: Family) -> None:
    def degree_of(n: float) -> int:
        if n > _LARGEST_DEGREE:
            raise NormMismatchError(
                f"degree {n} grows too fast for a bound to mean anything; up to {_LARGEST_DEGREE} there is one"
            )
        return int(n)

    def rule(input: RMSTensor, n: int | float) -> RMSTensor:
        size, degree = input.norm_size, degree_of(n)
        if degree < 0:  # torch's convention
            return like(input, torch.zeros_like(size), sensitivity={"input": 0})
        reach = size * math.sqrt(input.numel_normed)
        value, slope = family.largest(degree, 0, reach), family.largest(degree, 1, reach)
        if input.elem_dims:
            chord = (value.clamp(min=family.inner(degree)) - family.inner(degree)) / max(math.sqrt(input.numel_normed), 1.0)
            value = torch.minimum(value, chord + family.inner(degree))
            value = torch.minimum(value, size * slope + math.fabs(family.derivatives(degree, 0.0)[0]))
        return like(input, value, sensitivity={"input": slope})

    def typical(input: RMSTensor, n: int | float) -> RMSTensor:
        degree = degree_of(n)
        if degree < 0:
            return rule(input, n)
        f, slope = (lambda x, order=order: family.derivatives(degree, x)[order] for order in (0, 1))
        return typical_pointwise(input, f, slope)

    for fn in (rule, typical):
        fn.__name__ = fn.__qualname__ = op.__name__
        fn.__doc__ = f"""{op.__name__} of degree n.

        Value:       M, the largest |p| on |x| <= reach; from RMS over N elements at most A + (M - A) / sqrt(N), with A the largest
                     |p| at 0 and at critical points, and |p(0)| + the largest slope times the norm
                     (attained by the largest entry; from RMS to 0.9 as the norm grows, to 0.5 where waves have not ended)
        Sensitivity: the largest |p'| on |x| <= reach       (attained)
        Gap:         from RMS, where the waves of p have not ended at the reach of a spike
        Source:      p has real roots only, so max(|p|, A) is convex in |x|, and below the chord to the spike
        Raises NormMismatchError for a degree that is a tensor, or above {_LARGEST_DEGREE}.
        """
    normed_op(op).register_norm(rule)
    normed_op(op).register_norm(mode="typical")(typical)
    refuse(normed_op(op), _DEGREE)


for _op, _family in FAMILIES.items():
    _register(_op, _family)
