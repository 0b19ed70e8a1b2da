"""Indexing, gathering, scattering."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from thunder_norm.functions.batching import canonical, sample_ndim, sample_shape, shifted, with_batch
from thunder_norm.functions.derivatives import complex_of, register_linear
from thunder_norm.functions.opaque import Operation, derived, symbol_for
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import batching_rules, decompositions, register_vjp
from thunder_norm.tracing.torch_functions.type_promotion import filling, holds
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import sum_to

# -- tangents ---------------------------------------------------------------------------------------------------------


for _symbol in (prims.take, prims.take_along_axis, prims.gather, prims.embedding_backward):
    register_linear(_symbol, 0)

register_linear(prims.embedding, 1)

for _symbol in (
    prims.index_add,
    prims.index_copy,
    prims.index_put,
    prims.scatter,
    prims.scatter_add,
    prims.copy_with_setitem,
):
    register_linear(_symbol, 0, 2)


# -- cotangents -------------------------------------------------------------------------------------------------------


register_vjp(prims.flip)(lambda a, dims: (prims.flip(a, dims), dims), lambda dims, g: (prims.flip(g, dims), None))

register_vjp(prims.view)(
    lambda a, shape: (prims.view(a, shape), tuple(a.shape)), lambda shape, g: (clang.reshape(g, shape), None)
)


def _slice(
    a: TensorProxy, starts: Sequence[int], ends: Sequence[int], strides: Sequence[int] | None = None
) -> tuple[TensorProxy, tuple]:
    out = prims.slice_prim(a, starts, ends, strides)
    return out, (tuple(a.shape), tuple(out.shape), starts, [1] * a.ndim if strides is None else strides)


def _slice_backward(saved: tuple, g: TensorProxy) -> tuple:
    """Zeros around it, and between where there is a stride; torch pads real numbers only."""
    shape, out_shape, starts, strides = saved
    config = []
    for size, kept, start, stride in zip(shape, out_shape, map(int, starts), map(int, strides), strict=True):
        covered = start + (kept - 1) * stride + 1 if kept else start
        config.append((start, size - covered, stride - 1))
    if is_complex(g):
        return complex_of(*(prims.pad(part, 0.0, config) for part in (prims.real(g), prims.imag(g)))), None, None, None
    return prims.pad(g, 0.0, config), None, None, None


register_vjp(prims.slice_prim)(_slice, _slice_backward)


def _index_add(a: TensorProxy, index: TensorProxy, value: TensorProxy, dim: int) -> tuple[TensorProxy, tuple]:
    return prims.index_add(a, index, value, dim), (index, dim)


def _index_add_backward(saved: tuple, g: TensorProxy) -> tuple:
    index, dim = saved
    return g, None, prims.take(g, index, dim), None


register_vjp(prims.index_add)(_index_add, _index_add_backward)


def _index_put(
    a: TensorProxy, indices: Sequence[TensorProxy], values: TensorProxy, accumulate: bool
) -> tuple[TensorProxy, tuple]:
    return prims.index_put(a, indices, values, accumulate), (indices, values, accumulate)


def _index_put_backward(saved: tuple, g: TensorProxy) -> tuple:
    """What is overwritten gets nothing."""
    indices, values, accumulate = saved
    to_a = g if accumulate else prims.index_put(g, indices, clang.full_like(values, 0), False)
    return to_a, None, _summed_to(ltorch.getitem(g, tuple(indices)), values), None


register_vjp(prims.index_put)(_index_put, _index_put_backward)


def has_mask(index: Any) -> bool:
    """Whether a key of ``a[key]`` holds booleans, whose number of entries is a value: a tensor of them, or one of Python's."""
    return any(_is_mask(i) for i in (index if isinstance(index, tuple) else (index,)))


def _is_mask(index: Any) -> bool:
    return index.dtype is dtypes.bool8 if isinstance(index, TensorProxy) else isinstance(index, bool)


def _taken_values(g: torch.Tensor, index: Any, like: torch.Tensor) -> torch.Tensor:
    """What of g belongs to each entry of values that were broadcast to ``g[index]``, whose first dimensions of length 1 count for none."""
    taken, shape = g[index], list(like.shape)
    while len(shape) > taken.ndim:
        shape.pop(0)
    return taken.sum_to_size(shape).reshape(like.shape)


@functools.cache  # here, as an import of ours changes nothing of Thunder
def _taken() -> Symbol:
    meta = lambda g, index, like: TensorProxy(like=like, requires_grad=False)  # noqa: E731 - of the values' shape
    return symbol_for(Operation("values_of_setitem", _taken_values, meta))


