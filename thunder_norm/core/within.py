"""Tensors that stay near the data at hand, inside ``norm_sensitivity("within")``: between which numbers their entries are, and their norms.

What an operation makes of tensors near the data is near what it made of the data.  So its norm is at most that of the entries and how far
they move, however much more the operation's rule allows, and entries that are away from 0 stay so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core import linear_bounds
from thunder_norm.core.composed import Spread, is_composed, spread_of, values
from thunder_norm.core.conversions import factor
from thunder_norm.core.kinds import LinfTensor
from thunder_norm.core.local import distances, is_within, scaled_to
from thunder_norm.core.ranges import Range
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, is_complex


def reach(x: NormedTensor, spread: Spread) -> tuple[torch.Tensor, torch.Tensor]:
    """Between which numbers each feature of x stays, in all rows, for inputs within their perturbation_size of the data."""
    rows, slack, down, up = by_sides(x, spread)
    if not len(rows):
        return -down, up
    low, high = rows.amin(0) - down - slack, rows.amax(0) + up + slack
    return torch.nan_to_num(low, nan=-math.inf), torch.nan_to_num(high, nan=math.inf)


def around(x: NormedTensor, spread: Spread) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of x [rows, features], what rounding may have done to them, and how far each feature moves."""
    rows, slack, down, up = by_sides(x, spread)
    return rows, slack, torch.maximum(down, up)


def by_sides(x: NormedTensor, spread: Spread) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, with how far each feature moves down, and how far up.

    Where nothing moves they are those at hand, as in a local bound.
    """
    rows = values(x.backing.detach()).reshape(-1, spread.parts[0].size)
    parts = away_from_data(x, spread).parts
    down, up = (functools.reduce(torch.add, sides) for sides in zip(*map(linear_bounds.moved, parts), strict=True))
    slack = rounded_by(x) if down.any() or up.any() else 0.0
    return rows, torch.maximum(down, up) * 1e-9 + slack, down, up


def rounded_by(x: NormedTensor) -> float:
    """What rounding does to entries at most: a thousand units in the last place of the largest one that is a number (those of masks are infinite)."""
    moduli = values(x.backing.detach()).abs()
    finite = moduli[moduli.isfinite()]
    return 1000 * torch.finfo(x.backing.dtype).eps * finite.amax().item() if finite.numel() else 0.0


def away_from_data(x: NormedTensor, spread: Spread) -> Spread:
    """How x moves away from the data alone: `spread`, or what is known of that by itself, for the same features."""
    found = None if x._away is None else spread_of(x._away)
    return spread if found is None or found.ndim != spread.ndim else found


def moved(spread: Spread, groups: torch.Tensor | None = None) -> torch.Tensor:
    """How far a row moves, Euclidean, or that group of its features, given by their numbers [groups, size], which moves furthest."""
    lengths = ((v.ellipsoid.length if groups is None else v.ellipsoid.part(groups), v.root.size) for v in spread.parts)
    return functools.reduce(torch.add, (length.to(size.device) * size for length, size in lengths))


def distances_of_groups(x: NormedTensor, dims: Sequence[int]) -> torch.Tensor | None:
    """How far each group of entries along `dims`, negative, may be from the data, Euclidean, inside "within": what is known by ellipsoids.

    Of a shape that broadcasts to that of x without `dims`; None where nothing is known, or a group is more than a row.
    """
    if not is_within() or x.perturbation_size is None or x.backing.is_meta or (spread := spread_of(x)) is None:
        return None
    spread = away_from_data(x, spread)
    if any(d < -spread.ndim for d in dims):
        return None
    row = x.shape[x.ndim - spread.ndim :]
    numbers = torch.arange(math.prod(row)).reshape(row).movedim(tuple(dims), tuple(range(-len(dims), 0)))
    groups = numbers.reshape(-1, math.prod(x.shape[d] for d in dims))
    found = torch.zeros(len(groups), dtype=torch.float64)
    for v in spread.parts:
        found = found + v.ellipsoid.parts(groups).detach() * values(v.root.size.detach())
    return (found * (1 + 1e-9) + rounded_by(x) * math.sqrt(groups.shape[1])).reshape(numbers.shape[: spread.ndim - len(dims)])


def keep_near(y: NormedTensor) -> None:
    """Give the result of an operation the norm and the range that it has near the data, where they are smaller than those of its rules."""
    if not is_composed() or not is_within() or is_complex(y):
        return
    with _disable_current_modes():  # they are about the program
        _keep_near(y)


def _keep_near(y: NormedTensor) -> None:
    found = distances(y)
    if found is None:
        return
    (distance,) = found
    measured = type(y).measure(y.backing.detach(), y.elem_dims).detach().to(NORM_DTYPE)
    y.norm_size = scaled_to(y.norm_size, measured + distance)
    by_entry = _entries(y, distance)
    if by_entry is not None:
        known = y._range or Range()
        y._range = replace(known, low=max(known.low, by_entry[0]), high=min(known.high, by_entry[1]))


def stay_away(y: NormedTensor, other: NormedTensor) -> None:
    """Let y be known to move away from the data as `other` does, of the same kind, and no further than its norm there and the largest near it.

    That says how far it is from the data, and no constant: of what moves less it does not say that y is as much nearer.
    """
    if is_complex(y) or distances(y) is None or y.perturbation_size is None or other.perturbation_size is None:
        return
    measured = type(y).measure(y.backing.detach(), y.elem_dims).detach().to(NORM_DTYPE)
    furthest = (measured + other.norm_size.detach()) * (1 + 1e-6)
    if furthest < other.perturbation_size:
        other.perturbation_size, other._spread = furthest, None
        keep_near(other)
    if other.perturbation_size.item() <= y.perturbation_size.item():
        y._away = other


def _entries(y: NormedTensor, distance: float) -> tuple[float, float] | None:
    spread = spread_of(y)
    if spread is not None:
        low, high = reach(y, spread)
        return low.amin().item(), high.amax().item()
    c = factor(y, LinfTensor, ())
    if c is None:
        return None
    t = values(y.backing.detach())
    return t.amin().item() - float(c) * distance, t.amax().item() + float(c) * distance
