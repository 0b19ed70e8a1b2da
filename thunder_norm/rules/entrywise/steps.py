"""Norm rules for piecewise constant functions of each entry: rounding and signs.

Their values are bounded; at a jump their slope is infinite, so in mode "bound" they refuse an input that carries a perturbation_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import like, refuse_perturbation, root_sum_squares, scalar


def _is_typical() -> bool:
    """Whether sizes are typical ones: far beyond a step rounding moves as far as its input, and a sign as far as its size says."""
    return current_mode() != "bound" and current_sensitivity() == "global"


def _step(
    op: Callable,
    value: Callable[[torch.Tensor], torch.Tensor],
    doc: str,
    slope: Callable[[torch.Tensor], torch.Tensor] | None = None,
    typical: str = "",
) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        n = input.norm_size
        if slope is not None and _is_typical():
            return like(input, value(n), sensitivity={"input": slope(n)})
        refuse_perturbation(op, input)
        return like(input, value(n))

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = doc if slope is None else f"{doc}\n\nTypical:     sensitivity {typical}, as at steps larger than its jumps"
    normed_op(op).register_norm(rule)


def _one(n: torch.Tensor) -> torch.Tensor:
    return bounded(1.0, n)


def _by_size(n: torch.Tensor) -> torch.Tensor:
    return n.clamp(min=_TINY).reciprocal()


_TINY = 1e-30  # what is typically 0 has a steep sign, and no infinite one


for _op in (torch.sign, torch.sgn):
    _step(_op, _one, "Sign of x.  Value 1, attained; no sensitivity.", _by_size, "1 / n")
_step(torch.trunc, lambda n: n, "x rounded towards 0.  Value n, attained by integers; no sensitivity.", _one, "1")
_step(torch.floor, lambda n: n + 1, "x rounded down.  Value n + 1, attained as n -> 0; no sensitivity.", _one, "1")
_step(torch.ceil, lambda n: n + 1, "x rounded up.  Value n + 1, attained as n -> 0; no sensitivity.", _one, "1")
_step(
    torch.frac,
    lambda n: spoiled(n.clamp(max=1.0), n),
    "What x has beyond the next integer towards 0.  Value min(n, 1); no sensitivity.",
)
_step(torch.angle, lambda n: bounded(math.pi, n), "0, or pi where x < 0.  Value pi, attained; no sensitivity.")


@normed_op(torch.round).register_norm
def round(input: RMSTensor, *, decimals: int = 0) -> RMSTensor:
    """x rounded to the nearest multiple of 10^-d.  Value n + 10^-d / 2; no sensitivity.

    Typical:     sensitivity 1, as at steps larger than its jumps
    """
    size = input.norm_size + 0.5 * 10.0**-decimals
    if _is_typical():
        return like(input, size, sensitivity={"input": 1})
    refuse_perturbation(torch.round, input)
    return like(input, size)


@normed_op(F.hardshrink).register_norm
def hardshrink(input: RMSTensor, lambd: float = 0.5) -> RMSTensor:
    """x where |x| > lambda, else 0.  Value n, attained away from lambda; no sensitivity."""
    refuse_perturbation(F.hardshrink, input)
    return like(input, input.norm_size)


@normed_op(F.threshold).register_norm
def threshold(input: RMSTensor, threshold: float, value: float) -> RMSTensor:
    """x where x > t, else v.

    Value:       sqrt(n^2 + v^2), from the largest entry max(n, |v|)      (approached: a spike, all else v)
    Sensitivity: 1 if v = t, where nothing jumps; else none
    """
    n, v = input.norm_size, scalar(math.fabs(value), input.norm_size)
    size = root_sum_squares(n, v) if input.elem_dims else torch.maximum(n, v)
    if value == threshold:
        return like(input, size, sensitivity={"input": 1})
    refuse_perturbation(F.threshold, input)
    return like(input, size)


@normed_op(torch.copysign).register_norm(allow_plain_tensors=True)
def copysign(input: RMSTensor, other: RMSTensor | torch.Tensor | float) -> RMSTensor:
    """|x| with the sign of another tensor, of x's shape or smaller.  Value n; no sensitivity, where a sign changes it jumps."""
    refuse_perturbation(torch.copysign, *(t for t in (input, other) if isinstance(t, RMSTensor)))
    if isinstance(other, torch.Tensor) and torch.broadcast_shapes(input.shape, other.shape) != input.shape:
        raise NormMismatchError("copysign with the sign of a larger tensor: expand the first argument")
    n = input.norm_size
    return like(input, n + bounded(0.0, other.norm_size) if isinstance(other, RMSTensor) else n)
