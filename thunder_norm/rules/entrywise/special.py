"""Norm rules for special functions of each entry: Bessel and Airy functions, error functions, the normal distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._pointwise import pointwise, typical_pointwise
from thunder_norm.rules._shared import like
from thunder_norm.rules.entrywise.elementwise import sinc_slope
from thunder_norm.rules.entrywise.powers import grows_exponentially, only_largest_entry

_SQRT2 = math.sqrt(2)


def _series(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """``sum_k coefficients[k] x^k``: torch's own Bessel and Airy functions have no derivative."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


# -- Bessel functions -------------------------------------------------------------------------------------------------------

_TOP_OF_J1 = 1.8411837813406593  # where J1 is largest, 0.5818652242815963
_J1_BY_X = [(-1) ** k / (2 * 4**k * math.factorial(k) * math.factorial(k + 1)) for k in range(14)]  # J1(x) / x in x^2


def _j1(x: torch.Tensor) -> torch.Tensor:
    inside = x.clamp(max=_TOP_OF_J1)
    return inside * _series(_J1_BY_X, inside * inside)


@normed_op(torch.special.bessel_j0).register_norm
def bessel_j0(input: RMSTensor) -> RMSTensor:
    """J0.  Value 1, attained at 0; sensitivity J1(min(reach, 1.84118)), at most 0.58187, attained: J0' = -J1."""
    reach = input.norm_size * math.sqrt(input.numel_normed)
    return like(input, torch.ones_like(reach), sensitivity={"input": _j1(reach)})


@normed_op(torch.special.bessel_j1).register_norm
def bessel_j1(input: RMSTensor) -> RMSTensor:
    """J1.

    Value:       J1(min(n, 1.84118))        (attained by that constant)
    Sensitivity: 1/2                        (attained at 0)
    Source:      J1(x) / x and J1' are positive and decrease up to the top, so J1(sqrt u)^2 is concave there
    """
    return like(input, spoiled(_j1(input.norm_size), input.norm_size), sensitivity={"input": 0.5})


