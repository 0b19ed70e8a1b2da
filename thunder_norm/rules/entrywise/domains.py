"""Norm rules for functions of each entry that are defined, or finite, on part of the line only.

A norm bounds entries from above.  Where a function stays bounded up to the edge of its domain it has a value; its slope there is
infinite, so it refuses an input that carries a perturbation_size.  Where it does not stay bounded it is refused altogether.  A
claim is about the entries in the domain: for the others torch returns NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import like, refuse
from thunder_norm.rules.entrywise.powers import SINGULAR


def _refuse_slope(op: Callable, input: RMSTensor, edge: str) -> None:
    if input.perturbation_size is not None:
        raise NormMismatchError(
            f"{op.__name__} has an infinite slope at {edge}, and a norm does not keep entries away from there; clamp the input and "
            "register a rule for what you know about it"
        )


def _asin_size(input: RMSTensor) -> torch.Tensor:
    """The largest RMS of asin x: pi / 2 where an entry may be 1, which then as many are as the norm allows."""
    root = math.sqrt(max(input.numel_normed, 1))
    reach = input.norm_size * root
    is_inside = reach < 1
    spike = torch.asin(torch.where(is_inside, reach, torch.zeros_like(reach))) / root  # asin has no slope at 1
    outside = spoiled(input.norm_size.clamp(max=1.0), input.norm_size) * (math.pi / 2)
    return torch.where(is_inside, spike, outside)


@normed_op(torch.asin).register_norm
def asin(input: RMSTensor) -> RMSTensor:
    """Arcsine of |x| <= 1.

    Value:       asin(reach) / sqrt(N) for reach = sqrt(N) n < 1     (attained: a spike)
                 min(n, 1) pi / 2 beyond                              (attained where N n^2 is an integer: that many ones)
    Sensitivity: none: the slope at 1 is infinite
    Source:      asin(x) / x increases, so the chord from 0 to the largest entry is above all others
    Raises NormMismatchError where the input carries a perturbation_size.
    """
    _refuse_slope(torch.asin, input, "1 and -1")
    return like(input, _asin_size(input))


@normed_op(torch.acos).register_norm
def acos(input: RMSTensor) -> RMSTensor:
    """Arccosine of |x| <= 1: pi / 2 - asin x.

    Value:       pi / 2 + that of `asin`        (attained by the largest entry, from RMS to 0.85: a constant or a spike)
    Sensitivity: none: the slope at 1 is infinite
    Gap:         from RMS the constant pi / 2 and the spike of asin cannot both be attained
    Raises NormMismatchError where the input carries a perturbation_size.
    """
    _refuse_slope(torch.acos, input, "1 and -1")
    return like(input, _asin_size(input) + math.pi / 2)


def _stays_inside(args: dict[str, Any]) -> bool:
    """Whether entries are between -c and c, c < 1, by what made them, or sizes are typical ones; at the data its derivative says more."""
    x = args["input"]
    if not isinstance(x, RMSTensor) or is_local(x):
        return False
    return current_mode() != "bound" or known_range(x).is_above(-1.0) and known_range(x).is_below(1.0)


_INSIDE = 0.9  # typical entries are no nearer to 1 than this


def _slope_inside(x: RMSTensor) -> torch.Tensor:
    r, n = known_range(x), x.norm_size
    is_known = current_mode() == "bound" or r.largest_modulus < 1
    c = r.largest_modulus_of(n) if is_known else n.clamp(max=_INSIDE)
    c = torch.minimum(c, n.clamp(max=_INSIDE)) if current_mode() != "bound" else c
    return (1 - c.square()).rsqrt()


@normed_op(torch.asin).register_norm(when=_stays_inside)
def asin_inside(input: RMSTensor) -> RMSTensor:
    """Arcsine of |x| <= c < 1, by what made x and the norms at hand: value as ever, sensitivity 1 / sqrt(1 - c^2).

    Typical:     c = min(n, 0.9)
    Gap:         the norm of x need not allow an entry c
    """
    return like(input, _asin_size(input), sensitivity={"input": _slope_inside(input)})


@normed_op(torch.acos).register_norm(when=_stays_inside)
def acos_inside(input: RMSTensor) -> RMSTensor:
    """Arccosine of |x| <= c < 1, by what made x and the norms at hand: value as ever, sensitivity 1 / sqrt(1 - c^2).

    Typical:     c = min(n, 0.9)
    Gap:         the norm of x need not allow an entry c
    """
    return like(input, _asin_size(input) + math.pi / 2, sensitivity={"input": _slope_inside(input)})


def _stays_before_poles(args: dict[str, Any]) -> bool:
    x = args["input"]
    is_bound = current_mode() == "bound" and isinstance(x, RMSTensor) and not is_local(x)
    return is_bound and known_range(x).is_above(-math.pi / 2) and known_range(x).is_below(math.pi / 2)


@normed_op(torch.tan).register_norm(when=_stays_before_poles)
def tan_inside(input: RMSTensor) -> RMSTensor:
    """Tangent of |x| <= c < pi / 2, by what made x and the norms at hand.

    Value:       n tan(R) / R, R the lesser of c and the largest entry that n allows      (attained: entries of R and 0)
    Sensitivity: 1 / cos(R)^2                                                              (attained at R)
    Source:      tan(x) / x grows on both sides of 0
    Gap:         the norm of x need not allow an entry c
    """
    n = input.norm_size
    largest = torch.minimum(known_range(input).largest_modulus_of(n), n * math.sqrt(max(input.numel_normed, 1)))
    steepest = torch.where(largest > 0, torch.tan(largest) / largest.clamp(min=1e-300), torch.ones_like(largest))
    return like(input, n * steepest, sensitivity={"input": torch.cos(largest).square().reciprocal()})


@normed_op(torch.acosh).register_norm
def acosh(input: RMSTensor) -> RMSTensor:
    """Arcosh of x >= 1.

    Value:       acosh n, 0 for n <= 1      (attained by the constant n)
    Sensitivity: none: the slope at 1 is infinite
    Source:      acosh(sqrt u)^2 is concave, its derivative 2 t / sinh(2 t) at u = cosh(t)^2; Jensen
    Raises NormMismatchError where the input carries a perturbation_size.
    """
    _refuse_slope(torch.acosh, input, "1")
    n = input.norm_size
    is_inside = n > 1
    return like(
        input, torch.where(is_inside, torch.acosh(torch.where(is_inside, n, torch.full_like(n, 2.0))), torch.zeros_like(n))
    )


@normed_op(torch.logit).register_norm
def logit(input: RMSTensor, eps: float | None = None) -> RMSTensor:
    """log(z / (1 - z)) of z = x limited to [eps, 1 - eps].

    Value:       log((1 - eps) / eps)       (attained at 0)
    Sensitivity: 1 / (eps (1 - eps)), 0 if no entry can be as large as eps      (attained there)
    Raises NormMismatchError without `eps`, or for one that is not between 0 and 1 / 2: then it is unbounded next to 0 and 1; and for one
    so small that 1 - eps is 1 in x's dtype.
    """
    if eps is None or not 0 < eps <= 0.5:
        raise NormMismatchError("it is unbounded next to 0 and 1; give eps between 0 and 1/2, which limits the input")
    if eps <= torch.finfo(input.dtype).eps / 4:
        raise NormMismatchError(f"eps = {eps} limits nothing in {input.dtype}, where 1 - eps is 1: its logit is infinite")
    n = input.norm_size
    value, slope = bounded(math.log((1 - eps) / eps), n), torch.full_like(n, 1 / (eps * (1 - eps)))
    reach = n * math.sqrt(input.numel_normed)
    return like(input, value, sensitivity={"input": torch.where(reach >= eps, slope, torch.zeros_like(slope))})


_POLE = "{} is unbounded next to {}, and a norm does not keep entries away from there; {}"
_OWN_RULE = "register a rule with what you know about them"

for _op, _edge, _instead in (
    (torch.tan, "pi / 2", _OWN_RULE),
    (torch.atanh, "1 and -1", _OWN_RULE),
    (torch.erfinv, "1 and -1", _OWN_RULE),
    (torch.special.ndtri, "0 and 1", _OWN_RULE),
    (torch.special.entr, "0 from below, where it is minus infinity", "its input has no norm rule that keeps it positive"),
):
    refuse(normed_op(_op), _POLE.format(_op.__name__, _edge, _instead))

for _op in (
    *(torch.lgamma, torch.digamma, torch.polygamma, torch.mvlgamma, torch.special.zeta, torch.special.bessel_y0),
    *(torch.special.bessel_y1, torch.special.modified_bessel_k0, torch.special.modified_bessel_k1),
    *(torch.special.scaled_modified_bessel_k0, torch.special.scaled_modified_bessel_k1),
):
    refuse(normed_op(_op), SINGULAR.format(_op.__name__))
