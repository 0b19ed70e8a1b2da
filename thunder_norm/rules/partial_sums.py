"""Ranges of cumulative sums: of numbers of one sign the total is the largest of the partial sums in modulus.

So ``exp(total - partial)``, how much of what came at each place is left at the end, is at most 1 where the numbers are negative: the
decays of a chunk in Mamba-2 and in gated linear attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core.ranges import PartialSums, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import negative
from thunder_norm.rules.ranges import Known, Of, argument


def _cumulative(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Sums of one sign have it, and are at least, or at most, their first term."""
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim")
    r = of(x)
    if r is None or not (r.low >= 0 or r.high <= 0):
        return None
    sums = PartialSums(negative(dim, x.ndim), False, object()) if x.ndim else None
    return Range(r.low if r.low >= 0 else -math.inf, r.high if r.high <= 0 else math.inf, sums=sums)


normed_op(torch.cumsum).register_range(_cumulative)


def _without_sums(op: Callable) -> Callable[[tuple, Mapping[str, Any], Of], Known]:
    """The rule that an operation has so far."""
    rule = normed_op(op).range_rule
    assert rule is not None, "`ranges` gave it one"
    return rule


_entries, _narrowed, _difference = map(_without_sums, (torch.Tensor.__getitem__, torch.narrow, torch.sub))


def _taken(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Entries; the last ones of partial sums are totals, where the dimension stays."""
    x, index = args
    found, result = of(x), _entries(args, kwargs, of)
    if found is None or found.sums is None or result is None:
        return result
    items = list(index) if isinstance(index, tuple) else [index]
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
    if found is None or found.sums is None or result is None or isinstance(start, torch.Tensor):
        return result
    along = found.sums.along
    is_total = negative(dim, x.ndim) == along and start in (-1, x.shape[along] - 1)
    return replace(result, sums=replace(found.sums, is_total=True)) if is_total else result


def _left(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """A difference; a total less a partial sum of it has their sign."""
    result = _difference(args, kwargs, of)
    first, second = (of(argument(args, kwargs, at, name)) for at, name in enumerate(("input", "other")))
    if first is None or second is None or first.sums is None or second.sums is None:
        return result
    if first.sums.made is not second.sums.made or argument(args, kwargs, 2, "alpha", default=1) != 1:
        return result
    if first.sums.is_total == second.sums.is_total:
        return result
    is_falling = (first.high <= 0) == first.sums.is_total
    known = result or Range()
    return replace(known, high=min(known.high, 0.0)) if is_falling else replace(known, low=max(known.low, 0.0))


normed_op(torch.Tensor.__getitem__).register_range(_taken)
normed_op(torch.narrow).register_range(_cut)
normed_op(torch.sub).register_range(_left)
