"""Ranges of cumulative sums: of numbers of one sign the total is the largest of the partial sums in modulus.

So ``exp(total - partial)``, how much of what came at each place is left at the end, is at most 1 where the numbers are negative: the
decays of a chunk in Mamba-2 and in gated linear attention.  Between each two places it is at most 1 where only earlier ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import run_real, values_of
from thunder_norm.core.ranges import Differences, PartialSums, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import argument, negative
from thunder_norm.rules.known_ranges.ranges import Known, Of
from thunder_norm.rules.known_ranges.ranges_of_activations import or_zero


def _cumulative(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Sums of one sign have it, and are at least, or at most, their first term; of numbers that sum up to s at most, none is more."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    r = of(x)
    if r is None or not (r.low >= 0 or r.high <= 0):
        return None
    along = negative(dim, x.ndim) if x.ndim else 0
    sums = PartialSums(along, tuple(d for d in range(-x.ndim, 0) if d != along), False, object()) if x.ndim else None
    count = float(x.shape[along]) if x.ndim else 1.0
    low, high = (
        (r.low, r.least) if r.low >= 0 else (r.low * count, None),
        (r.high, r.most) if r.high <= 0 else (r.high * count, None),
    )
    most = min(high[0], r.most_sum[1]) if r.most_sum is not None and r.most_sum[0] == along else high[0]
    return Range(low[0], most, sums=sums, least=low[1], most=high[1])


normed_op(torch.cumsum).register_range(_cumulative, caps=True)


def without_sums(op: Callable) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """The rule that an operation has so far."""
    rule = normed_op(op).range_rule
    assert rule is not None, "`ranges` gave it one"
    return rule


_entries, _narrowed, _difference, _filled, _chosen = map(
    without_sums, (torch.Tensor.__getitem__, torch.narrow, torch.sub, torch.masked_fill, torch.where)
)


def _taken(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Entries; the last ones of partial sums are totals, where the dimension stays."""
    x, index = args
    found, result = of(x), _entries(args, kwargs, of)
    if found is None or not isinstance(found.sums, PartialSums) or result is None:
        return result
    items = list(index) if isinstance(index, tuple) else [index]
    if any(i is None for i in items):
        new = place_put_in(index, x.ndim + 1)
        return result if new is None else _beside(found, new)
    if not all(i is Ellipsis or isinstance(i, slice) for i in items) or items.count(Ellipsis) > 1:
        return result
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (x.ndim - len([i for i in items if i is not Ellipsis]))
    place = items[found.sums.along]
    whole = all(i == slice(None) for d, i in enumerate(items) if d != x.ndim + found.sums.along)
    is_total = range(*place.indices(x.shape[found.sums.along])) == range(x.shape[found.sums.along] - 1, x.shape[found.sums.along])
    return replace(result, sums=replace(found.sums, is_total=True)) if whole and is_total else result


