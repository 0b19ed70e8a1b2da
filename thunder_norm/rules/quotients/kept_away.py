"""Quotients, powers, logarithms and inverse functions of what stays away from where they are infinite, by the norms at hand.

    F.softplus(x).log()
    1 / torch.sigmoid(x)
    torch.atanh(x.tanh())

No number keeps a softplus from 0, but entries of x of at most B in modulus do: it is at least softplus(-B).  Such ends of ranges are
functions of norms (`thunder_norm.core.ranges.End`), each operation's from those of its arguments.  Where a number for all norms says
enough, and where more is known of the whole (`kept_exponentials`, `logarithms`, normalizations), other rules go before these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._least_moduli import least_modulus, says_less_than_values
from thunder_norm.rules._shared import SAME_DIMS, Number, like, maximum, refined, rms
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.entrywise.powers import reach
from thunder_norm.rules.quotients.range_bounds import times_logarithm
from thunder_norm.scalars import times


def _is_kept(name: str, low: float = 0.0, high: float = math.inf) -> Callable[[dict[str, Any]], bool]:
    """Whether a bound for all inputs is asked for, and an argument's entries stay between two numbers; at the data more is known."""

    def condition(args: dict[str, Any]) -> bool:
        x = args[name]
        if current_mode() != "bound" or not isinstance(x, torch.Tensor) or is_complex(x):
            return False
        if isinstance(x, NormedTensor) and is_local(x):
            return False
        found = known_range(x)
        return found.is_well_above(low) and (high == math.inf or found.negative().is_well_above(-high))

    return condition


def _divides(args: dict[str, Any]) -> bool:
    is_kept = _is_kept("other")(args) or _is_kept("other", -math.inf, 0.0)(args)
    return args["rounding_mode"] is None and is_kept and not says_less_than_values(args["other"])


