"""Between which numbers the slopes of functions of each entry are where entries stay in intervals, for `norm_sensitivity("within")`.

A function is a few pieces, each with a derivative that is monotone between the points named.  The difference quotients over an interval
are between the least and the largest derivative there, one-sided ones at kinks included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.slopes import Away

Derivative = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A part of a function.

    Attributes:
        derivative: of float64 entries.
        low: where it begins.
        high: where it ends.
        extreme: where its derivative is least or largest, besides the ends.
        period: of the derivative, whose extremes come again then; 0 if it has none.
    """

    derivative: Derivative
    low: float = -math.inf
    high: float = math.inf
    extreme: tuple[float, ...] = ()
    period: float = 0.0

    def slopes_between(self, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Slopes at the ends of an interval and where they are extreme, and whether the interval has that point."""
        for at in (a, b):
            yield self.derivative(at), a <= b
        for v in self.extreme:
            at = torch.full_like(a, v)
            yield self.derivative(at), self._is_passed(at, a, b) if self.period else (a <= at) & (at <= b)

    def _is_passed(self, at: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Whether a point comes again between two numbers, or as near to them as may be due to rounding."""
        rounded = 1e-12 * (1 + torch.maximum(a.abs(), b.abs()))
        ahead = torch.remainder(at - a, self.period)
        return (ahead <= b - a + rounded) | (ahead >= self.period - rounded)


def _constant(slope: float) -> Derivative:
    return lambda x: torch.full_like(x, slope)


def _kinks(*at: float, slopes: Sequence[float]) -> tuple[Piece, ...]:
    ends = (-math.inf, *at, math.inf)
    return tuple(Piece(_constant(s), a, b) for s, a, b in zip(slopes, ends[:-1], ends[1:], strict=True) if a <= b)


def _smooth(derivative: Derivative, *extreme: float) -> tuple[Piece, ...]:
    return (Piece(derivative, extreme=extreme),)


def _gelu(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    if given.get("approximate", "none") != "none":
        return _smooth(_gelu_by_tanh, -_GELU_BY_TANH, _GELU_BY_TANH)

    def derivative(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)

    return _smooth(derivative, -math.sqrt(2), math.sqrt(2))


# the second derivative of ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`` is 0 there
_GELU_BY_TANH = 1.418504008790828


def _gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    c, cubed = math.sqrt(2 / math.pi), 0.044715
    u = c * (x + cubed * x**3)
    return 0.5 * (1 + torch.tanh(u)) + 0.5 * x * c * (1 + 3 * cubed * x.square()) / torch.cosh(u).square()


def _mish(given: dict[str, Any]) -> tuple[Piece, ...]:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(F.softplus(x, threshold=1e3))
        return t + x * (1 - t.square()) * torch.sigmoid(x)

    return _smooth(derivative, *_MISH)


# where its second derivative is 0
_MISH = (-2.2563763963607931, 1.4905711794854285)


def _silu(given: dict[str, Any]) -> tuple[Piece, ...]:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(x)
        return s + x * s * torch.sigmoid(-x)

    return _smooth(derivative, -_SILU, _SILU)


# x tanh(x / 2) = 2
_SILU = 2.3993572805154677


def _exponential(alpha: float, scale: float, input_scale: float) -> tuple[Piece, ...] | None:
    """``scale * x`` above 0 and ``scale * alpha * (exp(input_scale * x) - 1)`` below."""
    if not input_scale > 0:
        return None
    steepest = scale * alpha * input_scale
    return Piece(lambda x: steepest * torch.exp(input_scale * x), high=0.0), Piece(_constant(scale), low=0.0)


def _elu(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    return _exponential(*(float(given.get(name, 1.0)) for name in ("alpha", "scale", "input_scale")))


def _celu(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    alpha = float(given.get("alpha", 1.0))
    return _exponential(alpha, 1.0, 1 / alpha) if alpha > 0 else None


def _clamp(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    low, high = given.get("min"), given.get("max")
    if any(isinstance(v, torch.Tensor) for v in (low, high)):
        return None
    a, b = (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))
    return _kinks(a, b, slopes=(0.0, 1.0, 0.0)) if a <= b else None


def _softplus(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    beta, threshold = float(given.get("beta", 1.0)), float(given.get("threshold", 20.0))
    if beta <= 0:
        return None
    linear = threshold / beta  # from there on it is x itself
    return Piece(lambda x: torch.sigmoid(beta * x), high=linear), Piece(_constant(1.0), low=linear)


def _shrink(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    size = float(given.get("lambd", 0.5))
    return _kinks(-size, size, slopes=(1.0, 0.0, 1.0)) if size >= 0 else None


def _leaky_relu(given: dict[str, Any]) -> tuple[Piece, ...]:
    return _kinks(0.0, slopes=(float(given.get("negative_slope", 0.01)), 1.0))


def _hardswish(given: dict[str, Any]) -> tuple[Piece, ...]:
    return (
        Piece(_constant(0.0), high=-3.0),
        Piece(lambda x: (2 * x + 3) / 6, -3.0, 3.0),
        Piece(_constant(1.0), low=3.0),
    )


def _hardtanh(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    low, high = float(given.get("min_val", -1.0)), float(given.get("max_val", 1.0))
    return _kinks(low, high, slopes=(0.0, 1.0, 0.0)) if low <= high else None


def _above(low: float, derivative: Derivative) -> tuple[Piece, ...]:
    """A function of numbers above `low` alone, steep towards it: of intervals that reach further there is no slope."""
    return Piece(lambda x: torch.full_like(x, math.nan), high=low), Piece(derivative, low=low)


def _power(given: dict[str, Any]) -> tuple[Piece, ...] | None:
    p = given.get("exponent")
    if isinstance(p, bool) or not isinstance(p, int | float):
        return None
    return _above(0.0, lambda x: p * x ** (p - 1)) if p != int(p) or p < 1 else _whole_power(int(p))


def _whole_power(p: int) -> tuple[Piece, ...]:
    return _smooth(lambda x: p * x ** (p - 1), 0.0)


def _reciprocal(given: dict[str, Any]) -> tuple[Piece, ...]:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        return -1 / x.square()

    return Piece(derivative, high=0.0), Piece(lambda x: torch.full_like(x, math.nan), 0.0, 0.0), Piece(derivative, low=0.0)


# Derivatives are there what they are at infinity.
_FAR = 1e30

_PIECES: dict[Any, Callable[[dict[str, Any]], tuple[Piece, ...] | None]] = {
    F.relu: lambda given: _kinks(0.0, slopes=(0.0, 1.0)),
    F.relu6: lambda given: _kinks(0.0, 6.0, slopes=(0.0, 1.0, 0.0)),
    F.hardsigmoid: lambda given: _kinks(-3.0, 3.0, slopes=(0.0, 1 / 6, 0.0)),
    torch.abs: lambda given: _kinks(0.0, slopes=(-1.0, 1.0)),
    torch.tanh: lambda given: _smooth(lambda x: 1 - torch.tanh(x).square(), 0.0),
    F.tanhshrink: lambda given: _smooth(lambda x: torch.tanh(x).square(), 0.0),
    torch.sigmoid: lambda given: _smooth(lambda x: torch.sigmoid(x) * torch.sigmoid(-x), 0.0),
    F.logsigmoid: lambda given: _smooth(lambda x: torch.sigmoid(-x)),
    torch.atan: lambda given: _smooth(lambda x: 1 / (1 + x.square()), 0.0),
    torch.asinh: lambda given: _smooth(lambda x: 1 / (1 + x.square()).sqrt(), 0.0),
    F.softsign: lambda given: _smooth(lambda x: 1 / (1 + x.abs()).square(), 0.0),
    torch.erf: lambda given: _smooth(lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x.square()), 0.0),
    torch.erfc: lambda given: _smooth(lambda x: -2 / math.sqrt(math.pi) * torch.exp(-x.square()), 0.0),
    torch.sin: lambda given: (Piece(torch.cos, extreme=(0.0, math.pi), period=2 * math.pi),),
    torch.cos: lambda given: (Piece(lambda x: -torch.sin(x), extreme=(-math.pi / 2, math.pi / 2), period=2 * math.pi),),
    F.mish: _mish,
    F.selu: lambda given: _exponential(1.6732632423543772, 1.0507009873554805, 1.0),
    F.gelu: _gelu, F.silu: _silu, F.elu: _elu, F.celu: _celu, torch.clamp: _clamp, F.softplus: _softplus, F.softshrink: _shrink,
    F.leaky_relu: _leaky_relu, F.hardswish: _hardswish, F.hardtanh: _hardtanh,
}  # fmt: skip

# Those that have no steepest slope.
_STEEP: dict[Any, Callable[[dict[str, Any]], tuple[Piece, ...] | None]] = {
    torch.exp: lambda given: _smooth(torch.exp),
    torch.expm1: lambda given: _smooth(torch.exp),
    torch.sinh: lambda given: _smooth(torch.cosh, 0.0),
    torch.cosh: lambda given: _smooth(torch.sinh),
    torch.square: lambda given: _whole_power(2),
    torch.pow: _power,
    torch.sqrt: lambda given: _above(0.0, lambda x: 0.5 / x.sqrt()),
    torch.rsqrt: lambda given: _above(0.0, lambda x: -0.5 * x**-1.5),
    torch.log: lambda given: _above(0.0, lambda x: 1 / x),
    torch.log1p: lambda given: _above(-1.0, lambda x: 1 / (1 + x)),
    torch.reciprocal: _reciprocal,
}


def functions() -> list[Any]:
    """The functions of each entry whose slopes over intervals are known."""
    return list(_PIECES)


def steep_functions() -> list[Any]:
    """Those of them that are steeper the further entries go, or the nearer to some number: without slopes for all entries."""
    return list(_STEEP)


def of(op: Any, given: dict[str, Any], low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The least and the largest slope of a function where its entries are between `low` and `high`; None if that is not known.

    Where an interval reaches beyond what the function is defined for, or to a pole, they are NaN or infinite.

    Args:
        op: the function.
        given: its arguments by name.
        low: float64, of any shape.
        high: the same, at least `low`.
    """
    make = _PIECES.get(op) or _STEEP.get(op)
    pieces = None if make is None else make(given)
    if pieces is None:
        return None
    low, high = low.clamp(-_FAR, _FAR), high.clamp(-_FAR, _FAR)
    least, largest = torch.full_like(low, math.inf), torch.full_like(low, -math.inf)
    for piece in pieces:
        a, b = low.clamp(min=piece.low), high.clamp(max=piece.high)
        # an interval that only touches it has none of its slopes
        is_in = (a < b) | (low == high) if piece.low < piece.high else a <= b
        for slope, is_passed in piece.slopes_between(a, b):
            slopes, is_there = _rounded_outwards(slope), is_in & is_passed
            # of a NaN both are one
            least = torch.where(is_there, torch.minimum(least, slopes[0]), least)
            largest = torch.where(is_there, torch.maximum(largest, slopes[1]), largest)
    return least, largest


def chords(
    op: Any, given: dict[str, Any], middle: torch.Tensor, off: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> Away | None:
    """The same of ``(f(u) - f(c)) / (u - c)`` for a c within `off` of `middle` and all u as far from it: of a relu at c > 0 at least 1/2 for u > -c.

    It is the mean of the slopes from c to u.  Over cells of which the least slope is known such a mean is least at the end of one.

    Args:
        op: the function.
        given: its arguments by name.
        middle: float64, of any shape.
        off: of the same shape, not negative.
        down: likewise: u is at least c less that.
        up: likewise: and at most c and that.
    """
    make = _PIECES.get(op) or _STEEP.get(op)
    pieces = None if make is None else make(given)
    if pieces is None:
        return None
    kinks = sorted({k for piece in pieces for k in (piece.low, piece.high) if math.isfinite(k)})
    slopes, near = (of(op, given, middle - off - a, middle + off + b) for a, b in ((down, up), (0.0, 0.0)))
    assert slopes is not None and near is not None, "there are pieces"
    found = []
    for side, distance in ((-1, down), (1, up)):
        cells, widths = _cells(op, given, middle + side * off, side * distance, kinks)
        total = widths.cumsum(0)
        sums = [(widths * t).cumsum(0) for t in cells]
        means = [torch.where(total > 0, s / total.clamp(min=1e-300), t) for s, t in zip(sums, cells, strict=True)]
        least, largest = torch.minimum(near[0], means[0].amin(0)), torch.maximum(near[1], means[1].amax(0))
        # from c itself the end is as far, all slopes being those of somewhere within `off` of there
        ends = [side * s[-1] for s in sums]
        other = 2 * off * (slopes[1] - slopes[0]) + 1e-12 * distance * (1 + torch.maximum(least.abs(), largest.abs()))
        found.append((_outwards(least, largest), (torch.minimum(*ends) - other, torch.maximum(*ends) + other)))
    (below, first), (above, last) = found
    return Away(down, up, slopes, below, above, first, last)


def _cells(
    op: Any, given: dict[str, Any], start: torch.Tensor, way: torch.Tensor, kinks: Sequence[float]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The least and the largest slope of a function in each of some cells, one after the other, and how wide they are."""
    shape = (-1, *[1] * start.ndim)
    steps = start + way * torch.linspace(0, 1, _CELLS + 1, dtype=start.dtype).reshape(shape)
    at = torch.tensor(kinks, dtype=start.dtype).reshape(shape).expand(-1, *start.shape)
    lowest, highest = torch.minimum(start, start + way), torch.maximum(start, start + way)
    ends = torch.cat([steps, at.clamp(lowest, highest)]).sort(0).values
    ends = torch.where(way < 0, ends.flip(0), ends)
    cells = of(op, given, torch.minimum(ends[1:], ends[:-1]), torch.maximum(ends[1:], ends[:-1]))
    assert cells is not None, "there are pieces"
    return cells, (ends[1:] - ends[:-1]).abs()


def _outwards(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return low - 1e-12 * (1 + low.abs()), high + 1e-12 * (1 + high.abs())


# On each side of the middle.
_CELLS = 16


def _rounded_outwards(slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_exact = (slopes == 0) | (slopes.abs() == 1)
    margin = torch.where(is_exact, 0.0, 1e-12 * (1 + slopes.abs()))
    return slopes - margin, slopes + margin
