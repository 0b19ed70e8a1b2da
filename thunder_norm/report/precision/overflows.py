"""Entries that a format rounds to infinity, and whether that makes a difference: the least number of a longer format, as masks are filled with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from thunder_norm.report.precision.trials import drawn_again
from thunder_norm.trees import flat_tensors, map_tensors


class Overflows:
    """Follows entries that become infinite through a program, by trying what each operation makes of infinity in their place.

    Where its result is the same (a softmax), they are absorbed; where it is infinite, the question goes on to who uses the result.
    """

    def __init__(self) -> None:
        # tensors are kept, so that their ids stay their own
        self._entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._went_to: dict[int, list[int | None]] = {}  # results that became infinite; None where something else came of it

    def begin(self, t: torch.Tensor, where: torch.Tensor) -> None:
        """Follow these entries of a tensor."""
        if where.any():
            known = self._entries.get(id(t))
            self._entries[id(t)] = t, where if known is None else where | known[1]

    def through(self, func: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor | None] | None:
        """Of each result of an operation the entries that become infinite, or None if it differs elsewhere; None if no argument is followed."""
        if not any(id(t) in self._entries for t in flat_tensors((args, kwargs))):
            return None

        def infinite(t: torch.Tensor) -> torch.Tensor:
            known = self._entries.get(id(t))
            copy = t.detach().clone()  # which may be written into
            return copy if known is None else torch.where(known[1], torch.copysign(torch.full_like(copy, torch.inf), copy), copy)

        with torch.no_grad():
            given = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
            changed = map_tensors(infinite, (args, kwargs))
            with drawn_again(args, kwargs):
                before = flat_tensors(func(*given[0], **given[1]))
            with drawn_again(args, kwargs):
                after = flat_tensors(func(*changed[0], **changed[1]))
        return [_became_infinite(a, b) for a, b in zip(before, after, strict=True)]

    def used(self, args: tuple, kwargs: dict, results: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
        """Note what an operation made of the arguments that are followed, as `through` found it."""
        went: list[int | None] = []
        for y, where in zip(results, found, strict=True):
            if where is None:
                went.append(None)
            elif where.any():
                went.append(id(y))
                self.begin(y, where)
        for t in flat_tensors((args, kwargs)):
            if id(t) in self._entries:
                self._went_to.setdefault(id(t), []).extend(went)

    def are_absorbed(self, t: torch.Tensor, returned: Collection[int]) -> bool:
        """Whether none of the followed entries of a tensor made a difference, nor is returned by the program."""
        left, seen = [id(t)], set()
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            went = self._went_to.get(one)
            if went is None or one in returned or None in went:
                return False
            left += [other for other in went if other is not None and other != one]
        return True


def _became_infinite(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """Where one is infinite and the other is not, if they are the same elsewhere."""
    if before.shape != after.shape:
        return None
    if not before.is_floating_point():
        return torch.zeros((), dtype=torch.bool) if torch.equal(before, after) else None
    infinite = after.isinf() & before.isfinite()
    is_same = (before == after) | before.isnan() & after.isnan() | infinite
    return infinite if is_same.all() else None
