"""Where one tensor is in another one of the same storage."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

# Calls an operation: the program's way to, where it has to know of it.
Run = Callable[..., Any]


def _plainly(fn: Callable, *args: Any) -> Any:
    return fn(*args)


class Layout(NamedTuple):
    """Where the entries of a tensor are in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> Layout:
        return cls(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype)


@dataclass(frozen=True)
class Part:
    """A view as ``whole[items]``, its dimensions in another order, and then in another shape.

    Attributes:
        items: an index, or a slice of positive step, for each dimension of the whole.
        order: of the dimensions that are cut with a slice, in the order of the view, their places in the order of the whole.
        sizes: of these dimensions in the order of the view.
        shape: of the view.
        seen: the shape of the whole of which the items are, where it is another one: a diagonal is steps through a matrix in one row.
    """

    items: tuple[int | slice, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    seen: tuple[int, ...] | None = None

    def taken_from(self, whole: Any, run: Run = _plainly) -> Any:
        """The view; steps that change nothing are left out, as not every norm goes through them."""
        if self.seen is not None:
            whole = run(torch.Tensor.reshape, whole, self.seen)
        if any(item != slice(None) for item in self.items):
            whole = run(torch.Tensor.__getitem__, whole, self.items)
        if self.order != tuple(range(len(self.order))):
            whole = run(torch.Tensor.permute, whole, self.order)
        return whole if tuple(whole.shape) == self.shape else run(torch.Tensor.reshape, whole, self.shape)

    def put_into(self, whole: Any, value: Any, write: Callable, run: Run = _plainly) -> Any:
        """The whole with a tensor of the view's shape in its place; `write` makes that of a whole, items and what stands there."""
        if self.seen is None:
            return run(write, whole, self.items, self._placed(value, run))
        found = run(write, run(torch.Tensor.reshape, whole, self.seen), self.items, self._placed(value, run))
        return run(torch.Tensor.reshape, found, tuple(whole.shape))

    def _placed(self, value: Any, run: Run) -> Any:
        """A tensor of the view's shape as what stands at `items`."""
        if tuple(value.shape) != self.sizes:
            value = run(torch.Tensor.reshape, value, self.sizes)
        back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
        return value if back == tuple(range(len(back))) else run(torch.Tensor.permute, value, back)

    def meets(self, other: Part, whole: Layout) -> bool:
        """Whether two parts of one whole have an entry in common, or may have."""
        if self.seen != other.seen:
            return True
        shape = whole.shape if self.seen is None else self.seen
        ranges = ((_positions(i, n), _positions(j, n)) for i, j, n in zip(self.items, other.items, shape, strict=True))
        return all(set(a) & set(b) for a, b in ranges)


def _positions(item: int | slice, size: int) -> range:
    return range(item, item + 1) if isinstance(item, int) else range(*item.indices(size))


@functools.lru_cache(
    maxsize=1 << 14
)  # a program that writes in a loop asks for those of all views that are left, again and again
def part_of(view: Layout, whole: Layout) -> Part | None:
    """Where a view is in another tensor with its storage; None if it is not a part that slices cut out of it, or of its last dimensions in one."""
    found = _cut_out(view, whole)
    if found is not None or view.dtype != whole.dtype:
        return found
    for d in range(len(whole.shape) - 2, -1, -1):
        seen = (*whole.shape[:d], math.prod(whole.shape[d:]))
        merged = whole._replace(shape=seen, stride=(*whole.stride[:d], whole.stride[-1]))
        if not is_reshaped(merged, whole):
            return None
        found = _cut_out(view, merged)
        if found is not None:
            return replace(found, seen=seen)
    return None


def _cut_out(view: Layout, whole: Layout) -> Part | None:
    """Where slices cut a view out of the whole.

    In a tensor whose entries have places of their own, in the order of its strides, a place says the position along each dimension.
    """
    ndim = len(whole.shape)
    if view.dtype == whole.dtype and is_reshaped(view, whole):
        return Part((slice(None),) * ndim, tuple(range(ndim)), whole.shape, view.shape)
    dims = sorted((d for d in range(ndim) if whole.shape[d] > 1), key=lambda d: -whole.stride[d])
    spans = [(whole.shape[d] - 1) * whole.stride[d] for d in dims]
    if view.dtype != whole.dtype or 0 in view.shape or 0 in whole.shape:
        return None
    if any(whole.stride[d] <= sum(spans[i + 1 :]) for i, d in enumerate(dims)):
        return None
    rest = view.offset - whole.offset
    items: list[int | slice] = [0] * ndim
    start = {}
    for d in dims:
        start[d], rest = divmod(rest, whole.stride[d])
        items[d] = start[d]
    if rest != 0 or any(not 0 <= start[d] < whole.shape[d] for d in dims):
        return None
    cut = []
    for n, stride in zip(view.shape, view.stride, strict=True):
        if n == 1:
            continue
        found = next((d for d in dims if d not in cut and 0 < whole.stride[d] <= stride), None)
        if found is None or stride % whole.stride[found] != 0:
            return None
        step = stride // whole.stride[found]
        last = start[found] + (n - 1) * step
        if last >= whole.shape[found]:
            return None
        items[found] = slice(start[found], last + 1, step)
        cut.append(found)
    places = sorted(cut)
    sizes = tuple(n for n in view.shape if n != 1)
    return Part(tuple(items), tuple(places.index(d) for d in cut), sizes, view.shape)


def ways_through(tensors: Sequence[Layout]) -> tuple[list[tuple[int, Part]], list[list[Part]]] | None:
    """How all tensors of one storage follow from a new value of the first: up to one that has them all, and down to each.

    Returns:
        by their places: the tensors on the way up, each with where the one before is in it; and for each tensor the parts, one in the
        other, by which it is taken from the last one.  None if no tensor has all the others.
    """
    for up in _ways_up(tensors):
        below = _ways_down(up[-1][0] if up else 0, tensors)
        if len(below) == len(tensors):
            return up, [below[place] for place in range(len(tensors))]
    return None


def _ways_up(tensors: Sequence[Layout]) -> Iterator[list[tuple[int, Part]]]:
    """The ways from the first tensor to each that has all of it: always another one, and where the one before is in it."""
    ways: list[tuple[int, list[tuple[int, Part]]]] = [(0, [])]
    for x, way in ways:  # grows while it is gone through
        yield way
        for y, t in enumerate(tensors):
            part = part_of(tensors[x], t) if all(y != z for z, _ in ways) else None
            if part is not None:
                ways.append((y, [*way, (y, part)]))


def _ways_down(whole: int, tensors: Sequence[Layout]) -> dict[int, list[Part]]:
    """How each tensor that is in the whole is taken from it: part of a part."""
    ways: dict[int, list[Part]] = {whole: []}
    for x in (found := [whole]):  # grows while it is gone through
        for y, t in enumerate(tensors):
            part = None if y in ways else part_of(t, tensors[x])
            if part is not None:
                ways[y] = [*ways[x], part]
                found.append(y)
    return ways


def is_reshaped(t: Layout, other: Layout) -> bool:
    """Whether two tensors in one storage are the same elements in the same order."""
    return t.offset == other.offset and _runs(t) == _runs(other)


@functools.lru_cache(maxsize=1 << 12)
def _runs(t: Layout) -> list[tuple[int, int]]:
    """Size and stride of each dimension, of those that are one in memory together."""
    found: list[tuple[int, int]] = []
    for n, stride in zip(t.shape, t.stride, strict=True):
        if n != 1 and found and found[-1][1] == n * stride:
            found[-1] = (found[-1][0] * n, stride)
        elif n != 1:
            found.append((n, stride))
    return found
