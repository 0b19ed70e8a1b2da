"""Norm rules for limiting entries: clamp, hardtanh, relu6."""

from __future__ import annotations

import builtins
import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import current_mode, norm_counts
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._gaussian import second_moment_root
from thunder_norm.rules._shared import like, over_dims_of, squarable
from thunder_norm.rules.known_ranges.ranges import clamped
from thunder_norm.rules.layout.selections import one_of

_SQRT2 = math.sqrt(2)
_TINY = 1e-100  # keeps quotients and roots differentiable at 0


@normed_op(torch.clamp).register_norm
def clamp(input: RMSTensor, min: float | None = None, max: float | None = None) -> RMSTensor:
    """x limited to [lo, hi].

    Value:       min(n, max(|lo|, |hi|)) if 0 is inside; else, c the end next to 0, sqrt(c^2 + max(n^2 - c^2 / N, 0)), at most
                 max(|lo|, |hi|)        (attained: a spike, all else at c)
    Sensitivity: 1
    Typical:     sqrt(E f(n z)^2) and sqrt(P(lo < n z < hi)) of a Gaussian z
    Source:      |f(x)| <= max(|c|, |x|), whose square is convex in x^2: its envelope is the chord to the spike
    """
    lo, hi = -math.inf if min is None else min, math.inf if max is None else max
    if current_mode() == "typical":
        n = input.norm_size.clamp(min=_TINY)
        inside = 0.5 * (torch.erf(hi / (n * _SQRT2)) - torch.erf(lo / (n * _SQRT2)))
        value = second_moment_root(lambda x: x.clamp(builtins.min(lo, hi), hi), input.norm_size)
        return like(input, value, sensitivity={"input": inside.clamp(min=_TINY).sqrt()})
    largest = math.fabs(hi) if hi <= lo else builtins.max(math.fabs(lo), math.fabs(hi))
    nearest = hi if hi <= lo else builtins.min(builtins.max(0.0, lo), hi)
    value = input.norm_size
    if nearest != 0:
        c, ratio = math.fabs(nearest), value / math.fabs(nearest)
        within = squarable(ratio)  # of larger ratios the sum is as good, and their squares are no floats
        beyond = (within.square() - 1 / builtins.max(input.numel_normed, 1)).clamp(min=0)
        value = torch.where(ratio == within, (beyond + 1).sqrt() * c, value + c)
    return like(input, value if math.isinf(largest) else value.clamp(max=largest), sensitivity={"input": 1})


@normed_op(torch.clamp_min).register_norm
def clamp_min(input: RMSTensor, min: float) -> RMSTensor:
    """max(x, lo): `clamp` with no upper end."""
    return clamp(input, min, None)


@normed_op(torch.clamp_max).register_norm
def clamp_max(input: RMSTensor, max: float) -> RMSTensor:
    """min(x, hi): `clamp` with no lower end."""
    return clamp(input, None, max)


@normed_op(torch.clamp).register_norm(lift_dims={"min": over_dims_of("input", "max"), "max": over_dims_of("input", "min")})
def clamp_between(input: RMSTensor, min: RMSTensor | None = None, max: RMSTensor | None = None) -> RMSTensor:
    """x between two tensors: the energies of all add, as for the maximum of two; sensitivity 1 to each.

    From the largest entries it is the largest of them.
    """
    bounds = {"input": input, "min": min, "max": max}
    return one_of({name: x for name, x in bounds.items() if x is not None})


def _is_between_plain_tensors(args: tuple, kwargs: dict) -> bool:
    """Whether there are two ends, at least one a plain tensor, and the values of both are known, not their norms alone."""
    input, *ends = *args, *(kwargs[name] for name in ("input", "min", "max") if name in kwargs)
    if len(ends) != 2 or any(v is None or norm_counts(v) for v in ends):
        return False
    return any(isinstance(v, torch.Tensor) for v in ends) and isinstance(input, NormedTensor) and not is_complex(input)


@written_as(torch.clamp, when=_is_between_plain_tensors)
def _clamp_between_plain_tensors(input: RMSTensor, min: Any, max: Any) -> RMSTensor:
    """What the ends push away from 0 alone adds to x: max(lo, 0) and max(-hi, 0), which are 0 for ends at infinity."""
    lowest, highest = (
        v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=input.dtype, device=input.device) for v in (min, max)
    )
    return clamp_between_tensors(input, lowest, highest, lowest.relu(), (-highest).relu())


@normed_op
def clamp_between_tensors(
    input: torch.Tensor, min: torch.Tensor, max: torch.Tensor, above: torch.Tensor, below: torch.Tensor
) -> torch.Tensor:
    """``torch.clamp(input, min, max)`` where `above` is max(min, 0) and `below` is max(-max, 0); else between ends that these limit."""
    return torch.clamp(input, torch.minimum(min, above), torch.maximum(max, -below))


@clamp_between_tensors.register_norm(
    allow_plain_tensors="constant", lift_dims={"above": over_dims_of("input", "below"), "below": over_dims_of("input", "above")}
)
def _clamp_between_tensors(
    input: RMSTensor,
    min: torch.Tensor,
    max: torch.Tensor,
    above: RMSTensor,
    below: RMSTensor,
) -> RMSTensor:
    """x between plain tensors lo and hi: ``|f(x)| <= max(|x|, lo, -hi)``, and energies add as for the maximum of three.

    Value:       sqrt(|x|^2 + |max(lo, 0)|^2 + |max(-hi, 0)|^2), of largest entries the largest
    Sensitivity: 1 to each
    """
    return one_of({"input": input, "above": above, "below": below})


clamp_between_tensors.register_range(clamped)


@normed_op(torch.clamp_min).register_norm(lift_dims={"min": over_dims_of("input")})
def clamp_min_of(input: RMSTensor, min: RMSTensor) -> RMSTensor:
    """max(x, lo) with a tensor: `clamp_between`."""
    return clamp_between(input, min)


@normed_op(torch.clamp_max).register_norm(lift_dims={"max": over_dims_of("input")})
def clamp_max_of(input: RMSTensor, max: RMSTensor) -> RMSTensor:
    """min(x, hi) with a tensor: `clamp_between`."""
    return clamp_between(input, None, max)


@normed_op(F.hardtanh).register_norm
def hardtanh(input: RMSTensor, min_val: float = -1.0, max_val: float = 1.0) -> RMSTensor:
    """x limited to [min_val, max_val]: `clamp`."""
    return clamp(input, min_val, max_val)


@normed_op(F.relu6).register_norm
def relu6(input: RMSTensor) -> RMSTensor:
    """x limited to [0, 6].  Value min(n, 6), attained by a constant; sensitivity 1."""
    return clamp(input, 0.0, 6.0)
