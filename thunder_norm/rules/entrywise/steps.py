"""Norm rules for piecewise constant functions of each entry: rounding and signs.

Their values are bounded; at a jump their slope is infinite, so in mode "bound" they refuse an input that carries a perturbation_size.
At the data they move as they do between their jumps, and without a bound where an entry is at one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import is_complex
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._local import beside_jumps
from thunder_norm.rules._shared import is_typical, jumping, like, refuse_perturbation, root_sum_squares, scalar


def _between_jumps(
    op: Callable, input: RMSTensor, size: torch.Tensor, distance: Callable[[torch.Tensor], torch.Tensor], slope: float = 0.0
) -> RMSTensor:
    """An RMSTensor of that size, which moves at the data only; `distance` is that of an entry from the nearest jump."""
    if is_local(input) and not is_complex(input):
        return like(input, size, sensitivity={"input": beside_jumps(input, slope, distance)})
    refuse_perturbation(op, input)
    return like(input, size)


def _step(
    op: Callable,
    value: Callable[[torch.Tensor], torch.Tensor],
    distance: Callable[[torch.Tensor], torch.Tensor],
    doc: str,
    slope: Callable[[torch.Tensor], torch.Tensor] | None = None,
    typical: str = "",
    local: float = 0.0,
    jumps_at_zero: bool = False,
) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        n = input.norm_size
        if slope is not None and is_typical():
            return like(input, value(n), sensitivity={"input": slope(n)})
        if jumps_at_zero and not is_local(input):
            return jumping(op, input, value(n))
        return _between_jumps(op, input, value(n), distance, local)

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f"{doc}\n\nLocal:       sensitivity {local:g} where no entry is at a jump"
    if jumps_at_zero:
        rule.__doc__ += "\nGap:         no sensitivity is attained where there is no number"
    if slope is not None:
        rule.__doc__ += f"\nTypical:     sensitivity {typical}, as at steps larger than its jumps"
    normed_op(op).register_norm(rule)


def _from_integers(x: torch.Tensor) -> torch.Tensor:
    return x - x.round()


def _from_integers_below(x: torch.Tensor) -> torch.Tensor:
    return x - x.floor()


def _from_integers_but_0(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 1, 1.0, _from_integers(x))


def _one(n: torch.Tensor) -> torch.Tensor:
    return bounded(1.0, n)


def _by_size(n: torch.Tensor) -> torch.Tensor:
    return n.clamp(min=_TINY).reciprocal()


_TINY = 1e-30  # what is typically 0 has a steep sign, and no infinite one


for _op in (torch.sign, torch.sgn):
    _step(_op, _one, torch.abs, "Sign of x.  Value 1, attained; no sensitivity.", _by_size, "1 / n", jumps_at_zero=True)
_step(
    torch.trunc,
    lambda n: n,
    _from_integers_but_0,
    "x rounded towards 0.  Value n, attained by integers; no sensitivity.",
    _one,
    "1",
)
_step(
    torch.floor, lambda n: n + 1, _from_integers, "x rounded down.  Value n + 1, attained as n -> 0; no sensitivity.", _one, "1"
)
_step(torch.ceil, lambda n: n + 1, _from_integers, "x rounded up.  Value n + 1, attained as n -> 0; no sensitivity.", _one, "1")
_step(
    torch.frac,
    lambda n: spoiled(n.clamp(max=1.0), n),
    _from_integers_but_0,
    "What x has beyond the next integer towards 0.  Value min(n, 1); no sensitivity.",
    local=1.0,
)
_step(torch.angle, lambda n: bounded(math.pi, n), torch.abs, "0, or pi where x < 0.  Value pi, attained; no sensitivity.")


@normed_op(torch.round).register_norm
def round(input: RMSTensor, *, decimals: int = 0) -> RMSTensor:
    """x rounded to the nearest multiple of 10^-d.  Value n + 10^-d / 2; no sensitivity.

    Local:       sensitivity 0 where no entry is half way between two multiples
    Typical:     sensitivity 1, as at steps larger than its jumps
    """
    size = input.norm_size + 0.5 * 10.0**-decimals
    if is_typical():
        return like(input, size, sensitivity={"input": 1})
    return _between_jumps(torch.round, input, size, lambda x: _from_integers_below(x * 10.0**decimals) - 0.5)


@normed_op(F.hardshrink).register_norm
def hardshrink(input: RMSTensor, lambd: float = 0.5) -> RMSTensor:
    """x where |x| > lambda, else 0.  Value n, attained away from lambda; no sensitivity.

    Local:       sensitivity 1 where no entry is lambda or -lambda
    """
    return _between_jumps(F.hardshrink, input, input.norm_size, lambda x: x.abs() - lambd, slope=1.0)


@normed_op(F.threshold).register_norm
def threshold(input: RMSTensor, threshold: float, value: float) -> RMSTensor:
    """x where x > t, else v.

    Value:       sqrt(n^2 + v^2), from the largest entry max(n, |v|)      (approached: a spike, all else v)
    Sensitivity: 1 if v = t, where nothing jumps; else none
    Local:       1 where no entry is t
    """
    n, v = input.norm_size, scalar(math.fabs(value), input.norm_size)
    size = root_sum_squares(n, v) if input.elem_dims else torch.maximum(n, v)
    if value == threshold:
        return like(input, size, sensitivity={"input": 1})
    return _between_jumps(F.threshold, input, size, lambda x: x - threshold, slope=1.0)


@normed_op(torch.copysign).register_norm(allow_plain_tensors="constant")
def copysign(input: RMSTensor, other: RMSTensor | torch.Tensor | float) -> RMSTensor:
    """|x| with the sign of another tensor, of x's shape or smaller.  Value n; no sensitivity, where a sign changes it jumps.

    Local:       1 to x, 0 to a sign of a number that is not 0
    """
    if isinstance(other, torch.Tensor) and torch.broadcast_shapes(input.shape, other.shape) != input.shape:
        raise NormMismatchError("copysign with the sign of a larger tensor: expand the first argument")
    signs = [other] if isinstance(other, RMSTensor) else []
    size = input.norm_size + bounded(0.0, other.norm_size) if isinstance(other, RMSTensor) else input.norm_size
    if not is_local(input, *signs):
        refuse_perturbation(torch.copysign, input, *signs)
        return like(input, size)
    by_sign = {"other": beside_jumps(other, 0.0, torch.abs)} if isinstance(other, RMSTensor) else {}
    return like(input, size, sensitivity={"input": 1, **by_sign})
