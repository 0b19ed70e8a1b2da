"""How far a vertex moves by linear bounds, carried backward through all that it is made of to the first one of its root.

A linear map of a vector that moves is one of what that is made of.  A function of each entry stays between two straight lines over the
interval that the entry moves in, ``l d + l_0 <= g(d) <= u d + u_0``, of which one counts where the coefficient is positive, the other where it is
negative.  So every ``a x`` is at least a linear function of the root's movement, whose least value on an ellipsoid is known.  Ellipsoids have
what is true of vectors as a whole; this has each entry's own interval, and lines that need not pass through 0.

Source: Zhang, Weng, Chen, Hsieh and Daniel, "Efficient Neural Network Robustness Certification with General Activation Functions", NeurIPS 2018.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.ellipsoids import EPSILON, Ellipsoid, LinearMap, Picked
from thunder_norm.core.slopes import Away, Slopes
from thunder_norm.core.vertices import Vertex

# Products of numbers that one bound may take.
_MOST_PRODUCTS = 3e8

Lines = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moved(v: Vertex) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each entry of a vertex moves down and up, for its root's own size."""
    if v.moves is None:
        with _disable_current_modes():  # they are about the program
            v.moves = _moved(v)
    return v.moves


def _moved(v: Vertex) -> tuple[torch.Tensor, torch.Tensor]:
    furthest = v.ellipsoid.entries * v.root.size.detach().item()
    if len(v.terms) == 1 and isinstance(
        picked := v.terms[0][1], Picked
    ):  # each entry is one of its parent's, of which as much is known
        down, up = picked.times(torch.stack(moved(v.terms[0][0]), 1)).unbind(1)
        return torch.minimum(down, furthest), torch.minimum(up, furthest)
    eye = torch.eye(v.size, dtype=torch.float64)
    found = least(v, torch.cat([eye, -eye]))
    if found is None:
        return furthest, furthest
    down, up = (-found).clamp(min=0.0).chunk(2)
    return torch.minimum(down, furthest), torch.minimum(up, furthest)


@torch.no_grad()
def least(v: Vertex, a: torch.Tensor) -> torch.Tensor | None:
    """What ``a x`` is at least, x the movement of a vertex for its root's own size; None if that costs too much, or no line is needed.

    Args:
        v: the vertex.
        a: [rows, n] float64.
    """
    path = _path(v, len(a))
    if path is None:
        return None
    sizes, size = _sizes(path), v.root.size.detach().item()
    if not all(bool(s.isfinite().all()) for s in sizes.values()):
        return None
    coefficients, total = {v: a}, torch.zeros(len(a), dtype=torch.float64)
    for u in path:
        a = coefficients.pop(u)
        if u.given is not None:
            total = total - _furthest(a, u.given) * size
        elif u.slopes is not None:
            parent = u.terms[0][0]
            low, low_at, high, high_at = _lines(u.slopes, sizes[parent])
            positive, negative = a.clamp(min=0.0), a.clamp(max=0.0)
            total = total + positive @ low_at + negative @ high_at
            off = sizes[parent] * torch.maximum(low.abs(), high.abs()) + low_at.abs() + high_at.abs()
            total = total - _unit(u, path) * (a.abs() @ off)
            _add(coefficients, parent, positive * low + negative * high)
        else:
            for parent, c in u.terms:
                if c is None:
                    _add(coefficients, parent, a)
                    continue
                matrix = _dense(c, parent.size) * c.scale
                total = total - _unit(parent, path) * (a.abs() @ (c.magnitudes(sizes[parent]) * c.scale))
                _add(coefficients, parent, a * matrix if matrix.ndim == 1 else a @ matrix)
    return total if bool(total.isfinite().all()) else None


def _add(coefficients: dict[Vertex, torch.Tensor], v: Vertex, a: torch.Tensor) -> None:
    known = coefficients.get(v)
    coefficients[v] = a if known is None else known + a


def _unit(v: Vertex, path: Sequence[Vertex]) -> float:
    """What rounding does to a sum over the entries of v, and of as many such sums as a path may have, relative to its terms."""
    return 8 * EPSILON * (v.size + len(path) + 4)


