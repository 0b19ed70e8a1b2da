"""Norm rules for powers, exponentials, roots and logarithms of each entry."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder_norm.core.context import current_mode, lift, run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._gaussian import length_moment
from thunder_norm.rules._local import slope as local_slope
from thunder_norm.rules._pointwise import Function, typical_pointwise
from thunder_norm.rules._shared import like, refuse, rms, scaled
from thunder_norm.scalars import times


@normed_op(torch.pow).register_norm
def pow(input: RMSTensor, exponent: int | float) -> RMSTensor:
    """x^p, p >= 1 (an integer, or x >= 0) or p = 0.

    Value:       N^((p-1)/2) n^p            (attained: a spike)
    Sensitivity: p N^((p-1)/2) n^(p-1)      (attained: a spike, along itself)
    Typical:     of Gaussians, or of lengths of as many as entries of one sign are known to be of
    Raises NormMismatchError for 0 < p < 1 and p < 0, whose slope or value is unbounded next to 0.
    """
    if exponent == 0:
        return like(input, torch.ones_like(input.norm_size), sensitivity={"input": 0})
    if exponent < 1:
        raise NormMismatchError(f"x ** {exponent} is not Lipschitz next to 0; add a rule of your own where x stays away from 0")
    if exponent == 1:
        return scaled(input, 1)
    n, gain = input.norm_size, float(input.numel_normed) ** ((exponent - 1) / 2)
    if current_mode() == "typical":
        found = known_range(input)
        count = found.averaged if found.low >= 0 or found.high <= 0 else 1.0
        value, slope = (math.sqrt(length_moment(p, count)) for p in (2 * exponent, 2 * exponent - 2))
        slope *= exponent
    else:
        value, slope = gain, exponent * gain
    return like(input, times(n.pow(exponent), value), sensitivity={"input": n.pow(exponent - 1) * slope})


@normed_op(torch.square).register_norm
def square(input: RMSTensor) -> RMSTensor:
    """x^2.  Value sqrt(N) n^2 and sensitivity 2 sqrt(N) n, attained by a spike."""
    return pow(input, 2)


def only_largest_entry(x: RMSTensor, name: str, *, in_every_mode: bool = False) -> None:
    """Refuse an RMS norm, whose largest entry may be sqrt(N) n, where all bounds come from that one."""
    if (in_every_mode or current_mode() == "bound") and not isinstance(x, LinfTensor):
        raise NormMismatchError(
            f"an RMS norm over {x.numel_normed} elements allows an entry of {math.sqrt(x.numel_normed):.4g} times the norm, and "
            f"{name} of that is rarely meant; if it is, convert to a LinfTensor first (thunder_norm.core.conversions.convert)"
        )


def reach(x: RMSTensor) -> torch.Tensor:
    """The largest entry there can be; in modes without a guarantee an entry of the norm's size."""
    return times(x.norm_size, math.sqrt(max(x.numel_normed, 1)) if current_mode() == "bound" else 1.0)


def growing(x: RMSTensor, value: torch.Tensor, at_zero: float, slope_at_zero: float) -> torch.Tensor:
    """The largest RMS of f(x), f growing with |x| to `value` at x's reach R.

    With g(t) = f(t)^2 and a = 2 f(0) f'(0): ``mean g <= f(0)^2 + a n + (g(R) - f(0)^2 - a R) / N``, and f(R) at most.
    Source:      what is left of g, ``g(t) - a t``, is convex in t^2, so its mean is at most the chord's value: that of spikes
    """
    linear, square = 2 * at_zero * slope_at_zero, at_zero**2
    count = max(x.numel_normed, 1)
    if count == 1 or current_mode() != "bound":
        return value
    mean = square + linear * x.norm_size + (value.square() - square - linear * reach(x)) / count
    least = torch.minimum(value, mean.clamp(min=0.0).sqrt())
    return torch.where(value < math.inf, least, value)  # infinity minus infinity is NaN


@normed_op(torch.pow).register_norm
def exponential(input: int | float, exponent: RMSTensor) -> RMSTensor:
    """c^x, c > 0.

    Value:       e^(|log c| n) for the largest entry n, attained; from RMS sqrt(1 + 2 r n + (e^(2 r R) - 1 - 2 r R) / N), r = |log c|
                 and R = sqrt(N) n, see `growing`
    Sensitivity: |log c| e^(|log c| R), attained;  local: the largest at the data
    Gap:         from RMS a spike and the rest of the entries cannot take all of the norm
    Raises NormMismatchError for c <= 0.
    """
    rate = _rate(input)
    largest = torch.exp(reach(exponent) * rate)
    steepest = largest * rate
    if is_local(exponent):
        steepest = torch.minimum(steepest, local_slope(exponent, lambda x: input**x * rate))
    return like(exponent, growing(exponent, largest, 1.0, rate), sensitivity={"exponent": steepest})


def _rate(base: float) -> float:
    if base <= 0:
        raise NormMismatchError(f"{base} ** x is unbounded or undefined where x is negative: the base must be positive")
    return math.fabs(math.log(base))


@normed_op(torch.pow).register_norm(mode="typical")
def exponential_typical(input: int | float, exponent: RMSTensor) -> RMSTensor:
    """c^x of a Gaussian: e^(log(c)^2 n^2), and |log c| times that; beyond |log c| n = 1 as of `grows_exponentially`."""
    rate = _rate(input)
    grown = exponent.norm_size * rate
    value = torch.exp(grown.square().clamp(max=1.0)) * grown.clamp(min=1.0)
    return like(exponent, value, sensitivity={"exponent": value * rate})