@pointwise(
    torch.special.spherical_bessel_j0,
    f=lambda x: torch.sinc(x / math.pi),
    slope=lambda x: sinc_slope(x / math.pi) / math.pi,
)
def spherical_bessel_j0(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """sin(x) / x.  Value 1, attained at 0; sensitivity the slope at min(reach, 2.08158), at most 0.43618, attained."""
    return torch.ones_like(n), torch.abs(sinc_slope(reach.clamp(max=2.0815759778181) / math.pi)) / math.pi


def _i1_slope(x: torch.Tensor) -> torch.Tensor:
    """I1' = I0 - I1 / x; around 0 it is 1/2 + 3 x^2 / 16."""
    is_small = torch.abs(x) < 1e-4
    away = torch.where(is_small, torch.ones_like(x), x)
    return torch.where(is_small, 0.5 + x * x * (3 / 16), torch.i0(away) - torch.special.i1(away) / away)


grows_exponentially(torch.i0, torch.i0, torch.special.i1, torch.special.i1)
grows_exponentially(torch.special.i1, torch.special.i1, _i1_slope, _i1_slope)
grows_exponentially(torch.special.modified_bessel_i0, torch.i0, torch.special.i1, torch.special.i1, f=torch.i0)
grows_exponentially(torch.special.modified_bessel_i1, torch.special.i1, _i1_slope, _i1_slope, f=torch.special.i1)


def _i0e_slope(x: torch.Tensor) -> torch.Tensor:
    i0e = torch.special.i0e(x)
    return torch.special.i1e(x) + torch.where(x < 0, i0e, -i0e)  # at the kink the slope of one side


@pointwise(torch.special.i0e, f=torch.special.i0e, slope=_i0e_slope)
def i0e(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """e^-|x| I0(x).  Value 1, attained at 0; sensitivity 1, attained at the kink there: -e^-x (I0 - I1) shrinks beyond."""
    return bounded(1.0, n), 1


_TOP_OF_I1E = 1.5451272579925457  # where e^-x I1(x) is largest, 0.2190793


def _i1e_slope(x: torch.Tensor) -> torch.Tensor:
    is_small = torch.abs(x) < 1e-4
    away = torch.where(is_small, torch.ones_like(x), x)
    i1e = torch.special.i1e(away)
    return torch.where(is_small, 0.5 - torch.abs(x), torch.special.i0e(away) - i1e / away - torch.sign(away) * i1e)


@pointwise(torch.special.i1e, f=torch.special.i1e, slope=_i1e_slope)
def i1e(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """e^-|x| I1(x).

    Value:       that of min(n, 1.54515), at most 0.21908        (attained by that constant)
    Sensitivity: 1/2                                             (attained at 0)
    Source:      e^-x I1(x) / x and the slope decrease up to the top, so the square is concave in x^2 there
    """
    return torch.special.i1e(n.clamp(max=_TOP_OF_I1E)), 0.5


# -- the Airy function ------------------------------------------------------------------------------------------------------

_TOP_OF_AIRY = 1.018792971647471  # -x where Ai is largest, 0.5356567
_AIRY_AT_0, _AIRY_SLOPE_AT_0 = 0.3550280538878172, -0.2588194037928068
_AIRY_SLOPE_EXCESS = 0.0071753  # sup over x >= 0 of Ai'(-x)^4 - x / pi^2, at x = 2.292, rounded up


def _airy_terms(first: float, shift: int) -> list[float]:
    """Coefficients of y'' = x y in x^3, at -x."""
    terms = [first]
    for k in range(1, 9):
        at = 3 * k + shift
        terms.append(-terms[-1] / (at * (at - 1)))
    return terms


_AIRY_EVEN, _AIRY_ODD = _airy_terms(_AIRY_AT_0, 0), _airy_terms(-_AIRY_SLOPE_AT_0, 1)


@normed_op(torch.special.airy_ai).register_norm
def airy_ai(input: RMSTensor) -> RMSTensor:
    """Ai, the solution of y'' = x y that vanishes on the right.

    Value:       Ai(-min(n, 1.01879)), at most 0.53566       (attained by that constant)
    Sensitivity: (0.00718 + reach / pi^2)^(1/4)              (attained at reach 2.292 and, nearly, as it grows; below 2.3 loose)
    Gap:         below reach 2.3 the slope is that of the waves to the left, which have not begun there
    Source:      Ai(-sqrt u)^2 is concave up to the top, and larger than at sqrt u; dense evaluation of Ai', whose waves grow to the
                 left like x^(1/4) / sqrt(pi)
    """
    n = input.norm_size
    x = spoiled(n.clamp(max=_TOP_OF_AIRY), n)
    cube = x * x * x
    reach = n * math.sqrt(input.numel_normed)
    slope = (reach / math.pi**2 + _AIRY_SLOPE_EXCESS).sqrt().sqrt()
    return like(input, _series(_AIRY_EVEN, cube) + x * _series(_AIRY_ODD, cube), sensitivity={"input": slope})


# -- the normal distribution ------------------------------------------------------------------------------------------------


def _density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@pointwise(torch.special.ndtr, f=torch.special.ndtr, slope=_density)
def ndtr(n: torch.Tensor, reach: torch.Tensor) -> tuple:
    """The normal distribution function Phi.  Value Phi(n), attained by the constant n; sensitivity 1 / sqrt(2 pi), attained at 0.

    Phi phi / x decreases, so Phi(sqrt u)^2 is concave.
    """
    return torch.special.ndtr(n), 1 / math.sqrt(2 * math.pi)


@normed_op(torch.special.log_ndtr).register_norm
def log_ndtr(input: RMSTensor) -> RMSTensor:
    """log Phi.

    Value:       log 2 + (g(reach) - log 2) / sqrt(N), g(x) = -log Phi(-x)     (attained by the largest entry; from RMS to 0.8)
    Sensitivity: g'(reach) = sqrt(2 / pi) / erfcx(reach / sqrt 2)              (attained: a spike, along itself)
    Gap:         from RMS the chord to the spike and the constant log 2 cannot both be attained
    Source:      g is convex, so below log 2 and a multiple of |x|, that of the chord to the spike
    """
    root = math.sqrt(max(input.numel_normed, 1))
    reach = input.norm_size * root
    value = (-torch.special.log_ndtr(-reach) - math.log(2)) / root + math.log(2)
    return like(input, value, sensitivity={"input": math.sqrt(2 / math.pi) / torch.special.erfcx(reach / _SQRT2)})


@normed_op(torch.special.log_ndtr).register_norm(mode="typical")
def log_ndtr_typical(input: RMSTensor) -> RMSTensor:
    """log Phi of a Gaussian."""
    return typical_pointwise(
        input, torch.special.log_ndtr, lambda x: torch.exp(-0.5 * x * x - torch.special.log_ndtr(x)) / math.sqrt(2 * math.pi)
    )


@normed_op(torch.special.erfcx).register_norm
def erfcx(input: LinfTensor | RMSTensor) -> RMSTensor:
    """e^(x^2) erfc x for the largest entry n.

    Value:       that of -n                             (attained)
    Sensitivity: 2 / sqrt(pi) + 2 n erfcx(-n)           (attained at -n: it is convex and decreases)
    Raises NormMismatchError for an RMS norm (see `exp`).
    """
    only_largest_entry(input, "e^(x^2)", in_every_mode=True)
    n = input.norm_size
    value = torch.special.erfcx(-n)
    return like(input, value, sensitivity={"input": n * value * 2 + 2 / math.sqrt(math.pi)})
