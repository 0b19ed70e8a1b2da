"""Batch dimensions: what batching rules have in common.  A batch dimension, where there is one, is the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy


def sample_shape(value: TensorProxy, dim: int | None) -> tuple[int, ...]:
    """The shape of a value for one sample."""
    return tuple(value.shape) if dim is None else tuple(value.shape[1:])


def sample_ndim(value: TensorProxy, dim: int | None) -> int:
    """The rank of a value for one sample."""
    return value.ndim - (dim is not None)


def with_batch(axis_size: int, value: TensorProxy, dim: int | None) -> TensorProxy:
    """The value with a batch dimension, expanded if it has none."""
    return value if dim is not None else to_sample_shape(axis_size, value, dim, tuple(value.shape))


def to_sample_shape(axis_size: int, value: TensorProxy, dim: int | None, shape: Sequence[int]) -> TensorProxy:
    """The value with a batch dimension, and broadcast to `shape` for each sample, as torch broadcasts."""
    wanted = (axis_size, *shape)
    own = sample_shape(value, dim)
    if dim is not None and own == tuple(shape):
        return value
    begin = 1 + len(shape) - len(own)
    kept = ([0] if dim is not None else []) + list(range(begin, len(wanted)))
    return prims.broadcast_in_dim(value, wanted, tuple(kept))


def with_sample_ndim(value: TensorProxy, dim: int | None, ndim: int) -> TensorProxy:
    """A batched value with dimensions of size 1 put in, so that it broadcasts per sample with others of rank `ndim`."""
    missing = ndim - sample_ndim(value, dim)
    if dim is None or missing <= 0:
        return value
    return ltorch.reshape(value, (value.shape[0], *(1,) * missing, *value.shape[1:]))


def canonical(index: int, ndim: int) -> int:
    """A dimension of one sample, not negative."""
    return int(index) + ndim if index < 0 else int(index)


def shifted(index: int, ndim: int) -> int:
    """A dimension of one sample of rank `ndim`, as a dimension of the batch."""
    return canonical(index, ndim) + 1


def tensors_of(in_dims: Sequence[Any], args: Sequence[Any]) -> list[tuple[TensorProxy, int | None]]:
    """The tensors among arguments, with their batch dimensions."""
    return [(a, d) for a, d in zip(args, in_dims, strict=True) if isinstance(a, TensorProxy)]