def ends(x: RMSTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest entry there can be."""
    found, n = known_range(x), x.norm_size
    low = found.least_of(n)
    return low, torch.maximum(low, torch.minimum(found.most_of(n), reach(x)))


@normed_op(torch.div).register_norm(when=_divides, lift_dims=SAME_DIMS, takes_complex=True)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b, for real b whose entries are of one sign and at least c > 0 in modulus; a may be complex.

    Value:       |a| / c
    Sensitivity: 1 / c to a;  k |a| / c^2 to b, k = sqrt(N) where both are RMS over the same dimensions, as in a product
    Source:      |d(1 / b)| = |db| / b^2
    Gap:         the norm of b counts by c alone, and one entry is as small as that
    """
    c = least_modulus(other)
    dims, k = product_dims(input, other)
    ca = refined(input, dims)
    return rms(input.norm_size * (ca / c), dims, sensitivity={"input": ca / c, "other": input.norm_size * (k / c**2)})


@normed_op(torch.div).register_norm(when=_divides)
def number_over(input: Number, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b for a number a: |a| times `reciprocal`.

    Gap:         that of `reciprocal`
    """
    inverse, a = reciprocal(other), math.fabs(input)
    return rms(times(inverse.norm_size, a), inverse.elem_dims, sensitivity={"other": (inverse._sensitivity or {})["input"] * a})


@normed_op(torch.reciprocal).register_norm(when=lambda args: _divides({"other": args["input"], "rounding_mode": None}))
def reciprocal(input: RMSTensor) -> RMSTensor:
    """1 / x, for x whose entries are of one sign and at least c > 0 in modulus.

    Value:       1 / c          (attained where the norm of x is that of its entries)
    Sensitivity: 1 / c^2
    Gap:         one entry is as small as c, and not all of them
    """
    c = least_modulus(input)
    return rms(bounded(1 / c, input.norm_size), input.elem_dims, sensitivity={"input": 1 / c**2})


@normed_op(torch.rsqrt).register_norm(when=_is_kept("input"))
def rsqrt(input: RMSTensor) -> RMSTensor:
    """1 / sqrt(x): `pow`.

    Gap:         that of `pow`
    """
    return pow(input, -0.5)


def _is_root_or_inverse(args: dict[str, Any]) -> bool:
    p = args["exponent"]
    return isinstance(p, int | float) and p < 1 and p != 0 and _is_kept("input")(args)


@normed_op(torch.float_power).register_norm(when=_is_root_or_inverse)
@normed_op(torch.pow).register_norm(when=_is_root_or_inverse)
def pow(input: RMSTensor, exponent: int | float) -> RMSTensor:
    """x^p for p < 1 and x of at least c > 0.

    Value:       n^p for 0 < p (attained: a constant; Jensen), c^p for p < 0
    Sensitivity: |p| c^(p - 1)
    Gap:         for p < 0 one entry is as small as c, and not all of them
    """
    c = known_range(input).least_of(input.norm_size)
    size = input.norm_size.pow(exponent) if exponent > 0 else bounded(c.pow(exponent), input.norm_size)
    return like(input, size, sensitivity={"input": abs(exponent) * c.pow(exponent - 1)})


@normed_op(torch.float_power).register_norm(when=_is_kept("input"))
@normed_op(torch.pow).register_norm(when=_is_kept("input"))
def power_of_tensors(input: RMSTensor, exponent: LinfTensor) -> RMSTensor:
    """x^p, entry by entry, for x between c > 0 and R and |p| <= q.

    Value:       e^(q l), l the largest of |log c| and |log R|      (attained where p has the sign that x needs)
    Sensitivity: q max(1, 1 / c) e^(q l) to x, l e^(q l) to p
    Source:      x^p = e^(p log x), whose slope in x is p x^p / x
    Gap:         a norm bounds the modulus of p, and its slope in x is largest where x is least
    """
    q = exponent.norm_size
    low, high = ends(input)
    far = maximum([low.log().abs(), high.log().abs()])
    size = torch.exp(q * far)
    return rms(size, (), sensitivity={"input": q * size / low * refined(input, ()), "exponent": far * size})


# -- logarithms -----------------------------------------------------------------------------------------------------------


def _logarithm(op: Callable, base: float) -> Callable:
    def rule(input: RMSTensor) -> RMSTensor:
        low, high = ends(input)
        value, slope = maximum([low.log().abs(), high.log().abs()]), 1 / low
        unit = 1 / math.log(base)
        return rms(times(value, unit), input.elem_dims, sensitivity={"input": times(slope, unit)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = (
        f"{op.__name__} x, for x between c > 0 and R.\n\nValue:       the largest of |{op.__name__} c| and |{op.__name__} R|\n"
        "Sensitivity: 1 / c, by the logarithm of the base\nGap:         one entry is as small as c, and not all of them"
    )
    normed_op(op).register_norm(rule, when=_is_kept("input"))
    return rule


_log = _logarithm(torch.log, math.e)
_logarithm(torch.log2, 2.0)
_logarithm(torch.log10, 10.0)


@normed_op(torch.xlogy).register_norm(when=_is_kept("other"), lift_dims=SAME_DIMS)
def xlogy(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """a log b, for b of at least c > 0.

    Value:       k |a| |log b|, as of a product, and the logarithm as in `log`
    Sensitivity: k |log b| to a;  k |a| / c to b
    Gap:         that of `log`
    """
    return times_logarithm(input, other, _log(other))


@normed_op(torch.log1p).register_norm(when=_is_kept("input", low=-1.0))
def log1p(input: RMSTensor) -> RMSTensor:
    """log(1 + x), for x between c > -1 and R.

    Value:       the largest of |log(1 + c)| and |log(1 + R)|
    Sensitivity: 1 / (1 + c)
    Gap:         one entry is as small as c, and not all of them
    """
    low, high = ends(input)
    value = maximum([low.log1p().abs(), high.log1p().abs()])
    return rms(value, input.elem_dims, sensitivity={"input": 1 / (1 + low)})


# -- inverses of functions that tend to a number --------------------------------------------------------------------------


def _inverse_of_odd(op: Callable, slope: Callable[[torch.Tensor], torch.Tensor], slope_as_written: str) -> None:
    """Register the rule of a function on (-1, 1), odd, and convex above 0."""

    def rule(input: RMSTensor) -> RMSTensor:
        most = known_range(input).largest_modulus_of(input.norm_size)
        return rms(op(most), input.elem_dims, sensitivity={"input": slope(most)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = (
        f"{op.__name__} x, for x between -c and c, c < 1.\n\nValue:       {op.__name__} c\nSensitivity: {slope_as_written}\n"
        "Gap:         one entry is as large as c, and not all of them"
    )
    normed_op(op).register_norm(rule, when=_is_kept("input", -1.0, 1.0))


_inverse_of_odd(torch.atanh, lambda x: 1 / (1 - x.square()), "1 / (1 - c^2)")
_inverse_of_odd(torch.erfinv, lambda x: math.sqrt(math.pi) / 2 * torch.erfinv(x).square().exp(), "sqrt(pi) / 2 e^(erfinv(c)^2)")


def between_0_and_1(args: dict[str, Any]) -> bool:
    """Whether a bound for all inputs is asked for, of what stays away from 0 and 1."""
    return args.get("eps") is None and _is_kept("input", 0.0, 1.0)(args)


def _of_shares(x: RMSTensor, f: Callable, slope: Callable[[torch.Tensor], torch.Tensor]) -> RMSTensor:
    found, n = known_range(x), x.norm_size
    ends = found.least_of(n), found.most_of(n)
    return rms(maximum([f(e).abs() for e in ends]), x.elem_dims, sensitivity={"input": maximum([slope(e) for e in ends])})


@normed_op(torch.logit).register_norm(when=between_0_and_1)
def logit(input: RMSTensor, eps: float | None = None) -> RMSTensor:
    """log(x / (1 - x)), for x between a and b, 0 < a and b < 1.

    Value:       the largest modulus at an end
    Sensitivity: 1 / (x (1 - x)) at one of the ends: it is convex
    Gap:         one entry is as near to 0 or 1 as that, and not all of them
    """
    return _of_shares(input, torch.logit, lambda x: 1 / (x * (1 - x)))


@normed_op(torch.special.ndtri).register_norm(when=between_0_and_1)
def ndtri(input: RMSTensor) -> RMSTensor:
    """The quantile of a Gaussian, for x between a and b, 0 < a and b < 1.

    Value:       the largest modulus at an end
    Sensitivity: sqrt(2 pi) e^(q^2 / 2), q the value
    Gap:         one entry is as near to 0 or 1 as that, and not all of them
    """
    ndtri = torch.special.ndtri
    return _of_shares(input, ndtri, lambda x: math.sqrt(2 * math.pi) * (ndtri(x).square() / 2).exp())