def _setitem(a: TensorProxy, index: Any, value: Any) -> tuple[TensorProxy, tuple]:
    return prims.copy_with_setitem(a, index, value), (index, value)


def _setitem_backward(saved: tuple, g: TensorProxy) -> tuple:
    """What is overwritten gets nothing."""
    index, value = saved
    to_a = prims.copy_with_setitem(g, index, 0)
    if not isinstance(value, TensorProxy):
        return to_a, None, None
    if has_mask(index):
        return to_a, None, _taken()(g, index, value)
    return to_a, None, _summed_to(ltorch.getitem(g, index), value)


def _summed_to(taken: TensorProxy, like: TensorProxy) -> TensorProxy:
    """What entries that `like` was broadcast to get, for each entry of `like`, whose first dimensions of length 1 count for none."""
    if tuple(taken.shape) == tuple(like.shape):
        return taken
    shape = tuple(like.shape)[max(0, like.ndim - taken.ndim) :]
    summed = taken if tuple(taken.shape) == shape else sum_to(taken, shape)
    return summed if shape == tuple(like.shape) else ltorch.reshape(summed, tuple(like.shape))


register_vjp(prims.copy_with_setitem)(_setitem, _setitem_backward)


def _embedding(
    indices: TensorProxy,
    weight: TensorProxy,
    *,
    padding_idx: int = -1,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[TensorProxy, tuple]:
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    out = prims.embedding(indices, weight, max_norm=max_norm, norm_type=norm_type, **options)
    return out, (indices, weight.shape[0], *options.values())


def _pulled_embedding(saved: tuple, g: TensorProxy) -> tuple[None, TensorProxy]:
    """Rows of g, added where the indices name them; Thunder's rule gives that to the indices."""
    indices, num_weights, padding_idx, scale_grad_by_freq, sparse = saved
    return None, prims.embedding_backward(g, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)


register_vjp(prims.embedding)(_embedding, _pulled_embedding)


def _embedding_backward(
    grad: TensorProxy, indices: TensorProxy, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> tuple[TensorProxy, tuple]:
    out = prims.embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)
    return out, (indices, padding_idx, scale_grad_by_freq)


def _embedding_backward_backward(saved: tuple, g: TensorProxy) -> tuple:
    """The rows that the indices name, nothing for the padding."""
    indices, padding_idx, scale_grad_by_freq = saved
    if scale_grad_by_freq:
        raise NotImplementedError("embedding with scale_grad_by_freq cannot be differentiated twice")
    rows = prims.embedding(indices, g)
    if padding_idx is not None and padding_idx >= 0:
        rows = clang.where(clang.unsqueeze(clang.eq(indices, padding_idx), -1), 0.0, rows)
    return rows, *(None,) * 5


register_vjp(prims.embedding_backward)(_embedding_backward, _embedding_backward_backward)


# -- batches ----------------------------------------------------------------------------------------------------------


def _rows(axis_size: int, like: TensorProxy, ndim: int) -> TensorProxy:
    """The number of each sample, as an index of shape (N, 1, ..., 1)."""
    numbers = ltorch.arange(axis_size, device=like.device)
    return ltorch.reshape(numbers, (axis_size, *(1,) * ndim))


def _along(axis_size: int, index: TensorProxy, index_dim: int | None, shape: Sequence[int], dim: int) -> TensorProxy:
    """One index for each sample, (N, L), as an index for all elements: (N, ..., L, ...) with `shape` around."""
    index = with_batch(axis_size, index, index_dim)
    length = index.shape[1] if index.ndim == 2 else 1
    full = (axis_size, *shape[:dim], length, *shape[dim + 1 :])
    if index.ndim == 1:
        return prims.broadcast_in_dim(index, full, (0,))
    return prims.broadcast_in_dim(index, full, (0, dim + 1))


def take(axis_size: int, in_dims: tuple, a: TensorProxy, index: TensorProxy, dim: int) -> Any:
    """Slices of `a` along `dim`, at the positions in an index of rank 0 or 1."""
    a_dim, index_dim, _ = in_dims
    dim = canonical(dim, sample_ndim(a, a_dim))
    if index_dim is None:
        return prims.take(a, index, dim + 1), 0
    if a_dim is None:
        length = index.shape[1] if index.ndim == 2 else 1
        found = prims.take(a, prims.reshape(index, (axis_size * length,)), dim)
        shape = (*a.shape[:dim], axis_size, length, *a.shape[dim + 1 :])
        return prims.reshape(found, shape), dim
    return prims.gather(a, _along(axis_size, index, 0, a.shape[1:], dim), dim + 1), 0


def _by_index_of_same_rank(operation: Symbol, num_tensors: int) -> Any:
    """The rule of gather and its like: all tensors get the batch dimension."""

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, *args: Any) -> Any:
        *tensors, dim = (a, *args)
        given = [
            with_batch(axis_size, t, d) if isinstance(t, TensorProxy) else t
            for t, d in zip(tensors, in_dims[:num_tensors], strict=True)
        ]
        if sample_ndim(a, in_dims[0]) == 0:  # one element, like a tensor of one dimension
            wide = [prims.reshape(t, (axis_size, math.prod(t.shape[1:]))) if isinstance(t, TensorProxy) else t for t in given]
            like = given[1] if operation in (prims.gather, prims.take_along_axis) else given[0]
            return prims.reshape(operation(*wide, 1), tuple(like.shape)), 0
        return operation(*given, shifted(dim, given[0].ndim - 1)), 0

    return rule


