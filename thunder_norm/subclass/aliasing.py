"""Tensors that share memory, when one of them is changed in place: what the others are then, computed out of place.

Fakes have the strides that tensors have in eager mode, so that where one lies in the memory of another is known.  All are read out of,
and written into, the elements of that memory in order (`elements`), whatever strides the tensors have when the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from thunder.torch import _syms_returning_views, _syms_that_may_return_views, _torch_to_thunder_function_map


def may_share_memory(fn: Callable) -> bool:
    """Whether what a function of torch's returns may lie in the memory of its first argument, by its name or for Thunder."""
    name = getattr(fn, "__name__", "")
    if name in ("__getitem__", "__iter__", "__get__", "type_as", "type") or "inplace" in getattr(
        getattr(fn, "__code__", None), "co_varnames", ()
    ):
        return True
    return _torch_to_thunder_function_map.get(fn) in _views() or _is_view(name)


@functools.cache
def _views() -> frozenset:
    return frozenset(_syms_returning_views | _syms_that_may_return_views)


@functools.cache
def _is_view(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    schemas = () if packet is None else [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(r.alias_info is not None and not r.alias_info.is_write for schema in schemas for r in schema.returns)


def is_reshaped(alias: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether two tensors in one storage are the same elements in the same order."""
    if not (alias.is_contiguous() and target.is_contiguous()):
        return False
    return (alias.dtype, alias.numel(), alias.storage_offset()) == (target.dtype, target.numel(), target.storage_offset())


def whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one of some tensors in one storage that has all its elements in order; None if there is none, or they disagree on dtypes."""
    if len({t.dtype for t in tensors}) > 1:
        return None
    return next((t for t in tensors if _is_whole(t)), None)


def _is_whole(t: torch.Tensor) -> bool:
    has_all = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    return has_all and t.storage_offset() == 0 and t.permute(order(t)).is_contiguous()


def order(t: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor, that of the largest stride first: in this order its elements lie one after the other."""
    return tuple(sorted(range(t.ndim), key=lambda d: (-t.stride(d), -t.shape[d])))


def place(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Where a tensor lies in its storage: shape, strides, offset."""
    return tuple(t.shape), tuple(t.stride()), t.storage_offset()


def elements(base: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The elements of a storage, in order, of a tensor that has them all, in this order of its dimensions."""
    return base.permute(dims).reshape(-1).clone(memory_format=torch.contiguous_format)


def with_written(
    base: torch.Tensor, dims: tuple[int, ...], value: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The elements of a storage after a tensor in it has become `value`."""
    result = elements(base, dims)
    result.as_strided(shape, stride, offset).copy_(value)  # torch's gradient of as_strided_scatter keeps the wrong elements
    return result


def taken_out(all_elements: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor that lies there in a storage of these elements."""
    return all_elements.contiguous().as_strided(shape, stride, offset)


def is_permuted(t: torch.Tensor) -> bool:
    """Whether the elements lie in memory one after the other, but in another order than that of the dimensions."""
    return not t.is_contiguous() and t.permute(order(t)).is_contiguous()


def laid_out(t: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The same tensor, its elements in memory one after the other in this order of its dimensions."""
    return t.permute(dims).contiguous().permute(sorted(range(len(dims)), key=dims.__getitem__))
