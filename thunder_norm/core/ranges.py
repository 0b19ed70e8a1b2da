"""Ranges: numbers between which all entries of a tensor are, whatever its norm.

A norm bounds entries from above and says nothing about their sign.  What a program computes often does: a square, an exponential or a
softmax is never negative, a number added to it keeps it away from 0, and what is divided by it is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch


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
class Range:
    """All numbers from `low` to `high`, which may be infinite.

    Attributes:
        low: no entry is less.
        high: no entry is more.
        least_sum: (dimension, negative; s): the entries along it sum up to at least s.  Only where none is negative.
        averaged: of how many numbers each entry is a mean, a sum or a length, at least: the more, the closer it is to its typical size.
            Says something of entries of one sign; infinite for a constant.
        sums: whether they are partial sums, where no number has the other sign, or differences of such.
    """

    low: float = -math.inf
    high: float = math.inf
    least_sum: tuple[int, float] | None = None
    averaged: float = 1.0
    sums: PartialSums | Differences | None = field(default=None, compare=False)

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

    def image(self, f: Callable[[float], float]) -> Range:
        """What an increasing function makes of it."""
        return Range(f(self.low), f(self.high), averaged=self.averaged)

    def even_image(self, f: Callable[[float], float]) -> Range:
        """What a function makes of it that increases with the modulus."""
        return Range(f(self.smallest_modulus), f(self.largest_modulus), averaged=self.averaged)

    def of_entries(self) -> Range:
        """Of some of the entries, or of numbers between them."""
        return replace(self, least_sum=None, sums=None)

    def of_many(self, count: float) -> Range:
        """Of means over so many of them."""
        return replace(self.of_entries(), averaged=self.averaged * count)

    def plus(self, other: Range) -> Range:
        """Of a sum."""
        return Range(self.low + other.low, self.high + other.high, averaged=min(self.averaged, other.averaged))

    def negative(self) -> Range:
        """Of the negative."""
        return Range(-self.high, -self.low, averaged=self.averaged)

    def times(self, other: Range) -> Range:
        """Of a product."""
        ends = [_product(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(ends), max(ends), averaged=min(self.averaged, other.averaged))

    def inverse(self) -> Range | None:
        """Of 1 / x, where 0 is not in it."""
        return Range(1 / self.high, 1 / self.low, averaged=self.averaged) if self.smallest_modulus > 0 else None

    def scaled(self, c: float) -> Range:
        """Of a multiple."""
        return self.times(Range(c, c))

    def between(self, low: float, high: float) -> Range:
        """Of a number brought between two others."""
        return self.image(lambda x: min(max(x, low), high))

    def rounded(self, dtype: torch.dtype) -> Range:
        """Of the same numbers as a dtype has them: what is small enough is 0 there, and what stays away from 0 may not do so any more."""
        return replace(self, low=nearest(self.low, dtype), high=nearest(self.high, dtype))


class OfEntries:
    """A fact about entries alone, as a range is: it holds whatever the norm that a tensor is taken in."""


def fact_of_entries(facts: Any) -> OfEntries | None:
    """That among what the rule that made a tensor knows about it."""
    return next((f for f in (facts if isinstance(facts, tuple) else (facts,)) if isinstance(f, OfEntries)), None)


def union(ranges: Iterable[Range]) -> Range:
    """The smallest range with all of them in it."""
    found = list(ranges)
    return Range(min(r.low for r in found), max(r.high for r in found), averaged=min(r.averaged for r in found))


def nearest(x: float, dtype: torch.dtype) -> float:
    """The closest number of a dtype, to even ones half way."""
    if dtype == torch.float64 or x == 0 or not math.isfinite(x):
        return x
    info = torch.finfo(dtype)
    step = max(math.ldexp(info.eps, math.frexp(x)[1] - 1), info.tiny * info.eps)
    found = round(x / step) * step
    return math.copysign(math.inf, x) if abs(found) > info.max else found


def _product(a: float, b: float) -> float:
    """a b, where 0 times infinity is 0: the ends of a range are limits of numbers."""
    return 0.0 if a == 0 or b == 0 else a * b