@normed_op(torch.pow).register_norm(allow_plain_tensors="constant")
def exponential_of_tensor(input: torch.Tensor, exponent: RMSTensor) -> RMSTensor:
    """c^x with a plain tensor c > 0: as `exponential` of the largest entry, with the largest |log c|.

    Value and sensitivity are infinite where c has an entry 0, whose negative powers are.
    """
    real = input if input.is_floating_point() else run_real(torch.Tensor.to, (input, exponent.dtype), {})
    rate = lift(run_real(torch.log, (real,), {}), LinfTensor).norm_size
    value = torch.exp(reach(exponent) * rate)
    return rms(value, exponent.elem_dims, sensitivity={"exponent": value * rate})


refuse(
    normed_op(torch.pow),
    "whether a power is bounded, and has a slope, depends on the exponent: it must be 0, 1 or larger than 1, and known as a number",
)


@normed_op(torch.float_power).register_norm
def float_power(input: RMSTensor, exponent: int | float) -> RMSTensor:
    """x^p in double precision: `pow`."""
    return pow(input, exponent)


@normed_op(torch.float_power).register_norm
def float_exponential(input: int | float, exponent: RMSTensor) -> RMSTensor:
    """c^x in double precision: `exponential`."""
    return exponential(input, exponent)


normed_op(torch.float_power).register_norm(exponential_of_tensor, allow_plain_tensors="constant")
refuse(normed_op(torch.float_power), "as for pow: the exponent must be 0, 1 or larger than 1, and known as a number")


def _exp2_slope(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x) * math.log(2)


def grows_exponentially(
    op: Callable, value: Function, slope: Function, derivative: Function, f: Function | None = None, rate: float = 1.0
) -> None:
    """Register the rule of op, monotone in |x| and in the end as e^(`rate` x), by its value and slope at the largest entry.

    In mode "typical" they are those of a Gaussian as far as `rate` n <= 1.  Beyond, the second moment e^(n^2) of e^x is that of entries
    2 n standard deviations away, which no tensor has; and where e^x of entries as large as n were meant, a program would soon overflow:
    what is exponentiated and large is negative (sums of logarithms, decays).  So it goes on as n, and not as e^n.  f is the function if op
    has no derivative in torch.
    """
    zero = torch.zeros((), dtype=NORM_DTYPE)
    at_zero, slope_at_zero = value(zero).item(), slope(zero).item()

    def rule(input: LinfTensor | RMSTensor) -> RMSTensor:  # other kinds become the former
        largest = reach(input)
        steepest = slope(largest)
        if is_local(input):
            steepest = torch.minimum(steepest, local_slope(input, derivative))
        return like(input, growing(input, value(largest), at_zero, slope_at_zero), sensitivity={"input": steepest})

    def typical(input: RMSTensor) -> RMSTensor:
        n = input.norm_size
        beyond = (n * rate).clamp(min=1.0)
        found = typical_pointwise(like(input, n.clamp(max=1 / rate)), f or op, derivative)
        return like(input, found.norm_size * beyond, sensitivity={"input": (found._sensitivity or {})["input"] * beyond})

    for fn in (rule, typical):
        fn.__name__ = fn.__qualname__ = op.__name__
        fn.__doc__ = (
            f"{op.__name__} x.\n\nValue:       that of the largest entry R = sqrt(N) n, attained; from RMS less, see `growing`\n"
            "Sensitivity: the slope at R, attained; local: the largest at the data\n"
            "Typical:     of a Gaussian as far as n <= 1, times n beyond (exp2: log(2) n)\n"
            "Gap:         from RMS a spike and the rest of the entries cannot take all of the norm"
        )
    normed_op(op).register_norm(rule)
    normed_op(op).register_norm(mode="typical")(typical)


grows_exponentially(torch.exp, torch.exp, torch.exp, torch.exp)
grows_exponentially(torch.expm1, torch.expm1, torch.exp, torch.exp)
grows_exponentially(torch.exp2, torch.exp2, _exp2_slope, _exp2_slope, rate=math.log(2))
grows_exponentially(torch.sinh, torch.sinh, torch.cosh, torch.cosh)
grows_exponentially(torch.cosh, torch.cosh, torch.sinh, torch.sinh)


# -- functions with a singularity at 0 ------------------------------------------------------------------------------------


@normed_op(torch.sqrt).register_norm
def sqrt(input: RMSTensor) -> RMSTensor:
    """Square root of x >= 0.

    Value:       sqrt(n)        (attained by the constant n; Jensen: E x <= rms)
    Sensitivity: none: the slope at 0 is infinite
    Raises NormMismatchError where the input carries a perturbation_size.
    """
    if input.perturbation_size is not None:
        raise NormMismatchError(SINGULAR.format("sqrt"))
    return like(input, input.norm_size.sqrt())


SINGULAR = (
    "{} has an infinite slope or value at 0, and a norm gives no lower bound on entries; "
    "use the fused operation (layer_norm, rms_norm, normalize, softmax), or register a rule with the lower bound you know"
)

for _op in (torch.rsqrt, torch.reciprocal, torch.log, torch.log2, torch.log10, torch.log1p):
    refuse(normed_op(_op), SINGULAR.format(_op.__name__))
