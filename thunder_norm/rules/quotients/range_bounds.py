"""Rules for quotients, roots, logarithms and products of tensors whose entries are known to be away from 0, or bounded (`ranges`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import are_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.ranges import TINY
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._facts import unconditional
from thunder_norm.rules._least_moduli import is_near_its_norm, says_less_than_values, smallest
from thunder_norm.rules._shared import SAME_DIMS, Number, refined, rms, scalar
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.entrywise.powers import reach
from thunder_norm.rules.weighted.weighted_means import quotient_at_most
from thunder_norm.scalars import times


def _away_from_zero(name: str) -> Callable[[dict[str, Any]], bool]:
    def condition(args: dict[str, Any]) -> bool:
        return known_range(args[name]).smallest_modulus > TINY and not are_local(args)

    return condition


def _above_zero(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: known_range(args[name]).low > TINY and not are_local(args)


def _is_bounded_product(args: dict[str, Any]) -> bool:
    """Whether a factor's entries are bounded, where both norms together lose something."""
    a, b = args["input"], args["other"]
    if current_mode() != "bound" or not (isinstance(a, RMSTensor) and isinstance(b, RMSTensor)):
        return False
    return min(known_range(t).largest_modulus for t in (a, b)) < math.inf and product_dims(a, b)[1] > 1


