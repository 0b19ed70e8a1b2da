"""Tensors that share memory, when one of them is changed in place: what the others are then, computed out of place.

Fakes have the strides that tensors have in eager mode, so that where one lies in the memory of another is known.  All are read out of,
and written into, the elements of that memory in order (`elements`), whatever strides the tensors have when the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from thunder_norm.tracing.shared_memory.views import may_share_by_name
from thunder.torch import _syms_returning_views, _syms_that_may_return_views, _torch_to_thunder_function_map


def may_share_memory(fn: Callable) -> bool:
    """Whether what a function of torch's returns may lie in the memory of its first argument, by its name or for Thunder."""
    if "inplace" in getattr(getattr(fn, "__code__", None), "co_varnames", ()):
        return True
    return _torch_to_thunder_function_map.get(fn) in _views() or may_share_by_name(getattr(fn, "__name__", ""))


@functools.cache
def _views() -> frozenset:
    return frozenset(_syms_returning_views | _syms_that_may_return_views)


def is_reshaped(alias: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether two tensors in one storage are the same elements in the same order."""
    if not (alias.is_contiguous() and target.is_contiguous()):
        return False
    return (alias.dtype, alias.numel(), alias.storage_offset()) == (target.dtype, target.numel(), target.storage_offset())


def is_same(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one storage are the same elements, each at the same place of both."""

    def where(t: torch.Tensor) -> tuple:
        return t.dtype, t.shape, t.storage_offset(), [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]

    return where(t) == where(other) or is_reshaped(t, other)


def whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one of some tensors in one storage that has all its elements in order; None if there is none, or they disagree on dtypes."""
    if len({t.dtype for t in tensors}) > 1:
        return None
    return next((t for t in tensors if _is_whole(t)), None)


def _is_whole(t: torch.Tensor) -> bool:
    has_all = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    return has_all and t.storage_offset() == 0 and is_dense(t)


def order(t: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor, that of the largest stride first: in this order its elements lie one after the other."""
    return tuple(sorted(range(t.ndim), key=lambda d: (-t.stride(d), -t.shape[d])))


class Place(NamedTuple):
    """Where a tensor lies in its storage, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def place(t: torch.Tensor) -> Place:
    """Where a tensor lies in its storage."""
    return Place(tuple(t.shape), tuple(t.stride()), t.storage_offset())


def lies_in(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of another one, of the same dtype, between its first element and its last."""
    if t.dtype != other.dtype or not t.numel() or t.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return t.storage_offset() >= other.storage_offset() and _end(place(t)) <= _end(place(other))


def elements(base: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The elements of a storage, in order, of a tensor that has them all, in this order of its dimensions."""
    return base.permute(dims).reshape(-1).clone(memory_format=torch.contiguous_format)


def with_written(
    base: torch.Tensor, dims: tuple[int, ...], value: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The elements of a storage after a tensor in it has become `value`."""
    result, value = elements(base, dims), _without_expanded(value, stride)
    result.as_strided(value.shape, stride, offset).copy_(value)  # torch's gradient of as_strided_scatter keeps the wrong elements
    return result


def written_over(alias: torch.Tensor, own: tuple, value: torch.Tensor, written: tuple) -> torch.Tensor:
    """What a tensor is after `value` was written into its memory; both are given with their `Place` in one storage.

    Of a dimension that is expanded the first entry stands for all.  Tensors of two dtypes have their bytes in common, and no derivative.
    """
    own, written = Place(*own), Place(*written)
    parts = (alias, own), (value, written)
    first = min(place.offset * t.itemsize for t, place in parts) // _ALIGNMENT * _ALIGNMENT
    size = max(_end(place) * t.itemsize for t, place in parts) - first
    size += -size % _ALIGNMENT
    dtype = alias.dtype if alias.dtype == value.dtype else torch.uint8
    memory = alias.new_zeros(size // dtype.itemsize, dtype=dtype)
    for t, (_, stride, offset) in parts:
        t = _without_expanded(t, stride)
        memory.view(t.dtype).as_strided(t.shape, stride, offset - first // t.itemsize).copy_(t)
    return memory.view(alias.dtype).as_strided(own.shape, own.stride, own.offset - first // alias.itemsize)


def _without_expanded(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The first entry alone of each dimension that is expanded where the tensor lies."""
    for dim, step in enumerate(stride):
        t = t.narrow(dim, 0, 1) if step == 0 and t.shape[dim] else t
    return t


_ALIGNMENT = 16  # bytes, of all dtypes


def _end(place: Place) -> int:
    shape, stride, offset = place
    return offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def lies_once(t: torch.Tensor) -> bool:
    """Whether no element of a tensor lies in memory twice, but for dimensions that are expanded."""
    span = 1
    for step, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if s and n > 1):
        if step < span:
            return False
        span += step * (size - 1)
    return True


def is_expanded(t: torch.Tensor) -> bool:
    """Whether a tensor has one element at several entries of a dimension."""
    return bool(t.numel()) and any(step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True))


def is_dense(t: torch.Tensor) -> bool:
    """Whether a tensor has each element of the memory between its first and its last one once."""
    return not t.numel() or (lies_once(t) and not is_expanded(t) and _end(place(t)) - t.storage_offset() == t.numel())


def taken_out(all_elements: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor that lies there in a storage of these elements."""
    return all_elements.contiguous().as_strided(shape, stride, offset)


def is_permuted(t: torch.Tensor) -> bool:
    """Whether the elements lie in memory one after the other, but in another order than that of the dimensions."""
    return not t.is_contiguous() and is_dense(t)


def laid_out(t: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The same tensor, its elements in memory one after the other in this order of its dimensions."""
    return t.permute(dims).contiguous().permute(sorted(range(len(dims)), key=dims.__getitem__))
