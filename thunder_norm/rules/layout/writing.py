"""Norm rules for writing into a tensor in place: ``x[index] = v`` and ``x.copy_(v)``, as operations that return the tensor after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.in_place import functional_of
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import Number, annotated, as_kind, maximum, refined, rms, root_sum_squares, scalar
from thunder_norm.rules.layout.untouched import region_of, with_region_written
from thunder_norm.scalars import times

# For each dimension of the tensor which positions are named: a number or a slice.
_Items = list[int | slice]


def _items(shape: Sequence[int], index: Any) -> tuple[_Items, list[int | None]] | None:
    """What an index of numbers and slices names in each dimension, and the dimensions (negative; None: new) of the part.

    None for an index with tensors, lists or bools.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int) for item in given):
        return None
    dots = next((i for i, item in enumerate(given) if item is Ellipsis), len(given))
    unnamed = len(shape) - sum(item is not None and item is not Ellipsis for item in given)
    given[dots : dots + 1] = [slice(None)] * unnamed
    items: _Items = []
    layout: list[int | None] = []
    for item in given:
        if item is None or isinstance(item, slice):
            layout.append(None if item is None else len(items) - len(shape))
        if item is not None:
            items.append(cast(Any, item))
    return items, layout


@functional_of(torch.Tensor.__setitem__)
@normed_op
def with_entries(input: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """The tensor that `input` is after ``input[index] = value``."""
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=input.dtype, device=input.device)
    value = value.to(input.dtype)
    found = _items(input.shape, index)
    if found is not None:
        items, layout = found
        new = tuple(i - len(layout) for i, d in enumerate(layout) if d is None)
        shape = [1 if d is None else len(range(*cast(slice, items[d]).indices(input.shape[d]))) for d in layout]
        whole = value.reshape(value.shape[-len(shape) :] if shape else ()).expand(shape)
        return _put(input, items, whole.squeeze(new) if new else whole)
    while value.ndim and value.shape[0] == 1:  # as torch: more dimensions than the part has may be of length 1
        value = value.squeeze(0)
    given = index if isinstance(index, tuple) else (index,)
    tensors = [torch.as_tensor(i, device=input.device) for i in given if isinstance(i, torch.Tensor | list)]
    if len(tensors) != len(given):  # tensors beside slices, numbers or None
        places = torch.arange(input.numel(), device=input.device).reshape(input.shape)[index]
        return torch.index_put(input.reshape(-1), (places,), value).reshape(input.shape)
    if len(tensors) == 1 and tensors[0].dtype is torch.bool and value.ndim == 0:
        mask = tensors[0].reshape(*tensors[0].shape, *[1] * (input.ndim - tensors[0].ndim))
        return torch.where(mask, value, input)
    return torch.index_put(input, tuple(tensors), value)


def _put(x: torch.Tensor, items: _Items, value: torch.Tensor) -> torch.Tensor:
    """x with `value` at what `items` name in its first dimensions, from the last of them on."""
    if not items:
        return value.expand(x.shape).contiguous()
    *before, item = items
    d = len(before)
    if isinstance(item, int):
        part = _put(x.select(d, item), before, value)
        return _replaced(x, part.unsqueeze(d), d, [item]) if x.is_complex() else torch.select_scatter(x, part, d, item)
    start, stop, step = item.indices(x.shape[d])
    if (start, stop, step) == (0, x.shape[d], 1) and all(i == slice(None) for i in before):
        return _put(x, before, value)
    part = _put(x[(slice(None),) * d + (item,)], before, value)
    if x.is_complex():
        return _replaced(x, part, d, range(start, stop, step))
    return torch.slice_scatter(x, part, d, start, max(start, stop), step)


def _replaced(x: torch.Tensor, part: torch.Tensor, dim: int, positions: Iterable[int]) -> torch.Tensor:
    """x with `part` at these positions: of complex tensors torch differentiates neither slice_scatter nor select_scatter."""
    return torch.index_copy(x, dim, torch.tensor([*positions], device=x.device, dtype=torch.long), part)


