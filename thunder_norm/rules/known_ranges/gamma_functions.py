"""Norm rules for the logarithm of the gamma function and its derivative, where entries are known to be away from 0, or sizes are typical.

Both are unbounded next to 0, and no norm keeps entries away from there.  A program does, by ``1 + softplus(x)`` or a clamp: the likelihoods of
Student's t, gamma and beta distributions.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import argument, is_typical, like, maximum, scalar
from thunder_norm.rules.entrywise.powers import reach
from thunder_norm.rules.known_ranges.ranges import Known, Of

_TYPICAL = 1e-30  # what is typically 0 has a large logarithm, and no infinite one
_LEAST = -0.12148629053584961  # log Gamma(1.46163), its least value


def _has_values(args: dict[str, Any]) -> bool:
    """Whether entries stay away from 0, by what made them, or sizes are typical ones; at the data its derivative says more."""
    x = args["input"]
    if not isinstance(x, RMSTensor) or is_local(x):
        return False
    return known_range(x).is_well_above(0.0) or is_typical()


def _trigamma(x: torch.Tensor) -> torch.Tensor:
    return torch.special.polygamma(1, x)


def _typical(x: RMSTensor, f: Any, slope: Any) -> RMSTensor:
    """``sqrt(f(n)^2 + (n f'(n))^2)`` and ``|f'(n)|``: entries differ from n by about as much as n."""
    n = x.norm_size.clamp(min=max(known_range(x).low, _TYPICAL))
    steepness = slope(n).abs()
    return like(x, (f(n).square() + (n * steepness).square()).sqrt(), sensitivity={"input": steepness})


def _between(x: RMSTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest entry there can be."""
    low = known_range(x).least_of(x.norm_size)
    return low, torch.maximum(low, reach(x))


@normed_op(torch.lgamma).register_norm(when=_has_values)
def lgamma(input: RMSTensor) -> RMSTensor:
    """log |Gamma(x)|, for x between c > 0, by what made it and the norms at hand, and its reach R.

    Value:       max(|log Gamma(c)|, |log Gamma(R)|, 0.1215), the last if the least value, at 1.46163, is between them
    Sensitivity: max(|psi(c)|, |psi(R)|)        (attained at one of the ends: psi increases)
    Typical:     sqrt(log Gamma(n)^2 + (n psi(n))^2), and |psi(n)|
    Source:      log Gamma is convex (Bohr and Mollerup)
    Gap:         from RMS one entry is as large as R, and not all of them
    """
    if current_mode() != "bound":
        return _typical(input, torch.lgamma, torch.digamma)
    ends = _between(input)
    least = scalar(-_LEAST, input.norm_size)
    return like(
        input,
        maximum([*(torch.lgamma(x).abs() for x in ends), least]),
        sensitivity={"input": maximum([torch.digamma(x).abs() for x in ends])},
    )


@normed_op(torch.digamma).register_norm(when=_has_values)
def digamma(input: RMSTensor) -> RMSTensor:
    """psi(x), the slope of log Gamma, for x between c > 0, by what made it and the norms at hand, and its reach R.

    Value:       max(|psi(c)|, |psi(R)|)
    Sensitivity: psi'(c)            (attained there: psi' decreases)
    Typical:     sqrt(psi(n)^2 + (n psi'(n))^2), and psi'(n)
    Gap:         from RMS one entry is as large as R, and not all of them
    """
    if current_mode() != "bound":
        return _typical(input, torch.digamma, _trigamma)
    low, high = _between(input)
    value = maximum([torch.digamma(x).abs() for x in (low, high)])
    return like(input, value, sensitivity={"input": _trigamma(low)})


def _lgamma_range(args: tuple, kwargs: Any, of: Of) -> Known:
    found = of(argument(args, kwargs, 0, "input", "self"))
    return None if found is None or found.low <= 0 else Range(_LEAST - 1e-12, math.inf)


normed_op(torch.lgamma).register_range(_lgamma_range)