def _index_add_or_copy(operation: Symbol, by_element: Symbol) -> Any:
    """The rule of index_add and index_copy; positions that are different for each sample become positions of elements."""

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, index: TensorProxy, value: TensorProxy, dim: int) -> Any:
        a_dim, index_dim, value_dim, _ = in_dims
        ndim = sample_ndim(a, a_dim)
        if ndim == 0:
            return NotImplemented
        a, value = with_batch(axis_size, a, a_dim), with_batch(axis_size, value, value_dim)
        dim = canonical(dim, ndim)
        if index_dim is None:
            return operation(a, index, value, dim + 1), 0
        return by_element(a, _along(axis_size, index, 0, value.shape[1:], dim), value, dim + 1), 0

    return rule


def index_put(
    axis_size: int, in_dims: tuple, a: TensorProxy, indices: Sequence[TensorProxy], values: TensorProxy, accumulate: bool
) -> Any:
    """The number of the sample is one more index."""
    a_dim, indices_dims, values_dim, _ = in_dims
    given = [with_batch(axis_size, i, d) for i, d in zip(indices, indices_dims, strict=True)]
    if not given:
        return NotImplemented
    shape = tuple(given[0].shape)
    rows = prims.broadcast_in_dim(_rows(axis_size, a, len(shape) - 1), shape, tuple(range(len(shape))))
    a, values = with_batch(axis_size, a, a_dim), with_batch(axis_size, values, values_dim)
    return prims.index_put(a, [rows, *given], values, accumulate), 0


def copy_with_setitem(axis_size: int, in_dims: tuple, a: TensorProxy, index: Any, value: Any) -> Any:
    """The index says where in one sample."""
    a_dim, index_dims, value_dim = in_dims
    positions = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, TensorProxy | NumberProxy | Sequence) for i in positions):
        dims = (a_dim, *_dims_of_tensors(index, index_dims), *_dims_of_tensors(value, value_dim))
        return derived("vmap", _SETITEM)(axis_size, "error", dims, (a, index, value), {})[0], 0
    a = with_batch(axis_size, a, a_dim)
    if isinstance(value, TensorProxy) and value_dim is not None:
        ndim = _selected_ndim(positions, a.ndim - 1)
        shape = sample_shape(value, value_dim)
        missing = ndim - len(shape)  # fewer than none: first dimensions of length 1, which count for none
        value = prims.reshape(value, (axis_size, *(1,) * missing, *shape[max(0, -missing) :]))
    return prims.copy_with_setitem(a, (slice(None), *positions), value), 0


def embedding(axis_size: int, in_dims: tuple, indices: TensorProxy, weight: TensorProxy, **kwargs: Any) -> Any:
    """Rows of a table; tables of each sample's own are put one after the other."""
    indices_dim, weight_dim = in_dims
    if weight_dim is None:
        return prims.embedding(indices, weight, **kwargs), 0
    if kwargs.get("padding_idx") not in (None, -1) or kwargs.get("scale_grad_by_freq"):
        return NotImplemented  # these say something about rows of one table
    merged = ltorch.reshape(weight, (axis_size * weight.shape[1], weight.shape[2]))
    return prims.embedding(_offset(axis_size, indices, indices_dim, weight.shape[1]), merged, **kwargs), 0