@normed_op(torch.mul).register_norm(when=_is_bounded_product)
def mul_by_range(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """a b, where the entries of b are at most B in modulus, by what made it, or those of a at most A.

    Value:       min(sqrt(N) |a| |b|, B |a|, A |b|)
    Sensitivity: min(sqrt(N) |b|, B) to a, min(sqrt(N) |a|, A) to b
    Gap:         a norm and a range are not attained together
    """
    result = unconditional(torch.mul, input, other)
    dims, sensitivity = result.elem_dims, dict(result._sensitivity or {})
    size = result.norm_size
    for x, name, by in ((input, "input", other), (other, "other", input)):
        largest = known_range(by).largest_modulus
        if largest < math.inf:
            c = refined(x, dims) * largest
            size = torch.minimum(size, times(x.norm_size, c))
            sensitivity[name] = torch.minimum(sensitivity[name], scalar(c, size))
    return rms(size, dims, sensitivity=sensitivity)


def _divides_by_range(args: dict[str, Any]) -> bool:
    return args["rounding_mode"] is None and _away_from_zero("other")(args) and not says_less_than_values(args["other"])


@normed_op(torch.div).register_norm(when=_divides_by_range, lift_dims=SAME_DIMS, takes_complex=True)
def div_by_range(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b, for real b whose entries are at least c > 0 in modulus, by what made it; a may be complex.

    Value:       |a| / c; at most |v| for a weighted mean of v (`weighted_means`)
    Sensitivity: 1 / c to a;  k |a| / c^2 to b, k = sqrt(N) where both are RMS over the same dimensions, as in a product
    Typical:     c = |b| sqrt(1 - 2 / N), where each entry of b is a length, a mean or a sum of N numbers; c = |b| where an epsilon
                 alone keeps b from 0; c is 0.02 |b| at least
    Source:      |d(1 / b)| = |db| / b^2
    Gap:         the norm of b does not count
    """
    c = smallest(other)
    dims, k = product_dims(input, other)
    ca = refined(input, dims)
    result = rms(input.norm_size * (ca / c), dims, sensitivity={"input": ca / c, "other": input.norm_size * (k * c**-2)})
    return quotient_at_most(input, other, result) if current_mode() == "bound" else result  # type: ignore[return-value]


@normed_op(torch.div).register_norm(when=lambda args: args["rounding_mode"] is None and _away_from_zero("other")(args))
def number_by_range(input: Number, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """c / b: c times `reciprocal`."""
    inverse = reciprocal(other)
    c = math.fabs(input)
    return rms(times(inverse.norm_size, c), inverse.elem_dims, sensitivity={"other": (inverse._sensitivity or {})["input"] * c})


@normed_op(torch.reciprocal).register_norm(when=_away_from_zero("input"))
def reciprocal(input: RMSTensor) -> RMSTensor:
    """1 / x, for x whose entries are at least c > 0 in modulus.

    Value:       1 / c
    Sensitivity: 1 / c^2
    Typical:     c as in `div_by_range`
    Gap:         the norm of x does not count
    """
    c = smallest(input)
    return rms(bounded(1 / c, input.norm_size), input.elem_dims, sensitivity={"input": c**-2})


@normed_op(torch.rsqrt).register_norm(when=_above_zero("input"))
def rsqrt(input: RMSTensor) -> RMSTensor:
    """1 / sqrt(x), for x of at least c > 0.

    Value:       c^(-1/2)
    Sensitivity: c^(-3/2) / 2
    Typical:     c as in `div_by_range`
    Gap:         the norm of x does not count
    """
    c = smallest(input)
    return rms(bounded(c**-0.5, input.norm_size), input.elem_dims, sensitivity={"input": 0.5 * c**-1.5})


@normed_op(torch.sqrt).register_norm(when=_above_zero("input"))
def sqrt(input: RMSTensor) -> RMSTensor:
    """The root of an x of at least c > 0.

    Value:       sqrt(n)          (attained by a constant)
    Sensitivity: c^(-1/2) / 2
    Typical:     c as in `div_by_range`
    """
    return rms(input.norm_size.sqrt(), input.elem_dims, sensitivity={"input": 0.5 * smallest(input) ** -0.5})


@normed_op(torch.log).register_norm(when=_above_zero("input"))
def log(input: RMSTensor) -> RMSTensor:
    """log x, for x of at least c > 0.

    Value:       min(|log c| + (n + c) / c, max(|log c|, |log R|)), where no entry exceeds the reach R
    Sensitivity: 1 / c
    Typical:     sqrt(log(n)^2 + 1) and 1 / c, c as in `div_by_range`, where an epsilon alone keeps x from 0 or entries are means of many
    Source:      |log x - log c| <= (x - c) / c, the slope at c; and the modulus is largest at an end
    Gap:         from RMS, where all entries are as large as the reach of one; at c, where no entry is as small
    """
    c = known_range(input).low
    if is_near_its_norm(input):
        n = input.norm_size.clamp(min=c)
        return rms((n.log().square() + 1).sqrt(), input.elem_dims, sensitivity={"input": 1 / smallest(input)})
    by_slope = input.norm_size / c + (abs(math.log(c)) + 1)
    least = known_range(input).least_of(input.norm_size)
    by_ends = torch.maximum(torch.maximum(reach(input), least).log().abs(), least.log().abs())
    return rms(torch.minimum(by_slope, by_ends), input.elem_dims, sensitivity={"input": 1 / least})


def _is_of_itself(args: dict[str, Any]) -> bool:
    """Whether it is x log x of an x that no number is below 0 of, and that moves only where some number keeps it away from 0."""
    x = args["input"]
    if x is not args["other"] or current_mode() != "bound" or are_local(args):
        return False
    low = known_range(x).low
    return low > 0 or low == 0 and x.perturbation_size is None


@normed_op(torch.xlogy).register_norm(when=_is_of_itself)
def xlogy_of_itself(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """x log x, for x of at least c >= 0, no entry of which exceeds the reach R.

    Value:       max(1 / e, R log R)                              (attained: entries of 1 / e, or of R)
    Sensitivity: max(|1 + log c|, |1 + log R|)                    (attained at c or R; for c = 0 of what does not move)
    Source:      x log x is least at 1 / e, and convex
    Gap:         of a softmax, not all entries are as large as one may be
    """
    value, slope = _x_log_x(input)
    return rms(value, input.elem_dims, sensitivity={"input": slope, "other": 0})


def _x_log_x(x: RMSTensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    c, largest = known_range(x).low, reach(x)
    at_least_one = largest.clamp(min=1)  # below, the value is that at 1 / e
    value = torch.clamp(at_least_one * at_least_one.log(), min=math.exp(-1))
    return value, torch.clamp((1 + largest.clamp(min=c).log()).abs(), min=abs(1 + math.log(c))) if c > 0 else 0.0


@normed_op(torch.special.entr).register_norm(when=lambda args: _is_of_itself({**args, "other": args["input"]}))
def entr_above_zero(input: RMSTensor) -> RMSTensor:
    """-x log x, for x of at least c >= 0: `xlogy_of_itself`.

    Gap:         that of `xlogy_of_itself`
    """
    value, slope = _x_log_x(input)
    return rms(value, input.elem_dims, sensitivity={"input": slope})


@normed_op(torch.xlogy).register_norm(when=_above_zero("other"), lift_dims=SAME_DIMS)
def xlogy(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """a log b, for b of at least c > 0.

    Value:       k |a| |log b|, as of a product, and the logarithm as in `log`
    Sensitivity: k |log b| to a;  k |a| / c to b
    Gap:         that of `log`
    """
    return times_logarithm(input, other, log(other))


def times_logarithm(a: RMSTensor, b: RMSTensor, logs: RMSTensor) -> RMSTensor:
    """What `xlogy` says of a log b, by what the rule of the logarithm says of b."""
    dims, k = product_dims(a, b)
    moved = {"input": logs.norm_size * k, "other": a.norm_size * (k * (logs._sensitivity or {})["input"])}
    return rms(a.norm_size * logs.norm_size * k, dims, sensitivity=moved)


@normed_op(torch.xlogy).register_norm(when=_above_zero("other"))
def number_times_log(input: Number, other: RMSTensor) -> RMSTensor:
    """c log b: c times `log`.

    Gap: that of `log`
    """
    logs, c = log(other), math.fabs(input)
    return rms(times(logs.norm_size, c), logs.elem_dims, sensitivity={"other": times((logs._sensitivity or {})["input"], c)})


def _above_minus_one(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: known_range(args[name]).low > -1 and not are_local(args)


@normed_op(torch.log1p).register_norm(when=_above_minus_one("input"))
def log1p(input: RMSTensor) -> RMSTensor:
    """log(1 + x), for x of at least c > -1.

    Value:       n max(1, |log(1 + c) / c|): the chord from 0 to c is steeper than all others; at most max(|log(1 + c)|, log(1 + R)) for
                 the reach R
    Sensitivity: 1 / (1 + c)
    Gap:         the chord and the slope at c are attained by x next to c alone, which a larger norm need not be
    """
    c = known_range(input).low
    steepest = 1.0 if c >= 0 else math.log1p(c) / c
    least = known_range(input).least_of(input.norm_size)
    by_ends = torch.maximum(torch.maximum(reach(input), least).log1p().abs(), least.log1p().abs())
    size = torch.minimum(times(input.norm_size, steepest), by_ends)
    return rms(size, input.elem_dims, sensitivity={"input": 1 / (1 + least)})


@normed_op(torch.special.xlog1py).register_norm(when=_above_minus_one("other"), lift_dims=SAME_DIMS)
def xlog1py(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """a log(1 + b), for b of at least c > -1.

    Value:       k |a| |log(1 + b)|, as of a product, and the logarithm as in `log1p`
    Sensitivity: k |log(1 + b)| to a;  k |a| / (1 + c) to b
    Gap:         that of `log1p`
    """
    return times_logarithm(input, other, log1p(other))


@normed_op(torch.special.xlog1py).register_norm(when=_above_minus_one("other"))
def number_times_log1p(input: Number, other: RMSTensor) -> RMSTensor:
    """c log(1 + b): c times `log1p`.

    Gap: that of `log1p`
    """
    logs, c = log1p(other), math.fabs(input)
    return rms(times(logs.norm_size, c), logs.elem_dims, sensitivity={"other": times((logs._sensitivity or {})["input"], c)})
