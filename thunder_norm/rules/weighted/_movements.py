"""How far something moves at most where several tensors say so: sums of multiples of what they move.

The largest of several such sums is taken multiple by multiple.  ``torch.maximum`` of the sums is the same number, but where nothing has moved
yet, which is where sensitivities are its derivatives, all are 0 and it gives the mean of theirs: less than the largest.  A mean is good enough
for typical sizes, for which that of many tensors together would be too much.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.rules._shared import Constant, maximum
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Movement:
    """A sum of multiples of movements, by their identity; and what it is known to be at most where something has moved."""

    terms: dict[int, tuple[torch.Tensor, Constant]]
    size: torch.Tensor

    def scaled(self, c: Constant) -> Movement:
        """c times as much."""
        return Movement({i: (moved, by * c) for i, (moved, by) in self.terms.items()}, times(self.size, c))

    def value(self) -> torch.Tensor:
        """As a number, with its derivatives."""
        if len(self.terms) == 1 or current_mode() != "bound":
            return self.size
        return torch.where(self.size > 0, self.size, _total([times(moved, by) for moved, by in self.terms.values()]))

    def rate(self) -> torch.Tensor:
        """How much it is where each tensor moves by 1."""
        return _total([torch.ones_like(moved) * by for moved, by in self.terms.values()])


def _total(sizes: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(sizes)).sum() if len(sizes) > 1 else sizes[0]


def movement(moved: torch.Tensor, by: Constant) -> Movement:
    """A multiple of what one tensor moves."""
    return Movement({id(moved): (moved, by)}, times(moved, by))


def _factors(of: Sequence[Movement]) -> Iterable[tuple[int, torch.Tensor, list[Constant]]]:
    """For each tensor what it moves, and its factor in each sum."""
    tensors = {i: moved for m in of for i, (moved, _) in m.terms.items()}
    return ((i, moved, [m.terms[i][1] if i in m.terms else 0.0 for m in of]) for i, moved in tensors.items())


def total(of: Sequence[Movement]) -> Movement:
    """The sum."""
    if len(of) == 1:
        return of[0]
    terms = {i: (moved, functools.reduce(lambda a, b: a + b, factors)) for i, moved, factors in _factors(of)}
    return Movement(terms, _total([m.size for m in of]))


def largest(of: Sequence[Movement]) -> Movement:
    """What none of them exceeds."""
    if len(of) == 1:
        return of[0]
    terms = {i: (moved, functools.reduce(_larger, factors)) for i, moved, factors in _factors(of)}
    size = maximum([m.size for m in of])
    return Movement(terms, size if len(terms) > 1 else _total([times(moved, by) for moved, by in terms.values()]))


def _larger(a: Constant, b: Constant) -> Constant:
    if isinstance(a, torch.Tensor):
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else max(a, b)


def least(of: Sequence[Movement]) -> Movement:
    """The smallest of several that all hold; where nothing has moved yet, the one with the smallest multiples."""
    return functools.reduce(_smaller, of)


def _smaller(a: Movement, b: Movement) -> Movement:
    is_first = (a.size < b.size) | (a.size == b.size) & (a.rate() <= b.rate())
    terms = {
        i: (moved, torch.where(is_first, *(torch.ones_like(moved) * by for by in factors)))
        for i, moved, factors in _factors([a, b])
    }
    return Movement(terms, torch.where(is_first, a.size, b.size))
