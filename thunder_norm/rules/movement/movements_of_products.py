"""How products and quotients move, entry by entry: by what is fixed, or by what moves as well."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.composed import Call, Made, Spread, Term, is_fixed, moves, spread_of, values
from thunder_norm.core.ellipsoids import Scaled
from thunder_norm.core.known_ranges import range_within
from thunder_norm.core.local import is_from_data, is_within
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.slopes import Slopes, between
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.within import around, reach
from thunder_norm.rules.known_ranges.jumps_made_good import made_good
from thunder_norm.rules.movement import movements_nearby
from thunder_norm.rules.movement.movements_nearby import Found

# Of what a product moves by in first order: what is of second order is taken entry by entry if it is less.
_LITTLE = 0.25


def _multiplied(call: Call, x: Any, factor: Any) -> Found:
    """x times what is fixed: one row of factors for all, or rows, whose least and largest bound the slopes.

    A mask may be another one for other inputs.
    """
    (y,) = call.results
    if not moves(x) or not is_fixed(factor) or x.shape != y.shape or (spread := spread_of(x)) is None:
        return None
    size = spread.parts[0].size
    if isinstance(factor, torch.Tensor):
        rows = values(factor).expand(y.shape).reshape(-1, size)
        low, high = (rows[0] * 0, rows[0] * 0 + 1) if factor.dtype is torch.bool else (rows.amin(0), rows.amax(0))
    else:
        low = high = torch.tensor([float(factor)], dtype=torch.float64)
    if not (low.isfinite().all() and high.isfinite().all()):
        return None
    is_one = torch.equal(low, high)
    return [Made(spread.ndim, (Term(x, Scaled(low, size) if is_one else Slopes(low, high)),))]


def mul(call: Call) -> Found:
    """x c."""
    a, b = call.given.get("input"), call.given.get("other")
    if (signed := made_good(a, b)) is not None:
        return _with_signs(call, call.given[signed[1]])
    if moves(a) and moves(b):
        by_slopes = _of_two(call, a, b) if is_within() and _is_nearly_linear(a, b) else None
        return by_slopes or movements_nearby.entrywise(call, a, b) or _of_two(call, a, b)
    return _multiplied(call, b, a) if moves(b) else _multiplied(call, a, b)


def _with_signs(call: Call, x: NormedTensor) -> Found:
    """x with signs that change where it is 0: each entry moves as that of x does, or as that of -x."""
    if not moves(x) or (spread := spread_of(x)) is None:
        return None
    return [Made(spread.ndim, (Term(x, between(-1.0, 1.0, spread.parts[0].size)),), of=tuple(call.moving))]


def _of_two(call: Call, a: NormedTensor, b: NormedTensor) -> Found:
    """The product of two tensors of the same rows that both move, where it is known between which numbers their entries stay.

    ``a' b' - a b = a' (b' - b) + b (a' - a)``: each moves with the entries of the other as slopes.  Away from the data, b is as it is there.
    """
    (y,), of_a, of_b = call.results, spread_of(a), spread_of(b)
    if not a.shape == b.shape == y.shape or of_a is None or of_b is None or of_a.ndim != of_b.ndim:
        return None
    by_b, by_a = _at_data(b, of_b) if is_from_data() else _between(b, of_b), _between(a, of_a)
    return None if by_a is None or by_b is None else [Made(of_a.ndim, (Term(a, by_b), Term(b, by_a)))]


def _is_nearly_linear(a: NormedTensor, b: NormedTensor) -> bool:
    """Whether slopes lose little: what these move by is known as matrices, and what is of second order is far less than what is of first.

    Otherwise what is of second order has an ellipsoid, which is less long by up to the root of how many entries there are, and a root of its own.
    """
    of_a, of_b = spread_of(a), spread_of(b)
    if a.shape != b.shape or of_a is None or of_b is None or not all(v.first is not None for v in (*of_a.parts, *of_b.parts)):
        return False
    (at_a, _, moved_a), (at_b, _, moved_b) = around(a, of_a), around(b, of_b)
    if moved_a.shape != moved_b.shape:
        return False
    first = torch.maximum(at_a.abs().amax(0) * moved_b, at_b.abs().amax(0) * moved_a).amax()
    return bool((moved_a * moved_b).norm() <= _LITTLE * first)


def _at_data(x: NormedTensor, spread: Spread) -> Slopes:
    """Between which numbers each feature of x is in the rows at hand."""
    rows, slack, _ = around(x, spread)
    return Slopes(rows.amin(0) - slack, rows.amax(0) + slack)


def _between(x: NormedTensor, spread: Spread) -> Slopes | None:
    """Between which numbers each feature of x is, for all inputs that the bound is about; None if there are none."""
    found = range_within(x) or Range()
    lows = [found.low] + ([] if found.least is None else [found.least.value().item()])
    highs = [found.high] + ([] if found.most is None else [found.most.value().item()])
    low, high = (torch.full((spread.parts[0].size,), end, dtype=torch.float64) for end in (max(lows), min(highs)))
    if is_within():
        near = reach(x, spread)
        low, high = torch.maximum(low, near[0]), torch.minimum(high, near[1])
    return Slopes(low, high) if low.isfinite().all() and high.isfinite().all() else None


def div(call: Call) -> Found:
    """x / c."""
    a, b = call.given.get("input"), call.given.get("other")
    if not is_fixed(b) or call.given.get("rounding_mode") is not None or b is None:
        return None
    if isinstance(b, torch.Tensor):
        return _multiplied(call, a, 1 / values(b))
    return _multiplied(call, a, 1 / b) if b else None


@normed_op(torch.neg).register_movement
def neg(call: Call) -> Found:
    """-x."""
    return _multiplied(call, call.given.get("input"), -1.0)
