"""Ranges of sorted entries: a later one less an earlier one is not negative.

So ``exp(-density * (z[:, 1:] - z[:, :-1]))`` is at most 1 where the places z along a ray are sorted, as those of a radiance field are that
were drawn anew where there is something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core.ranges import Ordered, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import argument, negative
from thunder_norm.rules.known_ranges.partial_sums import without_sums
from thunder_norm.rules.known_ranges.ranges import Known, Of

_entries, _narrowed, _difference, _sorted = map(without_sums, (torch.Tensor.__getitem__, torch.narrow, torch.sub, torch.sort))


def _in_order(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The same entries, in order."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim", default=-1)
    if not x.ndim or isinstance(dim, bool):
        return _sorted(args, kwargs, of)
    is_falling = bool(argument(args, kwargs, 2, "descending", default=False))
    return replace(_sorted(args, kwargs, of) or Range(), sums=Ordered(negative(dim, x.ndim), 0, 1, is_falling, object()))


def _ordered(x: Any, of: Of) -> Ordered | None:
    found = of(x)
    return found.sums if found is not None and isinstance(found.sums, Ordered) else None


def _from(known: Ordered, start: int, step: int = 1) -> Ordered:
    return replace(known, start=known.start + start * known.step, step=step * known.step)


def _taken(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Entries; of all rows those from one place on."""
    x, index = args
    known, result = _ordered(x, of), _entries(args, kwargs, of)
    items = list(index) if isinstance(index, tuple) else [index]
    if known is None or not all(i is Ellipsis or isinstance(i, slice) for i in items) or items.count(Ellipsis) > 1:
        return result
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (x.ndim - len([i for i in items if i is not Ellipsis]))
    start, _, step = items[known.along].indices(x.shape[known.along])
    whole = all(i == slice(None) for d, i in enumerate(items) if d != x.ndim + known.along)
    return replace(result or Range(), sums=_from(known, start, step)) if whole else result


def _cut(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The same of ``torch.narrow``."""
    x, dim, start = (argument(args, kwargs, at, name) for at, name in enumerate(("input", "dim", "start")))
    known, result = _ordered(x, of), _narrowed(args, kwargs, of)
    if known is None or negative(dim, x.ndim) != known.along or isinstance(start, torch.Tensor):
        return result
    return replace(result or Range(), sums=_from(known, start % x.shape[known.along]))


def _left(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """A difference; of later entries and earlier ones it has a sign."""
    result = _difference(args, kwargs, of)
    x, other = (argument(args, kwargs, at, *names) for at, names in enumerate((("input", "self"), ("other",))))
    a, b = _ordered(x, of), _ordered(other, of)
    if a is None or b is None or x.shape != other.shape or argument(args, kwargs, 2, "alpha", default=1) != 1:
        return result
    if (a.made, a.along, a.step) != (b.made, b.along, b.step):
        return result
    return _of_sign(result or Range(), (a.start >= b.start) != a.is_falling)


def _of_sign(known: Range, is_positive: bool) -> Range:
    return replace(known, low=max(known.low, 0.0)) if is_positive else replace(known, high=min(known.high, 0.0))


normed_op(torch.sort).register_range(_in_order)
normed_op(torch.Tensor.__getitem__).register_range(_taken)
normed_op(torch.narrow).register_range(_cut)
normed_op(torch.sub).register_range(_left, caps=True)
