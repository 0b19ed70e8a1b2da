"""Indices that Thunder takes for others than torch: ``x[-4:]`` of three, which it refuses, and ``x[True]``, which is ``x[1]`` there."""

from __future__ import annotations

from typing import Any

import numpy as np

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder.core import dtypes
from thunder.core.proxies import NumberProxy, TensorProxy, pyval


def has_bool(key: Any) -> bool:
    """Whether a bool is among the indices: torch's result is a copy then."""
    return any(isinstance(k, bool) for k in (key if isinstance(key, tuple) else (key,)))


def within(tensor: TensorProxy, key: Any) -> Any:
    """The same indices of a tensor: their slices are within it, and True is a new dimension.

    Raises:
        UnsupportedOpError: False is among them, or a bool beside tensors.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and _is_mask(keys[0]) and any(map(_is_mask, keys[0])):
        keys = tuple(keys[0])  # torch takes a list of lists for a tuple
    if any(map(_is_mask, keys)):
        key = keys = tuple(place for i, k in enumerate(keys) for place in _places(tensor, keys, i, k))
    if has_bool(key):
        if any(k is False or isinstance(k, TensorProxy | list) for k in keys) or sum(isinstance(k, bool) for k in keys) > 1:
            raise UnsupportedOpError(
                with_details("an index of bools", at=location_of_user(), instead="x[None] for x[True], x[:0] for x[False]")
            )
        keys = tuple(None if k is True else k for k in keys)
        key = keys
    if not any(isinstance(k, slice) and (_is_negative(k.start) or _is_negative(k.stop)) for k in keys):
        return key
    counts = [num_dims(k) for k in keys]
    left = max(tensor.ndim - sum(counts), 0)
    dim, found = 0, []
    for k, count in zip(keys, counts, strict=True):
        is_slice = isinstance(k, slice) and dim < tensor.ndim
        found.append(_within(k, tensor.shape[dim]) if is_slice else k)
        dim += left if k is ... else count
    return tuple(found) if isinstance(key, tuple) else found[0]


def _is_mask(key: Any) -> bool:
    """Whether an index is a list of bools, which Thunder takes for numbers."""
    return isinstance(key, list | tuple) and len(key) > 0 and all(isinstance(k, bool) or _is_mask(k) for k in key)


def _places(tensor: TensorProxy, keys: tuple[Any, ...], at: int, key: Any) -> tuple[Any, ...]:
    """An index, and for a list of bools, which stands at a place among others, where they are true, by dimension.

    Raises:
        IndexError: it has another length than the tensor there, in torch's words.
    """
    if not _is_mask(key):
        return (key,)
    mask = np.asarray(key)
    left = tensor.ndim - sum(map(num_dims, keys))  # what ``...`` is for: there a list counts as one dimension
    dim = sum(left if k is ... else np.ndim(k) if _is_mask(k) else num_dims(k) for k in keys[:at])
    if mask.shape != tuple(tensor.shape[dim : dim + mask.ndim]):
        wrong = next(i for i, n in enumerate(mask.shape) if tuple(tensor.shape[dim + i : dim + i + 1]) != (n,))
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {wrong} does not match the shape of the indexed tensor "
            f"{list(tensor.shape)} at index {dim + wrong}"
        )
    return tuple(places.tolist() for places in mask.nonzero())


def _within(s: slice, length: int) -> slice:
    start, stop = (0 if _is_negative(n, length) else n for n in (s.start, s.stop))
    return slice(start, stop, s.step)


def _is_negative(n: Any, length: int = 0) -> bool:
    """Whether it is a number before the first of so many entries."""
    value = pyval(n) if isinstance(n, NumberProxy) else n
    return isinstance(value, int) and value < -length


def num_dims(key: Any) -> int:
    """How many dimensions an index is for."""
    if key is None or key is ...:
        return 0
    is_mask = isinstance(key, TensorProxy) and dtypes.is_boolean_dtype(key.dtype)
    return key.ndim if is_mask else 1
