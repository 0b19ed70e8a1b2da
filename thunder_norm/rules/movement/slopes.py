"""How functions of each entry move: between which two numbers their slopes are, for `norm_sensitivity("composed")`.

The difference quotients of a function are between the smallest and the largest of its derivatives, kinks included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.composed import Call, Made, Spread, Term, is_fixed, spread_of, values
from thunder_norm.core.ellipsoids import Scaled
from thunder_norm.core.local import is_from_data, is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.slopes import Slopes, between
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.within import by_sides, reach
from thunder_norm.rules.entrywise import slopes_within

SlopesOf = Callable[[dict[str, Any]], "tuple[float, float] | None"]

_SELU = 1.6732632423543772 * 1.0507009873554805
_ERF = 2 / math.sqrt(math.pi)
# Of x Phi(x): the derivative Phi(x) + x phi(x) is extreme at -sqrt 2 and sqrt 2.
_GELU = 0.5 * math.erfc(1) - math.exp(-1) / math.sqrt(math.pi)

# Rounded outwards; extreme at 1.41850, 2.39936, and -2.25638 and 1.49057.
_GELU_TANH, _SILU, _MISH = (-0.1289931, 1.1289931), (-0.0998394, 1.0998394), (-0.1125262, 1.0884982)

_FIXED: dict[tuple[float, float], Sequence[Any]] = {
    (0.0, 1.0): (
        F.relu, F.relu6, F.hardtanh, F.logsigmoid, F.softsign, F.softshrink, F.tanhshrink, torch.tanh, torch.atan,
        torch.asinh, torch.clamp,
    ),
    (-1.0, 1.0): (torch.abs, torch.sin, torch.cos),
    (0.0, 0.25): (torch.sigmoid,),
    (0.0, 1 / 6 * (1 + 1e-12)): (F.hardsigmoid,),
    (-0.5, 1.5): (F.hardswish,),
    (0.0, _SELU * (1 + 1e-12)): (F.selu,),
    (0.0, _ERF * (1 + 1e-12)): (torch.erf,),
    (-_ERF * (1 + 1e-12), 0.0): (torch.erfc,),
    _SILU: (F.silu,),
    _MISH: (F.mish,),
}  # fmt: skip


def _gelu(given: dict[str, Any]) -> tuple[float, float]:
    return _GELU_TANH if given.get("approximate", "none") == "tanh" else (_GELU - 1e-12, 1 - _GELU + 1e-12)


def _leaky_relu(given: dict[str, Any]) -> tuple[float, float]:
    return _ordered(1.0, given.get("negative_slope", 0.01))


def _elu(given: dict[str, Any]) -> tuple[float, float]:
    alpha, scale, input_scale = (given.get(name, 1.0) for name in ("alpha", "scale", "input_scale"))
    steepest = scale * alpha * input_scale
    return _ordered(0.0, scale, steepest)


def _celu(given: dict[str, Any]) -> tuple[float, float] | None:
    return (0.0, 1.0) if given.get("alpha", 1.0) > 0 else None


def _softplus(given: dict[str, Any]) -> tuple[float, float] | None:
    # above the threshold it is x itself: a jump by exp(-threshold) / beta, no more than rounding from the default on
    return (0.0, 1.0) if given.get("beta", 1.0) > 0 and given.get("threshold", 20.0) >= 20 else None


def _ordered(*slopes: float) -> tuple[float, float]:
    return min(slopes), max(slopes)


def _between(op: Any, slopes: SlopesOf) -> Callable[[Call], Sequence[Made] | None]:
    """The movement rule of a function of each entry of ``input``, all else numbers."""

    def rule(call: Call) -> Sequence[Made] | None:
        (x, *others), found = call.moving, slopes(call.given)
        spread = None if others or found is None or x.shape != call.results[0].shape else spread_of(x)
        if spread is None or found is None:
            return None
        size = spread.parts[0].size
        bent = between(*found, size)
        if is_within() and (nearer := _near(op, call.given, x, spread)) is not None:
            bent = Slopes(torch.maximum(bent.low, nearer.low), torch.minimum(bent.high, nearer.high), nearer.away)
        if not math.isfinite(bent.most):
            return None
        is_linear = torch.equal(bent.low, bent.high)
        return [Made(spread.ndim, (Term(x, Scaled(bent.low, size) if is_linear else bent),))]

    return rule


def _near(op: Any, given: dict[str, Any], x: NormedTensor, spread: Spread) -> Slopes | None:
    """The slopes of all rows near the data, and those away from it where they are all that counts."""
    found = slopes_within.of(op, given, *reach(x, spread))
    if found is None:
        return None
    rows, slack, down, up = by_sides(x, spread)
    away = None
    if is_from_data() and len(rows):
        away = slopes_within.chords(op, given, rows, slack.expand(rows.shape), down.expand(rows.shape), up.expand(rows.shape))
    if away is None:
        return Slopes(*found)
    low, high = (f(a, b) for f, a, b in zip((torch.minimum, torch.maximum), away.below, away.above, strict=True))
    of_all = torch.maximum(found[0], low.amin(0)), torch.minimum(found[1], high.amax(0))
    # several rows move together by one ellipsoid, and each has another function; so has what moves for several reasons of each (parameters of
    # a report, of which only the rates count, are none)
    reasons = sum(bool(part.root.size.detach().item()) for part in spread.parts)
    return Slopes(*of_all, away.of_row(0) if len(rows) == 1 and reasons <= 1 else None)


_OF_ARGUMENTS: dict[Any, SlopesOf] = {F.gelu: _gelu, F.leaky_relu: _leaky_relu, F.elu: _elu, F.celu: _celu, F.softplus: _softplus}


def functions() -> list[Any]:
    """The functions of each entry whose slopes are known."""
    return [op for ops in _FIXED.values() for op in ops] + list(_OF_ARGUMENTS)


def of(op: Any, given: dict[str, Any]) -> tuple[float, float] | None:
    """Between which numbers the slopes of a function of each entry are, called with arguments by name; None if nothing is known."""
    if op in _OF_ARGUMENTS:
        return _OF_ARGUMENTS[op](given)
    return next(slopes for slopes, ops in _FIXED.items() if op in ops)


for _op in functions():
    normed_op(_op).register_movement(_between(_op, lambda given, op=_op: of(op, given)))
for _op in (torch.clamp_min, torch.clamp_max):
    normed_op(_op).register_movement(_between(torch.clamp, lambda given: of(torch.clamp, given)))
for _op in slopes_within.steep_functions():
    normed_op(_op).register_movement(_between(_op, lambda given: (-math.inf, math.inf)))


@normed_op(torch.ops.aten._prelu_kernel.default).register_movement
@normed_op(F.prelu).register_movement
def prelu(call: Call) -> Sequence[Made] | None:
    """Slopes 1 and a, of which there is one for all channels or one for each; near the data one of them where entries keep their sign."""
    x, weight = call.given["input"], call.given["weight"]
    if [id(t) for t in call.moving] != [id(x)] or not is_fixed(weight) or (spread := spread_of(x)) is None:
        return None
    a = values(weight)
    if weight.ndim != x.ndim:  # of the kernel it has the dimensions of x
        a = a.reshape(-1, *[1] * (x.ndim - 2)) if a.numel() > 1 else a.reshape(())
    rows = a.expand(x.shape).reshape(-1, spread.parts[0].size)
    if not len(rows):
        return None
    least, largest = rows.amin(0), rows.amax(0)
    low, high = least.clamp(max=1.0), largest.clamp(min=1.0)
    if is_within():
        start, end = reach(x, spread)
        low, high = torch.where(start > 0, 1.0, low), torch.where(start > 0, 1.0, high)
        low, high = torch.where(end < 0, least, low), torch.where(end < 0, largest, high)
    return [Made(spread.ndim, (Term(x, Slopes(low, high)),))]