def _cut(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The same of ``torch.narrow``."""
    x, dim, start = (argument(args, kwargs, at, name) for at, name in enumerate(("input", "dim", "start")))
    found, result = of(x), _narrowed(args, kwargs, of)
    if found is None or not isinstance(found.sums, PartialSums) or result is None or isinstance(start, torch.Tensor):
        return result
    along = found.sums.along
    is_total = negative(dim, x.ndim) == along and start in (-1, x.shape[along] - 1)
    return replace(result, sums=replace(found.sums, is_total=True)) if is_total else result


def _left(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """A difference; a total less a partial sum of it has their sign."""
    result = _difference(args, kwargs, of)
    first, second = (of(argument(args, kwargs, at, name)) for at, name in enumerate(("input", "other")))
    a, b = (None if r is None else r.sums for r in (first, second))
    if first is None or not (isinstance(a, PartialSums) and isinstance(b, PartialSums)):
        return result
    is_of_one = a.made is b.made and a.beside == b.beside and argument(args, kwargs, 2, "alpha", default=1) == 1
    if not is_of_one or a.is_total and b.is_total or (a.along == b.along) != (a.is_total or b.is_total):
        return result
    if a.along != b.along:
        return replace(result or Range(), sums=Differences(a.along, b.along, is_falling=first.high <= 0))
    is_falling = (first.high <= 0) == a.is_total
    known = result or Range()
    return replace(known, high=min(known.high, 0.0)) if is_falling else replace(known, low=max(known.low, 0.0))


def _with_dimension(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Partial sums with another dimension of one entry beside theirs."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    found = of(x)
    if found is None or not isinstance(found.sums, PartialSums):
        return None if found is None else found.of_entries()
    return _beside(found, negative(dim, x.ndim + 1))


def place_put_in(index: Any, ndim: int) -> int | None:
    """Where an index puts in a dimension of one entry, if it does nothing else, of so many: a negative number."""
    items = index if isinstance(index, tuple) else (index,)
    if sum(i is None for i in items) != 1 or not all(i is None or i is ... or i == slice(None) for i in items):
        return None
    place = next(n for n, i in enumerate(items) if i is None)
    return place - len(items) if ... in items[:place] else place - ndim


def _beside(found: Range, new: int) -> Range:
    assert isinstance(found.sums, PartialSums), "it has been looked at"
    along, *beside = (d - (d <= new) for d in (found.sums.along, *found.sums.beside))
    return replace(found, least_sum=None, most_sum=None, sums=replace(found.sums, along=along, beside=tuple(beside)))


def _of_earlier(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Differences where those are set aside that have fewer terms in the former sum than in the latter."""
    result = _filled(args, kwargs, of)
    x, mask, value = (argument(args, kwargs, at, name) for at, name in enumerate(("input", "mask", "value")))
    found = of(x)
    if found is None or not isinstance(found.sums, Differences) or not isinstance(value, int | float):
        return result
    return _of_one_sign(found, value) if _hides_later(mask, found.sums, x.shape) else result


def _of_one_sign(found: Range, value: float) -> Range:
    """Of the differences that are left, and what there is in the place of the others."""
    assert isinstance(found.sums, Differences), "it has been looked at"
    if found.sums.is_falling:
        return Range(min(found.low, value), max(min(found.high, 0.0), value))
    return Range(min(max(found.low, 0.0), value), max(found.high, value))


def _of_earlier_chosen(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """The same where those that are kept are chosen."""
    condition, x, other = (argument(args, kwargs, at, name) for at, name in enumerate(("condition", "input", "other")))
    if isinstance(other, int | float):
        is_kept, value = True, other
    else:
        is_kept, x, value = False, other, x
    found = of(x)
    if found is None or not isinstance(found.sums, Differences) or not isinstance(value, int | float):
        return _chosen(args, kwargs, of)
    mask = opposite(condition) if is_kept else condition
    return _of_one_sign(found, value) if _hides_later(mask, found.sums, x.shape) else _chosen(args, kwargs, of)


def opposite(condition: torch.Tensor) -> torch.Tensor:
    """Where a condition does not hold: of numbers that are known by now as numbers."""
    values = values_of(condition)
    if isinstance(values, FakeTensor) or values.is_meta:
        return run_real(torch.logical_not, (condition,), {})
    with _disable_current_modes():
        return values.logical_not()


def _of_triangle(is_lower: bool) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """The same of a triangle, with zeros around it."""

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        found, diagonal = of(argument(args, kwargs, 0, "input")), argument(args, kwargs, 1, "diagonal", default=0)
        sums = None if found is None else found.sums
        if isinstance(sums, Differences) and found is not None:
            place, is_inside = (sums.first, sums.second), diagonal <= 0 if is_lower else diagonal >= 0
            if is_inside and place == ((-2, -1) if is_lower else (-1, -2)):
                return _of_one_sign(found, 0.0)
        return or_zero(args, kwargs, of)

    return rule


def _hides_later(mask: torch.Tensor, of: Differences, shape: torch.Size) -> bool:
    """Whether a mask, of numbers known by now, is set wherever the place along `first` is before that along `second`."""
    mask = values_of(mask)
    if isinstance(mask, FakeTensor) or mask.is_meta or torch.broadcast_shapes(mask.shape, shape) != shape:
        return False
    with _disable_current_modes():
        plane = mask.expand(shape).movedim((of.first, of.second), (-2, -1))
        return bool(plane.logical_or(torch.ones_like(plane).tril()).all())


normed_op(torch.unsqueeze).register_range(_with_dimension)
normed_op(torch.masked_fill).register_range(_of_earlier)
normed_op(torch.where).register_range(_of_earlier_chosen)
normed_op(torch.tril).register_range(_of_triangle(True))
normed_op(torch.triu).register_range(_of_triangle(False))
normed_op(torch.Tensor.__getitem__).register_range(_taken)
normed_op(torch.narrow).register_range(_cut)
normed_op(torch.sub).register_range(_left)
