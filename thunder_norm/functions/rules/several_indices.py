"""``a[i, ..., j]``: Thunder counts several tensors of places as one number, in which a place that is out of range is another entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_norm.functions.registry import decompositions
from thunder_norm.tracing.torch_functions.slices import num_dims
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy


def are_several(key: Any) -> bool:
    """Whether a key of ``a[key]`` has more than one tensor, or list, of places."""
    return isinstance(key, tuple) and sum(map(_has_places, key)) > 1


def _has_places(index: Any) -> bool:
    return isinstance(index, TensorProxy | Sequence)


def _getitem(a: TensorProxy, key: Any) -> Any:
    """The same entries, for places that are looked up among those of their dimension first, which refuses what is out of range."""
    if not are_several(key) or any(isinstance(i, TensorProxy) and dtypes.is_boolean_dtype(i.dtype) for i in key):
        return NotImplemented
    left, dim, found = a.ndim - sum(map(num_dims, key)), 0, []
    for index in key:
        found.append(_within(a, index, dim) if _has_places(index) and dim < a.ndim else index)
        dim += left if index is ... else num_dims(index)
    return clang.getitem(a, tuple(found))


def _within(a: TensorProxy, index: TensorProxy | Sequence, dim: int) -> TensorProxy:
    size = a.shape[dim]
    index = index if isinstance(index, TensorProxy) else ltorch.tensor(index, device=a.device, dtype=dtypes.int64)
    counted = ltorch.where(ltorch.lt(index, 0), ltorch.add(index, size), index)
    places = ltorch.index_select(ltorch.arange(size, device=index.device), 0, ltorch.reshape(counted, (index.numel,)))
    return ltorch.reshape(places, tuple(index.shape))


decompositions.add(ltorch.getitem, _getitem)
