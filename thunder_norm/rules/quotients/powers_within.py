"""Norm rules for powers of what is known to be positive: negative ones, roots, and those that a tensor says.

Entries of the base are between c > 0, by what made it, and its reach R, the largest entry that its norm allows; a power of them, and its
slope, is largest at one of these ends.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import are_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.ranges import TINY
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import like, maximum, refined, rms, scalar
from thunder_norm.rules.entrywise.powers import reach
from thunder_norm.rules.weighted.kept_exponentials import is_exponential


def _least(x: Any) -> float:
    return known_range(x).low


def _is_root_or_inverse(args: dict[str, Any]) -> bool:
    p = args["exponent"]
    return (
        current_mode() == "bound"
        and isinstance(args["input"], RMSTensor)
        and isinstance(p, int | float)
        and p < 1
        and p != 0
        and _least(args["input"]) > TINY
        and not are_local(args)
    )


@normed_op(torch.float_power).register_norm(when=_is_root_or_inverse)
@normed_op(torch.pow).register_norm(when=_is_root_or_inverse)
def pow(input: RMSTensor, exponent: int | float) -> RMSTensor:
    """x^p for p < 1 and x of at least c > 0.

    Value:       n^p for 0 < p (attained: a constant; Jensen), c^p for p < 0
    Sensitivity: |p| c^(p - 1)
    Gap:         for p < 0 the norm of x does not count
    """
    c = _least(input)
    size = input.norm_size.pow(exponent) if exponent > 0 else bounded(_power(c, exponent), input.norm_size)
    return like(input, size, sensitivity={"input": abs(exponent) * _power(c, exponent - 1)})


def _power(c: float, exponent: float) -> float:
    """c^p of a number c > 0, infinite where it is larger than the largest float."""
    try:
        return c**exponent
    except OverflowError:
        return math.inf


def _has_positive_base(args: dict[str, Any]) -> bool:
    if not isinstance(args["input"], torch.Tensor) or are_local(args):  # plain: a parameter
        return False
    return current_mode() != "bound" or _least(args["input"]) > TINY


@normed_op(torch.float_power).register_norm(when=_has_positive_base)
@normed_op(torch.pow).register_norm(when=_has_positive_base)
def power_of_tensors(input: RMSTensor, exponent: LinfTensor) -> RMSTensor:
    """x^p, entry by entry, for x of at least c > 0 and |p| <= q.

    Value:       e^(q l), l the largest of |log c| and |log R|      (attained where p has the sign that x needs)
    Sensitivity: q e^((q + 1) l) to x, l e^(q l) to p
    Typical:     n^q; q n^(q - 1) to x, |log n| n^q to p
    Source:      x^p = e^(p log x)
    Gap:         a norm bounds the modulus of p, and its slope in x is largest where x is least
    """
    q = exponent.norm_size
    if current_mode() == "bound":
        c = scalar(_least(input), input.norm_size)
        far = maximum([c.log().abs(), torch.maximum(reach(input), c).log().abs()])
        size = torch.exp(q * far)
        to_base = q * torch.exp((q + 1) * far)
        return rms(size, (), sensitivity={"input": to_base * refined(input, ()), "exponent": far * size})
    n = input.norm_size.clamp(min=max(_least(input), TINY))
    size = n.pow(q)
    return like(input, size, sensitivity={"input": q * n.pow(q - 1), "exponent": n.log().abs() * size})


def _does_not_shrink(args: dict[str, Any]) -> bool:
    """Whether the base is at least 0, by what made it, and the exponent at least 1."""
    x, p = args["input"], args["exponent"]
    return current_mode() == "bound" and isinstance(x, NormedTensor) and _least(x) >= 0 and _least(p) >= 1 and not are_local(args)


@normed_op(torch.float_power).register_norm(when=_does_not_shrink)
@normed_op(torch.pow).register_norm(when=_does_not_shrink)
def power_of_at_least_one(input: RMSTensor, exponent: LinfTensor) -> RMSTensor:
    """x^p, entry by entry, for 0 <= x <= R, by its norm or its range, and 1 <= p <= q.

    Value:       max(R, R^q), attained
    Sensitivity: q max(1, R^(q - 1)) to x, attained for R >= 1;  max(1 / e, R^q log R) to p
    Source:      x |log x| <= 1 / e below 1
    Gap:         for R < 1 the slope in x is that at p = 1, and the largest p may be another entry's
    """
    q = exponent.norm_size.clamp(min=1.0)
    largest = torch.minimum(reach(input), scalar(known_range(input).high, input.norm_size))
    beyond = largest.clamp(min=1.0)
    size = torch.maximum(largest, beyond.pow(q) + (largest - beyond))
    to_exponent = torch.maximum(scalar(1 / math.e, size), beyond.pow(q) * beyond.log())
    to_base = q * beyond.pow(q - 1)
    return rms(size, (), sensitivity={"input": to_base * refined(input, ()), "exponent": to_exponent})


def _has_no_more_than_a_sign(args: dict[str, Any]) -> bool:
    x = args["input"]
    return math.isfinite(_least(x)) and 0 <= _least(x) <= TINY and not is_exponential(args) and not are_local(args)


@normed_op(torch.sqrt).register_norm(when=_has_no_more_than_a_sign)
def sqrt(input: RMSTensor) -> RMSTensor:
    """The root of x >= 0, whose least number that is not 0 is s in its dtype; of x >= c > 0, by the norms at hand, where that says more.

    Value:       sqrt(n)          (attained by a constant)
    Sensitivity: min(1 / sqrt(s), 1 / (2 sqrt(c))): between two numbers of the dtype |sqrt x - sqrt y| = |x - y| / (sqrt x + sqrt y), and
                 the larger one is at least s      (attained: from 0 to s)
    Gap:         no derivative shows it
    Typical:     1 / (2 sqrt(n))
    """
    n = input.norm_size
    if current_mode() != "bound":
        return like(input, n.sqrt(), sensitivity={"input": 0.5 * n.clamp(min=1e-30).rsqrt()})
    info = torch.finfo(input.dtype)
    steepest = scalar((info.tiny * info.eps) ** -0.5, n)
    return like(input, n.sqrt(), sensitivity={"input": torch.minimum(steepest, 0.5 * known_range(input).least_of(n).rsqrt())})
