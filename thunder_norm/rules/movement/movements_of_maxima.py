"""How maxima move with the entries that they are the largest of: two of them at a time, ``max(a, b) = (a + b + |a - b|) / 2``.

A norm rule says of a maximum over groups that it moves no further than the largest of them does, and forgets which entries those are.
Here the mean of two is a linear map, exactly, and only ``|a - b|`` is a function with slopes between -1 and 1; near the data of two entries
whose order cannot change it is linear as well.  Of more than two the larger halves are compared again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import linear_bounds
from thunder_norm.core.composed import Call, Made, Spread, Term, is_fixed, moves, spread_of, values
from thunder_norm.core.ellipsoids import Multiple, Picked, Scaled
from thunder_norm.core.local import is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.slopes import Slopes, between
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.vertices import LARGEST, Root, Vertex
from thunder_norm.core.within import reach

Found = Sequence[Made | None] | None
# Differences that one operation may have the absolute values of, and members of a group: the price is that of so many bends kept together.
_MOST_BENDS, _MOST_MEMBERS = 512, 16


def _largest_of(parts: Sequence[Vertex], rows: torch.Tensor | None, slack: Any, groups: int, sign: float) -> tuple[Vertex, ...]:
    """The largest (sign 1) or smallest (sign -1) entry of each group.

    Args:
        parts: vertices of ``members * groups`` entries, one for each root: the first members of all groups, the second ones, and so on.
        rows: the entries at hand [rows, members * groups], if intervals near them count.
        slack: what rounding may have done to these.
        groups: how many.
        sign: which.
    """
    while (members := parts[0].size // groups) > 1:
        pairs = groups * (members // 2)
        numbers = torch.arange(groups * members)
        first, second, left = numbers[:pairs], numbers[pairs : 2 * pairs], numbers[2 * pairs :]
        differences = [
            Vertex(v.root, pairs, terms=((v, Picked(first)), (v, Multiple(Picked(second), -1.0, pairs)))) for v in parts
        ]
        slopes = between(-1.0, 1.0, pairs)
        if rows is not None:
            slopes = _near(rows[:, first] - rows[:, second], differences, 2 * slack, sign)
            larger = torch.maximum(sign * rows[:, first], sign * rows[:, second]) * sign
            rows = torch.cat([larger, rows[:, left]], 1)
        parts = tuple(
            _halved(
                v, torch.cat([first, left]), torch.cat([second, left]), Vertex(d.root, pairs, terms=((d, None),), slopes=slopes)
            )
            for v, d in zip(parts, differences, strict=True)
        )
    return tuple(parts)


def _halved(v: Vertex, first: torch.Tensor, second: torch.Tensor, bent: Vertex) -> Vertex:
    """Half of what two members add up to and of their bent difference; a member that is left over is both."""
    size = len(first)
    placed = None if bent.size == size else Picked(torch.where(torch.arange(size) < bent.size, torch.arange(size), -1))
    total = Vertex(v.root, size, terms=((v, Picked(first)), (v, Picked(second)), (bent, placed)))
    return Vertex(v.root, size, terms=((total, Scaled(torch.tensor([0.5], dtype=torch.float64), size)),))


def _near(rows: torch.Tensor, differences: Sequence[Vertex], slack: Any, sign: float) -> Slopes:
    """The slopes of ``sign |d|`` for differences d near those at hand [rows, pairs]."""
    down, up = (functools.reduce(torch.add, sides) for sides in zip(*map(linear_bounds.moved, differences), strict=True))
    wider = torch.maximum(down, up) * 1e-9 + slack
    is_above, is_below = (rows.amin(0) - down - wider > 0), (rows.amax(0) + up + wider < 0)
    low, high = torch.where(is_above, 1.0, -1.0).double(), torch.where(is_below, -1.0, 1.0).double()
    return Slopes(low, high) if sign > 0 else Slopes(-high, -low)


def _at_hand(x: NormedTensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of x, and a thousand units in the last place of the largest entry."""
    rows = values(x.backing.detach()).reshape(-1, size)
    return rows, 1000 * torch.finfo(x.backing.dtype).eps * rows.abs().amax()


def _over(call: Call, x: NormedTensor, spread: Spread, members: torch.Tensor, ndim: int, sign: float) -> Found:
    """The extrema of entries of each row, whose numbers are [members, groups], for results of `ndim` features."""
    y, size = call.results[0], spread.parts[0].size
    count, groups = members.shape
    if (
        count > _MOST_MEMBERS
        or (count - 1) * groups > _MOST_BENDS
        or members.numel() > LARGEST
        or y.numel() * size != x.numel() * groups
    ):
        return None
    numbers = members.reshape(-1)
    picked = [Vertex(v.root, len(numbers), terms=((v, Picked(numbers)),)) for v in spread.parts]
    rows, slack = _at_hand(x, size) if is_within() else (None, 0.0)
    parts = _largest_of(picked, None if rows is None else rows[:, numbers], slack, groups, sign)
    return [Made(ndim, (), parts=parts, of=(x,))]


def _alone(call: Call) -> tuple[NormedTensor, Spread] | None:
    """The one argument that moves, and how."""
    (x, *others) = call.moving
    spread = None if others or x is not call.given.get("input") or len(call.results) != 1 else spread_of(x)
    return None if spread is None else (x, spread)