def _dense(c: LinearMap, size: int) -> torch.Tensor:
    return c.columns(torch.ones(size, dtype=torch.float64)).detach()


def _furthest(a: torch.Tensor, e: Ellipsoid) -> torch.Tensor:
    cov = e.cov.detach()
    rounded = 32 * EPSILON * (len(cov) + 4) * (a.abs() @ cov.diagonal().sqrt()).square() + 1e-300
    return (((a @ cov) * a).sum(1).clamp(min=0.0) + rounded).sqrt() * e.scale


def _path(v: Vertex, rows: int) -> list[Vertex] | None:
    """All that a vertex is made of, from it to the first one; None if that is too much, if it does not move or if nothing in it is bent."""
    if not v.terms or not v.root.size.detach().item():
        return None
    found, pending, products, is_bent = {v}, [v], 0.0, False
    while pending:
        u = pending.pop()
        is_bent |= u.slopes is not None and not u.slopes.is_linear
        for parent, c in u.terms:
            products += rows * u.size * (1.0 if c is None or parent.size == u.size and c.is_turn else parent.size)
            if parent not in found:
                found.add(parent)
                pending.append(parent)
        if products > _MOST_PRODUCTS:
            return None
    return sorted(found, key=lambda u: -u.number) if is_bent else None


def _sizes(path: Sequence[Vertex]) -> dict[Vertex, torch.Tensor]:
    """How large entries are at most: by the vertices' ellipsoids where these are known, and else by what they are made of."""
    found: dict[Vertex, torch.Tensor] = {}
    for u in reversed(path):
        size = u.root.size.detach().item() * (1 + 1e-9)
        if u.given is not None:
            found[u] = u.given.entries * size
            continue
        if u.slopes is not None:
            made = u.slopes.moduli.detach() * found[u.terms[0][0]]
        else:
            terms = (found[p] if c is None else c.magnitudes(found[p]) * c.scale for p, c in u.terms)
            made = functools.reduce(torch.add, terms)
        made = made * (1 + 1e-9)
        found[u] = torch.minimum(made, u.ellipsoid.entries * size) if "ellipsoid" in u.__dict__ else made
    return found


def _lines(slopes: Slopes, size: torch.Tensor) -> Lines:
    """Slopes of lines below and above what is made of entries of at most that size, and where they are at 0."""
    if slopes.away is not None:
        return _lines_away(slopes.away)
    low, high = slopes.low.detach(), slopes.high.detach()
    middle, off = (low + high) / 2, ((high - low) / 2 + 4 * EPSILON * slopes.moduli.detach()) * size * (1 + 1e-9)
    return middle, -off, middle, off


def _lines_away(away: Away) -> Lines:
    """The one of a few lines that is highest in the middle of the interval below, and the lowest there above.

    Chords from 0 say that ``g(d)`` is between ``low d`` and ``high d`` on each side, hence below the line through both ends, or below one through
    0; and by the derivative no more than a line from an end says.
    """
    middle = (away.up - away.down) / 2

    def below(a: Away) -> tuple[torch.Tensor, torch.Tensor]:
        width = (a.down + a.up).clamp(min=1e-300)
        chord = (a.above[0] * a.up + a.below[1] * a.down) / width
        through = torch.where(a.up > a.down, a.above[0], a.below[1])
        is_bent_down = a.above[0] <= a.below[1]
        lines = [
            (
                torch.where(is_bent_down, chord, through),
                torch.where(is_bent_down, torch.minimum(a.up * (a.above[0] - chord), a.down * (chord - a.below[1])), 0.0),
            ),
            (a.slopes[0], a.first[0] + a.down * a.slopes[0]),  # from the lower end, at least as steep as that
            (a.slopes[1], a.last[0] - a.up * a.slopes[1]),  # from the upper end down
        ]
        slope, at = lines[0]
        for other, other_at in lines[1:]:
            is_higher = other * middle + other_at > slope * middle + at
            slope, at = torch.where(is_higher, other, slope), torch.where(is_higher, other_at, at)
        return slope, at - 1e-12 * (a.up + a.down) * (slope.abs() + a.slopes[0].abs() + a.slopes[1].abs())

    low, low_at = below(away)
    high, high_at = below(away.negative)
    return low, low_at, -high, -high_at
