"""Ranges: numbers between which all entries of a tensor are, whatever its norm.

A norm bounds entries from above and says nothing about their sign.  What a program computes often does: a square, an exponential or a
softmax is never negative, a number added to it keeps it away from 0, and what is divided by it is bounded.

Where the numbers that hold for all norms do not say enough, an end that depends on norms does (`End`): ``softplus(x) > 0``, and at least
softplus(-B) where no entry of x is larger than B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class PartialSums:
    """That entries are sums of all numbers up to each place along a dimension, of one sign.

    Attributes:
        along: the dimension, negative.
        beside: the other dimensions of the sums, negative; any further ones have one entry.
        is_total: whether these are the last ones alone, the sums of all.
        made: by which cumulative sum, by identity.
    """

    along: int
    beside: tuple[int, ...]
    is_total: bool
    made: object


@dataclass(frozen=True)
class Differences:
    """That entries are one partial sum less another, for each two places of one cumulative sum.

    Attributes:
        first: the dimension of the places of the former, negative.
        second: that of the latter.
        is_falling: whether it is at most 0 where the former has more terms; else at least 0.
    """

    first: int
    second: int
    is_falling: bool


@dataclass(frozen=True)
class Ordered:
    """That entries are those of one sorted tensor, from a place on along a dimension, some or all of them.

    Attributes:
        along: the dimension, negative.
        start: the place, along it, of the first.
        step: how many places on the next is.
        is_falling: whether later ones are no larger; else no less.
        made: by which sort, by identity.
    """

    along: int
    start: int
    step: int
    is_falling: bool
    made: object


@dataclass(frozen=True, eq=False)
class End:
    """An end of a range as a function of norms, no further out than the number that holds for all of them.

    Attributes:
        value: that number, 0-dim and differentiable in the norms; computed where a rule asks for it, as few do.
        is_apart: whether it is another than the number for all norms, whatever these are as long as they are finite.
        steps: how many operations give it; beyond `_MOST_STEPS` it is let go, as each is computed anew wherever it is used.
    """

    value: Callable[[], torch.Tensor]
    is_apart: bool
    steps: int = 1


_MOST_STEPS = 64
TINY = 1e-150  # below, the slope of an inverse is no number


# where nothing keeps entries from infinity, whatever the norm says of the others: a mask
_NOWHERE = End(lambda: torch.tensor(-math.inf, dtype=torch.float64), False)


def _end(f: Callable[..., torch.Tensor], is_apart: bool, *ends: End | None) -> End | None:
    """What a function makes of ends, if all are known."""
    known = [end for end in ends if end is not None]
    steps = 1 + sum(end.steps for end in known)
    if len(known) < len(ends) or steps > _MOST_STEPS:
        return None
    return End(lambda: f(*(end.value() for end in known)), is_apart, steps)


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, which may be infinite.

    Attributes:
        low: no entry is less.
        high: no entry is more.
        least_sum: (dimension, negative; s): the entries along it sum up to at least s.  Only where none is negative.
        most_sum: the same for at most s.
        averaged: of how many numbers each entry is a mean, a sum or a length, at least: the more, the closer it is to its typical size.
            Says something of entries of one sign; infinite for a constant.
        sums: whether they are partial sums, where no number has the other sign, differences of such, or sorted.
        least: what no entry is less than by the norms at hand, where that says more than `low`.
        most: the same for `high`.
        rayleigh: between which numbers x^T A x / |x|^2 is, of the square matrices A in the last two dimensions.
        is_symmetric: whether these matrices are known to be symmetric, where `rayleigh` is known.
    """

    low: float = -math.inf
    high: float = math.inf
    least_sum: tuple[int, float] | None = None
    averaged: float = 1.0
    sums: PartialSums | Differences | Ordered | None = field(default=None, compare=False)
    least: End | None = field(default=None, compare=False, repr=False)
    most: End | None = field(default=None, compare=False, repr=False)
    rayleigh: Range | None = field(default=None, compare=False, repr=False)
    is_symmetric: bool = field(default=False, compare=False, repr=False)
    most_sum: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        # an end that is no number says nothing
        object.__setattr__(self, "low", -math.inf if math.isnan(self.low) else self.low)
        object.__setattr__(self, "high", math.inf if math.isnan(self.high) else self.high)
        if self.low == self.high:
            object.__setattr__(self, "averaged", math.inf)

    @property
    def says_something(self) -> bool:
        """Whether a number is not in it."""
        return self.low > -math.inf or self.high < math.inf

    @property
    def smallest_modulus(self) -> float:
        """The modulus of the number in it that is closest to 0."""
        return max(self.low, -self.high, 0.0)

    @property
    def largest_modulus(self) -> float:
        """The largest modulus of a number in it."""
        return max(-self.low, self.high)

    def is_above(self, x: float) -> bool:
        """Whether all entries are more than x, as long as norms are finite."""
        return self.low > x or (self.low == x and self.least is not None and self.least.is_apart)

    def is_below(self, x: float) -> bool:
        """Whether all entries are less than x, as long as norms are finite."""
        return self.negative().is_above(-x)

    def is_well_above(self, x: float) -> bool:
        """The same, by an end where the inverse of the distance to x has a slope."""
        return self.low > x + TINY or (self.least is not None and self.least.is_apart and self.is_above(x))

    @property
    def is_known_by_norms_alone(self) -> bool:
        """Whether the norm of the entries says it all."""
        if self.says_something or any(known is not None for known in (self.sums, self.least_sum, self.most_sum, self.rayleigh)):
            return False
        return all(end is None or end.is_apart for end in (self.least, self.most))

    def least_of(self, n: torch.Tensor) -> torch.Tensor:
        """What no entry is less than, as a number beside the norm n."""
        low = torch.full_like(n, self.low)
        if self.least is None:
            return low
        found = self.least.value()
        return torch.where(found >= low, found, low)  # infinite norms may give no number

    def most_of(self, n: torch.Tensor) -> torch.Tensor:
        """What no entry is more than, as a number beside the norm n."""
        return -self.negative().least_of(n)

    def largest_modulus_of(self, n: torch.Tensor) -> torch.Tensor:
        """What no entry's modulus is more than, as a number beside the norm n."""
        return torch.maximum(-self.least_of(n), self.most_of(n))

    def image(self, f: Callable[[float], float], of_ends: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Range:
        """What an increasing function makes of it; `of_ends` is the same for tensors, where it increases strictly."""
        least, most = (
            None if of_ends is None or end is None else _end(of_ends, end.is_apart, end) for end in (self.least, self.most)
        )
        return Range(f(self.low), f(self.high), averaged=self.averaged, least=least, most=most)

    def even_image(self, f: Callable[[float], float], of_ends: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Range:
        """What a function makes of it that increases with the modulus, strictly if `of_ends` is given."""
        if self.low >= 0 or self.high <= 0:
            return (self if self.low >= 0 else self.negative()).image(f, of_ends)
        found = Range(f(0.0), f(self.largest_modulus), averaged=self.averaged)
        if of_ends is None:
            return found
        below, above = self.negative()._high_end(), self._high_end()
        is_apart = self.is_below(self.largest_modulus) and self.is_above(-self.largest_modulus)
        return replace(found, most=_end(lambda a, b: of_ends(torch.maximum(a, b)), is_apart, below, above))

    def of_entries(self) -> Range:
        """Of some of the entries, or of numbers between them."""
        return replace(self, least_sum=None, most_sum=None, sums=None, rayleigh=None)

    def of_many(self, count: float) -> Range:
        """Of means over so many of them."""
        return replace(self.of_entries(), averaged=self.averaged * count)

    def plus(self, other: Range) -> Range:
        """Of a sum."""
        found = Range(self.low + other.low, self.high + other.high, averaged=min(self.averaged, other.averaged))
        return replace(found, least=self._lows_added(other), most=_negative(self.negative()._lows_added(other.negative())))

    def negative(self) -> Range:
        """Of the negative."""
        return Range(-self.high, -self.low, averaged=self.averaged, least=_negative(self.most), most=_negative(self.least))

    def times(self, other: Range) -> Range:
        """Of a product."""
        ends = [_product(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        found = Range(min(ends), max(ends), averaged=min(self.averaged, other.averaged))
        a, b = (r if r.low >= 0 else r.negative() for r in (self, other))
        if a.low < 0 or b.low < 0:
            return found
        moduli = Range(least=a._lows_multiplied(b), most=a._highs_multiplied(b))
        ends = moduli if (a is self) == (b is other) else moduli.negative()
        return replace(found, least=ends.least, most=ends.most)

    def inverse(self) -> Range | None:
        """Of 1 / x, where 0 is not in it."""
        if self.is_below(0.0):
            found = self.negative().inverse()
            return None if found is None else found.negative()
        if not self.is_above(0.0):
            return None
        least, most = (None if e is None else _end(torch.reciprocal, e.is_apart, e) for e in (self.most, self.least))
        return Range(1 / self.high, 1 / self.low if self.low else math.inf, averaged=self.averaged, least=least, most=most)

    def scaled(self, c: float) -> Range:
        """Of a multiple."""
        if c < 0:
            return self.scaled(-c).negative()
        if c == 0:
            return Range(0.0, 0.0)
        return self.image(lambda x: c * x, lambda x: x * c)

    def to_the(self, exponent: Range) -> Range:
        """Of powers of what is not negative: they rise, or fall, in the base as in the exponent, and are largest and least at ends of both."""
        found = [_power(x, p) for x in (self.low, self.high) for p in (exponent.low, exponent.high)]
        ends = [r() for r in (self._low_end, self._high_end, exponent._low_end, exponent._high_end)]
        if not self.is_above(0.0):
            return Range(min(found), max(found))
        are_finite = self.is_below(math.inf) and exponent.is_below(math.inf) and exponent.is_above(-math.inf)
        low, high = min(found), max(found)
        least = _end(lambda *e: _smallest(_powers(*e)), are_finite and low == 0, *ends)
        most = _end(lambda *e: -_smallest([-x for x in _powers(*e)]), are_finite and high == math.inf, *ends)
        return Range(low, high, least=least, most=most)

    def between(self, low: float, high: float) -> Range:
        """Of a number brought between two others."""
        found = self.image(lambda x: min(max(x, low), high), lambda x: x.clamp(min=low, max=high))
        least, most = found.least, found.most
        if least is not None:
            least = replace(least, is_apart=least.is_apart and low <= self.low < high)
        if most is not None:
            most = replace(most, is_apart=most.is_apart and low < self.high <= high)
        return replace(found, least=least, most=most)

    def larger(self, other: Range) -> Range:
        """Of the larger one of two numbers."""
        is_apart = any(a.is_above(b.low) and a.low >= b.low for a, b in ((self, other), (other, self)))
        lows = [r.least for r in (self, other) if r.least is not None]
        least = _end(torch.maximum, is_apart, *lows) if len(lows) == 2 else replace(lows[0], is_apart=is_apart) if lows else None
        most = _negative(_least_of_all([self.negative(), other.negative()]))
        return Range(max(self.low, other.low), max(self.high, other.high), least=least, most=most)

    def smaller(self, other: Range) -> Range:
        """Of the smaller one of two numbers."""
        return self.negative().larger(other.negative()).negative()

    def within(self, n: Callable[[], torch.Tensor]) -> Range:
        """Of entries whose modulus is at most n, besides."""
        reach = End(n, True)
        least, most = self.least, self.most
        if self.low == -math.inf:
            least = _negative(reach) if least is None else _end(lambda a, b: torch.maximum(a, -b), least.is_apart, least, reach)
        if self.high == math.inf:
            most = reach if most is None else _end(torch.minimum, most.is_apart, most, reach)
        return replace(self, least=least, most=most)

    def _low_end(self) -> End | None:
        if self.least is not None or math.isinf(self.low):
            return self.least
        return End(lambda: torch.tensor(self.low, dtype=torch.float64), False)

    def _high_end(self) -> End | None:
        return _negative(self.negative()._low_end())

    def _lows_added(self, other: Range) -> End | None:
        are_known = self.is_above(-math.inf) and other.is_above(-math.inf)
        is_apart = are_known and any(r.least is not None and r.least.is_apart for r in (self, other))
        return _either(torch.add, is_apart, self, other)

    def _lows_multiplied(self, other: Range) -> End | None:
        """Of products of what is not negative."""
        is_apart = any(a.least is not None and a.least.is_apart and b.is_above(0.0) for a, b in ((self, other), (other, self)))
        return _either(torch.mul, is_apart, self, other)

    def _highs_multiplied(self, other: Range) -> End | None:
        if self.most is None and other.most is None:
            return None
        are_known = self.is_below(math.inf) and other.is_below(math.inf)
        is_apart = are_known and any(
            a.most is not None and a.most.is_apart and b.high > 0 for a, b in ((self, other), (other, self))
        )
        return _end(torch.mul, is_apart, self._high_end(), other._high_end())

    def rounded(self, dtype: torch.dtype) -> Range:
        """Of the same numbers as a dtype has them: what is small enough is 0 there, and what stays away from 0 may not do so any more."""
        least, most = (None if end is None else _rounded(end, dtype) for end in (self.least, self.most))
        return replace(self, low=nearest(self.low, dtype), high=nearest(self.high, dtype), least=least, most=most)


def range_of_values(t: torch.Tensor) -> Range | None:
    """Between which numbers the entries of a plain tensor are; None where there are no values to look at."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta or t.layout is not torch.strided or not t.numel():
        return None
    if t.is_complex() or t.is_quantized or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return None
    with _disable_current_modes(), torch.no_grad():
        if t.dtype is torch.bool:
            return Range(float(t.all()), float(t.any()))
        low, high = (float(end) for end in t.detach().aminmax())
    least, most = _NOWHERE if low == -math.inf else None, _negative(_NOWHERE) if high == math.inf else None
    return Range(low, high, least=least, most=most)


class OfEntries:
    """A fact about entries alone, as a range is: it holds whatever the norm that a tensor is taken in."""


def facts_of_entries(facts: Any) -> Any:
    """Those among what the rule that made a tensor knows about it."""
    if isinstance(facts, tuple):
        return type(facts)(f for f in facts if isinstance(f, OfEntries)) or None
    return facts if isinstance(facts, OfEntries) else None


def union(ranges: Iterable[Range]) -> Range:
    """The smallest range with all of them in it."""
    found = list(ranges)
    least, most = _least_of_all(found), _negative(_least_of_all([r.negative() for r in found]))
    low, high = min(r.low for r in found), max(r.high for r in found)
    return Range(low, high, averaged=min(r.averaged for r in found), least=least, most=most)


def _negative(end: End | None) -> End | None:
    return None if end is None else _end(torch.neg, end.is_apart, end)


def _either(f: Callable[..., torch.Tensor], is_apart: bool, a: Range, b: Range) -> End | None:
    """Of the lower ends of two ranges, one of which depends on norms at least."""
    return None if a.least is None and b.least is None else _end(f, is_apart, a._low_end(), b._low_end())


def _least_of_all(ranges: list[Range]) -> End | None:
    """The lower end of a union, if one of theirs depends on norms; where one has no end of a kind, entries may be there."""
    low = min(r.low for r in ranges)
    if all(r.least is None for r in ranges):
        return None if math.isfinite(low) else _NOWHERE
    ends = [r._low_end() for r in ranges]
    if None in ends:
        return _NOWHERE
    is_apart = all(r.least is not None and r.least.is_apart for r in ranges if r.low == low)
    return _end(lambda *values: _smallest(values), is_apart, *ends)


def _smallest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    least = values[0]
    for v in values[1:]:
        least = torch.minimum(least, v)
    return least


def _rounded(end: End, dtype: torch.dtype) -> End | None:
    """The end of the same numbers as a dtype has them: 1 less almost 1 may be 0 there."""
    return end if dtype == torch.float64 else _end(lambda x: x.to(dtype).to(x.dtype), end.is_apart, end)


def nearest(x: float, dtype: torch.dtype) -> float:
    """The closest number of a dtype, to even ones half way."""
    if dtype == torch.float64 or x == 0 or not math.isfinite(x):
        return x
    info = torch.finfo(dtype)
    step = max(math.ldexp(info.eps, math.frexp(x)[1] - 1), info.tiny * info.eps)
    found = round(x / step) * step
    return math.copysign(math.inf, x) if abs(found) > info.max else found


def _power(x: float, p: float) -> float:
    """x^p, x not negative."""
    try:
        return x**p if x or p >= 0 else math.inf
    except OverflowError:
        return math.inf


def _powers(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    return [x**e for x in (a, b) for e in (p, q)]


def _product(a: float, b: float) -> float:
    """a b, where 0 times infinity is 0: the ends of a range are limits of numbers."""
    return 0.0 if a == 0 or b == 0 else a * b
