"""Where one tensor is in another one of the same storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True)
class Part:
    """A view as ``whole[items]``, its dimensions in another order, and then in another shape.

    Attributes:
        items: an index, or a slice of positive step, for each dimension of the whole.
        order: of the dimensions that are cut with a slice, in the order of the view, their places in the order of the whole.
        sizes: of these dimensions in the order of the view.
        shape: of the view.
    """

    items: tuple[int | slice, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def taken_from(self, whole: T) -> T:
        """The view."""
        return whole[self.items].permute(self.order).reshape(self.shape)  # type: ignore[return-value]

    def placed(self, value: T) -> T:
        """A tensor of the view's shape as what stands at `items`."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return value.reshape(self.sizes).permute(back)  # type: ignore[return-value]

    def meets(self, other: Part, whole: torch.Tensor) -> bool:
        """Whether two parts of one whole have an entry in common."""
        ranges = ((_positions(i, n), _positions(j, n)) for i, j, n in zip(self.items, other.items, whole.shape, strict=True))
        return all(set(a) & set(b) for a, b in ranges)


def _positions(item: int | slice, size: int) -> range:
    return range(item, item + 1) if isinstance(item, int) else range(*item.indices(size))


def part_of(view: torch.Tensor, whole: torch.Tensor) -> Part | None:
    """Where a view is in another tensor with its storage; None if it is not a part of it that slices cut out.

    In a tensor whose entries have places of their own, in the order of its strides, a place says the position along each dimension.
    """
    if view.dtype == whole.dtype and is_reshaped(view, whole):
        shape = tuple(whole.shape)
        return Part((slice(None),) * whole.ndim, tuple(range(whole.ndim)), shape, tuple(view.shape))
    dims = sorted((d for d in range(whole.ndim) if whole.shape[d] > 1), key=lambda d: -whole.stride(d))
    spans = [(whole.shape[d] - 1) * whole.stride(d) for d in dims]
    if view.dtype != whole.dtype or view.numel() == 0 or whole.numel() == 0:
        return None
    if any(whole.stride(d) <= sum(spans[i + 1 :]) for i, d in enumerate(dims)):
        return None
    rest = view.storage_offset() - whole.storage_offset()
    items: list[int | slice] = [0] * whole.ndim
    start = {}
    for d in dims:
        start[d], rest = divmod(rest, whole.stride(d))
        items[d] = start[d]
    if rest != 0 or any(not 0 <= start[d] < whole.shape[d] for d in dims):
        return None
    cut = []
    for n, stride in zip(view.shape, view.stride(), strict=True):
        if n == 1:
            continue
        found = next((d for d in dims if d not in cut and 0 < whole.stride(d) <= stride), None)
        if found is None or stride % whole.stride(found) != 0:
            return None
        step = stride // whole.stride(found)
        last = start[found] + (n - 1) * step
        if last >= whole.shape[found]:
            return None
        items[found] = slice(start[found], last + 1, step)
        cut.append(found)
    places = sorted(cut)
    sizes = tuple(n for n in view.shape if n != 1)
    return Part(tuple(items), tuple(places.index(d) for d in cut), sizes, tuple(view.shape))


def is_reshaped(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one storage are the same elements in the same order."""
    return t.storage_offset() == other.storage_offset() and _runs(t) == _runs(other)


def _runs(t: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dimension, of those that are one in memory together."""
    found: list[tuple[int, int]] = []
    for n, stride in zip(t.shape, t.stride(), strict=True):
        if n != 1 and found and found[-1][1] == n * stride:
            found[-1] = (found[-1][0] * n, stride)
        elif n != 1:
            found.append((n, stride))
    return found
