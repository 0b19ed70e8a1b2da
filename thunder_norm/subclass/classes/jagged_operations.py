"""Operations on jagged nested tensors that run in another way while a trace is acquired, with the same numbers.

Torch's own copy gradients into views of zeros (`unbind`, `chunk`, an index), have no gradient (`split`), or make a nested tensor of
another layout, which no fake can be (attention on a CPU).  Here they are written in differentiable operations on the values,
under the names that torch's functions give their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from thunder_norm.subclass.classes import jagged, jagged_attention


def instead_of(fn: Callable, args: tuple, kwargs: dict) -> Callable:
    """What to run for `fn` on these fakes: itself, unless it is one of those above and a jagged nested tensor takes part."""
    own = _instead().get(fn) if callable(getattr(fn, "__hash__", None)) else None
    is_about_jagged = own is not None and any(jagged.is_jagged_class(type(v)) for v in tree_leaves((args, kwargs)))
    return functools.partial(own, fn) if is_about_jagged else fn


def _unbind(fn: Callable, input: torch.Tensor, dim: int = 0) -> Any:
    if dim not in (0, -input.dim()):
        return fn(input, dim)
    values, along = input.values(), input._ragged_idx - 1
    if input.lengths() is None:
        return torch.split(values, input.offsets().diff().tolist(), dim=along)
    places = zip(input.offsets().tolist(), input.lengths().tolist(), strict=False)  # there is one offset more
    return tuple([values.narrow(along, start, length) for start, length in places])


def _select(fn: Callable, input: torch.Tensor, dim: int, index: int) -> Any:
    return fn(input, dim, index) if dim not in (0, -input.dim()) else _unbind(torch.unbind, input)[index]


def _getitem(fn: Callable, x: torch.Tensor, index: Any) -> Any:
    first, *rest = index if type(index) is tuple else (index,)
    if type(first) is not int:
        return fn(x, index)
    part = _unbind(torch.unbind, x)[first]
    return part[tuple(rest)] if rest else part


def _chunk(fn: Callable, input: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    along = _dimension_of_values(input, dim)
    if along is not None:
        return tuple([_like(input, part) for part in input.values().chunk(chunks, along)])
    if dim not in (0, -input.dim()) or input._ragged_idx != 1 or input.lengths() is not None:
        return fn(input, chunks, dim)
    lengths = input.offsets().diff().chunk(chunks)
    parts = input.values().split([sum(part.tolist()) for part in lengths])
    offsets = [F.pad(part.cumsum(0), (1, 0)) for part in lengths]
    return tuple([torch.nested.nested_tensor_from_jagged(v, o) for v, o in zip(parts, offsets, strict=True)])


def _split(fn: Callable, x: torch.Tensor, split_size: int | Sequence[int], dim: int = 0) -> Any:
    along = _dimension_of_values(x, dim)
    if along is None or x._ragged_idx != 1 or x.lengths() is not None:
        return fn(x, split_size, dim)
    return tuple([_like(x, part) for part in x.values().split(split_size, along)])


def _split_into(fn: Callable, tensor: torch.Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Any:
    """``torch.split``, whose parameters have other names than the method's."""
    return _split(fn, tensor, split_size_or_sections, dim)


def _dimension_of_values(x: torch.Tensor, dim: int) -> int | None:
    """Which dimension of the values is `dim`, if it is neither that of the batch nor the ragged one."""
    dim = dim + x.dim() if dim < 0 else dim
    return None if dim in (0, x._ragged_idx) or not 0 < dim < x.dim() else dim - 1


def _like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths as view

    extremes = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
    return view(values, x.offsets(), x.lengths(), ragged_idx=x._ragged_idx, **extremes)


@functools.cache
def _instead() -> dict[Any, Callable]:
    both = {"unbind": _unbind, "select": _select, "chunk": _chunk, "split": _split}
    found: dict[Any, Callable] = {getattr(owner, name): own for name, own in both.items() for owner in (torch, torch.Tensor)}
    return found | {
        torch.split: _split_into,
        torch.Tensor.__getitem__: _getitem,
        F.scaled_dot_product_attention: jagged_attention.attention,
    }