def _along(call: Call, sign: float) -> Found:
    """Over some dimensions of the features."""
    if (found := _alone(call)) is None:
        return None
    x, spread = found
    dims = call.given.get("dim")
    dims = range(x.ndim) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    over = {d if d < 0 else d - x.ndim for d in dims}
    if not x.ndim or any(d < -spread.ndim for d in over):  # of a scalar torch has dimensions -1 and 0
        return None
    features = x.shape[x.ndim - spread.ndim :]
    numbers = torch.arange(math.prod(features)).reshape(features)
    count = math.prod(x.shape[d] for d in over)
    members = numbers.movedim(tuple(sorted(over)), tuple(range(len(over)))).reshape(count, -1)
    ndim = spread.ndim if call.given.get("keepdim", False) else spread.ndim - len(over)
    return _over(call, x, spread, members, ndim, sign)


def _extremum(call: Call, sign: float) -> Found:
    return _of_two(call, sign) if isinstance(call.given.get("other"), torch.Tensor) else _along(call, sign)


def _of_two(call: Call, sign: float) -> Found:
    """The larger or smaller one of two tensors, entry by entry."""
    a, b, (y,) = call.given.get("input"), call.given.get("other"), call.results
    if not moves(a) or not moves(b):
        return _with_fixed(*((a, b) if moves(a) else (b, a)), y, sign)
    of_a, of_b = spread_of(a), spread_of(b)
    if of_a is None or of_b is None or not a.shape == b.shape == y.shape or of_a.ndim != of_b.ndim:
        return None
    size = of_a.parts[0].size
    if size > _MOST_BENDS or 2 * size > LARGEST:
        return None
    numbers = torch.arange(2 * size)
    places = (Picked(torch.where(numbers < size, numbers, -1)), Picked(numbers - size))
    by_root: dict[Root, list[tuple[Vertex, Picked]]] = {}
    for spread, place in zip((of_a, of_b), places, strict=True):
        for v in spread.parts:
            by_root.setdefault(v.root, []).append((v, place))
    both = [Vertex(root, 2 * size, terms=tuple(terms)) for root, terms in by_root.items()]
    rows, slack = None, torch.zeros(())
    if is_within():
        (of_rows_a, by_a), (of_rows_b, by_b) = _at_hand(a, size), _at_hand(b, size)
        rows, slack = torch.cat([of_rows_a, of_rows_b], 1), torch.maximum(by_a, by_b)
    return [Made(of_a.ndim, (), parts=_largest_of(both, rows, slack, size, sign), of=(a, b))]


def _with_fixed(x: Any, other: Any, y: NormedTensor, sign: float) -> Found:
    """The larger or smaller one of what moves and what does not: x itself, or not x at all."""
    if not moves(x) or not is_fixed(other) or x.shape != y.shape or (spread := spread_of(x)) is None:
        return None
    slopes = between(0.0, 1.0, spread.parts[0].size)
    if is_within():
        (low, high), fixed = reach(x, spread), values(other).expand(x.shape).reshape(-1, len(slopes))
        least, largest = fixed.amin(0), fixed.amax(0)
        is_x, is_other = (low > largest, high < least) if sign > 0 else (high < least, low > largest)
        slopes = Slopes(is_x.double(), (~is_other).double())
    return [Made(spread.ndim, (Term(x, slopes),))]


def _pooled(call: Call, ndim: int) -> Found:
    """Over windows of an image of `ndim` dimensions, and of its channels each by itself; what is around the image is in no maximum."""
    if (found := _alone(call)) is None or found[1].ndim != ndim + 1 or found[0].ndim != ndim + 2:
        return None
    (x, spread), (y,) = found, call.results
    windows = [
        _windows(call.given, d, length, count) for d, (length, count) in enumerate(zip(x.shape[2:], y.shape[2:], strict=True))
    ]
    numbers = torch.arange(math.prod(x.shape[1:])).reshape(x.shape[1:])
    members = []
    for at in itertools.product(*(range(max(map(len, places))) for places in windows)):
        picked = numbers
        for d, (places, i) in enumerate(zip(windows, at, strict=True), 1):
            # of a smaller window the first position is there once more
            picked = picked.index_select(d, torch.tensor([window[i] if i < len(window) else window[0] for window in places]))
        members.append(picked.reshape(-1))
    return _over(call, x, spread, torch.stack(members), ndim + 1, 1.0)


def _windows(given: dict[str, Any], dim: int, length: int, count: int) -> list[list[int]]:
    """The positions in each window along a dimension of an image: of one of a size, or of as many as there are to be."""
    if "output_size" in given:
        return [[*range(i * length // count, -(-(i + 1) * length // count))] for i in range(count)]
    kernel = _of(given["kernel_size"], dim)
    stride = _of(given.get("stride") or kernel, dim)
    padding, dilation = (_of(given.get(name, start), dim) for name, start in (("padding", 0), ("dilation", 1)))
    starts = (i * stride - padding for i in range(count))
    return [[p for j in range(kernel) if 0 <= (p := start + j * dilation) < length] for start in starts]


def _of(numbers: Any, dim: int) -> int:
    """The number for a dimension, of those for each or one for all."""
    return numbers if isinstance(numbers, int) else numbers[dim if len(numbers) > 1 else 0]


def _register(rule: Callable[[Call, Any], Found], argument: float, *ops: Callable) -> None:
    for op in ops:
        normed_op(op).register_movement(lambda call: rule(call, argument))


_register(_along, 1.0, torch.amax)
_register(_along, -1.0, torch.amin)
_register(_extremum, 1.0, torch.max)
_register(_extremum, -1.0, torch.min)
_register(_of_two, 1.0, torch.maximum, torch.fmax)
_register(_of_two, -1.0, torch.minimum, torch.fmin)
_register(_pooled, 1, F.max_pool1d, F.adaptive_max_pool1d)
_register(_pooled, 2, F.max_pool2d, F.adaptive_max_pool2d)