@functional_of(torch.Tensor.copy_)
@normed_op
def copied(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The tensor that `input` is after ``input.copy_(src)``."""
    return with_entries.body(input, ..., src)


def _written(input: RMSTensor, index: Any, value: RMSTensor | Number, name: str) -> NormedTensor:
    """The rule of `with_entries`; `name` is that of the value."""
    v: RMSTensor = value if isinstance(value, RMSTensor) else LinfTensor(scalar(math.fabs(value), input.norm_size), elem_dims=())
    found = _items(input.shape, index)
    if found is None:
        return _anywhere(input, index, value, name)
    items, layout = found
    counts = [1 if isinstance(i, int) else len(range(*i.indices(n))) for i, n in zip(items, input.shape, strict=True)]
    dims = input.elem_dims
    if not dims and isinstance(value, RMSTensor):
        own = ed.nontrivial(value.shape, value.elem_dims)
        dims = tuple(d for p in own if -p <= len(layout) and (d := layout[p]) is not None)
    inside = tuple(p - len(layout) for p, d in enumerate(layout) if d in dims)
    c = refined(v, inside) if isinstance(value, RMSTensor) else 1.0
    size = times(v.norm_size, c)
    if counts == list(input.shape):
        return rms(size, dims, sensitivity=_moves(value, 0.0, c, name))
    share = math.prod(counts[d] for d in dims) / max(ed.numel(input.shape, dims), 1)
    if not dims or share == 1:  # each element of the norm is written as a whole, or not at all
        result = rms(maximum([input.norm_size, size]), dims, sensitivity=_moves(value, 1.0, c, name))
    else:
        # of a tensor known by its largest entry, what is not written has its share only
        stays, comes = math.sqrt(1 - share) if isinstance(input, LinfTensor) else 1.0, math.sqrt(share)
        combined = root_sum_squares(times(input.norm_size, stays), size * comes)
        result = rms(combined, dims, sensitivity=_moves(value, stays, c * comes, name))
    return with_region_written(result, input, region_of(input.shape, items))


def _whole_dims(input: torch.Tensor, index: Any) -> tuple[int, ...]:
    """The last dimensions of a tensor, of which an index with tensors names all entries or none: they are the value's last ones too."""
    given = list(index) if isinstance(index, tuple) else [index]
    tensors = {i: torch.as_tensor(item) for i, item in enumerate(given) if isinstance(item, torch.Tensor | list)}
    masks = {i: t.ndim for i, t in tensors.items() if t.dtype in (torch.bool, torch.uint8)}
    counts = [
        0 if item is None or item is Ellipsis or isinstance(item, bool) else masks.get(i, 1) for i, item in enumerate(given)
    ]
    last = max((i for i, item in enumerate(given) if not (item is Ellipsis or _is_whole(item))), default=-1)
    is_open = any(item is Ellipsis for item in given[: last + 1])
    named = input.ndim - sum(counts[last + 1 :]) if is_open else sum(counts[: last + 1])
    return tuple(range(named - input.ndim, 0))


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _anywhere(input: RMSTensor, index: Any, value: RMSTensor | Number, name: str) -> RMSTensor:
    """Where tensors say which entries are written, perhaps all are: with the value's norm where it is that of whole parts, or its largest entry."""
    if isinstance(value, RMSTensor):
        own = ed.nontrivial(value.shape, value.elem_dims)
        dims = input.elem_dims or own
        if dims and set(dims) <= set(_whole_dims(input, index)):
            c = refined(value, dims)
            size = maximum([input.norm_size, times(value.norm_size, c)])
            return rms(size, dims, sensitivity=_moves(value, 1.0, c, name))
        v, c = as_kind(value, LinfTensor, ())
        size = v.norm_size
    else:
        size, c = scalar(math.fabs(value), input.norm_size), 1.0
    combined = root_sum_squares(input.norm_size, size) if input.elem_dims else maximum([input.norm_size, size])
    return rms(combined, input.elem_dims, sensitivity=_moves(value, 1.0, c, name))


def _moves(value: RMSTensor | Number, of_input: float, of_value: float, name: str) -> dict[str, float]:
    return {"input": of_input, name: of_value} if isinstance(value, RMSTensor) else {"input": of_input}


@with_entries.register_norm
def _with_entries(input: RMSTensor, index: Any, value: RMSTensor | int | float) -> NormedTensor:
    """x with v in the place of some entries: w of the N that the norm runs over.

    Value:       sqrt(n^2 + (w / N) v^2), v over the same dimensions (approached: x elsewhere); max(n, v) from the largest entry, and where
                 the norm runs over none of the dimensions that are cut; v alone where every entry is written.  An x known by its largest
                 entry is taken over the dimensions of v: sqrt((1 - w / N) n^2 + (w / N) v^2).  Named by tensors any may be written:
                 max(n, v) where the norm runs over last dimensions that are named whole (rows), else v is its largest entry
    Sensitivity: the slopes of these: 1 to x or sqrt(1 - w / N) (0 where every entry is written), sqrt(w / N) or 1 to v
    Gap:         by tensors, v by its largest entry may be written nowhere
    """
    return _written(input, index, value, "value")


with_entries.register_norm(annotated(_with_entries, index=torch.Tensor | list[torch.Tensor]), allow_plain_tensors="constant")


@copied.register_norm
def _copied(input: RMSTensor, src: RMSTensor, non_blocking: bool = False) -> NormedTensor:
    """v in the place of x.  Value |v|, sensitivity 0 to x and 1 to v; v is broadcast to x's shape."""
    return _written(input, ..., src, "src")