def embedding_backward(
    axis_size: int,
    in_dims: tuple,
    grad: TensorProxy,
    indices: TensorProxy,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Any:
    """The gradient of each sample's own table, one after the other."""
    grad_dim, indices_dim, *_ = in_dims
    if padding_idx not in (None, -1) or scale_grad_by_freq or sparse:
        return NotImplemented
    merged = prims.embedding_backward(
        with_batch(axis_size, grad, grad_dim),
        _offset(axis_size, indices, indices_dim, num_weights),
        axis_size * num_weights,
        padding_idx,
        scale_grad_by_freq,
        sparse,
    )
    return ltorch.reshape(merged, (axis_size, num_weights, merged.shape[-1])), 0


def _offset(axis_size: int, indices: TensorProxy, dim: int | None, num_rows: int) -> TensorProxy:
    """Indices into tables of `num_rows` rows, as indices into all of them one after the other."""
    begin = ltorch.arange(axis_size, device=indices.device) * num_rows
    shape = (axis_size, *(1,) * len(sample_shape(indices, dim)))
    return ltorch.add(with_batch(axis_size, indices, dim), ltorch.reshape(begin, shape))


def _dims_of_tensors(tree: Any, dims: Any) -> list[int | None]:
    """The batch dimension of each tensor in an index."""
    if isinstance(tree, TensorProxy):
        return [dims]
    if not isinstance(tree, list | tuple):
        return []
    each = dims if isinstance(dims, list | tuple) else [dims] * len(tree)
    return [d for v, dim in zip(tree, each, strict=True) for d in _dims_of_tensors(v, dim)]


def _with_item_set(a: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    new = a.clone()
    new[index] = value
    return new


# with an index of which some samples' parts lie elsewhere than others': torch sets it sample by sample
_SETITEM = Operation("setitem", _with_item_set, lambda a, index, value: TensorProxy(like=a))


def _selected_ndim(positions: tuple, ndim: int) -> int:
    """The rank of what an index of numbers, slices, None and an ellipsis selects."""
    return ndim - sum(isinstance(i, int) for i in positions) + sum(i is None for i in positions)


batching_rules.add(prims.take, take)
for _operation in (prims.gather, prims.take_along_axis):
    batching_rules.add(_operation, _by_index_of_same_rank(_operation, 2))
for _operation in (prims.scatter_add, prims.scatter):
    batching_rules.add(_operation, _by_index_of_same_rank(_operation, 3))
batching_rules.add(prims.index_add, _index_add_or_copy(prims.index_add, prims.scatter_add))
batching_rules.add(prims.index_copy, _index_add_or_copy(prims.index_copy, prims.scatter))
batching_rules.add(prims.index_put, index_put)
batching_rules.add(prims.copy_with_setitem, copy_with_setitem)
batching_rules.add(prims.embedding, embedding)
batching_rules.add(prims.embedding_backward, embedding_backward)


# -- in other operations ----------------------------------------------------------------------------------------------


def _index_fill(input: TensorProxy, dim: int, index: TensorProxy, value: TensorProxy | float) -> TensorProxy:
    """`value` at the positions of `index` along `dim`, `input` elsewhere.  What takes positions refuses those that are out of range.

    Torch 2.11 batches it wrong where only a 0-dim value has a batch dimension.
    """
    size = input.shape[dim] if input.ndim else 1
    places = ltorch.arange(size, device=input.device)
    counted = ltorch.where(ltorch.lt(index, 0), ltorch.add(index, size), index)
    positions = ltorch.index_select(places, 0, ltorch.reshape(counted, (int(index.numel),)))
    matches = ltorch.eq(ltorch.reshape(places, (size, 1)), ltorch.unsqueeze(positions, 0))
    shape = [1] * input.ndim
    if input.ndim:
        shape[dim] = size
    is_filled = ltorch.reshape(ltorch.any_tensor(matches, 1), tuple(shape))
    if isinstance(value, TensorProxy) and not holds(dtypes.to_torch_dtype(input.dtype), dtypes.to_torch_dtype(value.dtype)):
        return _filled()(input, is_filled, value)
    return ltorch.where(is_filled, filling(value, input.dtype), input)


@functools.cache
def _filled() -> Symbol:
    """Torch refuses values that overflow, which it looks at."""
    return symbol_for(Operation("filled", torch.masked_fill, lambda a, mask, value: TensorProxy(like=a, requires_grad=False)))


decompositions.add(torch.index_fill, _index_fill)
