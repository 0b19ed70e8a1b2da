"""Jagged nested tensors (``torch.nested``, ``layout=torch.jagged``): what is particular to their class.

A jagged nested tensor holds `values`, in which the sequences lie one behind the other, the `offsets` at which they begin, and, where
there are holes, their `lengths`.  Its shape says ``j4`` where a length would be: an integer that is known by the tensor of offsets (of
lengths, where there are some), so that two nested tensors fit together if they hold one and the same.  What is kept of that here:

- which inputs hold the same is found again before a trace is used (`integer_values.IntegerValues.guards`);
- a result holds the offsets of the input that torch would have it hold, and so does a gradient;
- the shortest and the longest length, which the class keeps in the shapes of two tensors without elements, are numbers of its context.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch

from thunder_norm.tracing.translation import sizes

_MODULE = "torch.nested._internal.nested_tensor"  # torch imports it when it is first used
_EXTREMES = ("min_seqlen", "max_seqlen")
_identities = itertools.count(1 << 40)  # none that torch counts up to


def is_jagged_class(cls: type) -> bool:
    """Whether this is the class of jagged nested tensors."""
    return cls.__module__ == _MODULE and cls is sys.modules[_MODULE].NestedTensor


def taken_apart(x: torch.Tensor) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of its inner tensors, and its context."""
    names = ("_values", "_offsets") if x._lengths is None else ("_values", "_offsets", "_lengths")
    extremes = {name: None if (t := x._metadata_cache.get(name)) is None else int(t.shape[0]) for name in _EXTREMES}
    return names, {"ragged_idx": x._ragged_idx, **extremes}


def built(cls: type, inner: dict[str, torch.Tensor], ctx: dict[str, Any]) -> torch.Tensor:
    """The inverse of `taken_apart`; where the offsets are another's, so is the ragged length."""
    known = {name: torch.zeros(ctx[name], 0) for name in _EXTREMES if ctx[name] is not None}
    values, offsets, lengths = inner["_values"], inner["_offsets"], inner.get("_lengths")
    return cls(values, offsets=offsets, lengths=lengths, _ragged_idx=ctx["ragged_idx"], _metadata_cache=known)


def metadata(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Its shape in numbers, without how long all sequences are together, and how its values lie in memory."""
    values, along = x._values, x._ragged_idx - 1
    return (x._offsets.shape[0] - 1, *(-1 if d == along else n for d, n in enumerate(values.shape))), layout(values)


def sizes_at_hand(x: torch.Tensor) -> tuple[int, ...]:
    """Its shape in numbers, with the sum of all lengths in the place of the ragged one."""
    return x._offsets.shape[0] - 1, *sizes(x._values.shape)


def total_length(x: torch.Tensor) -> int | None:
    """How long all its sequences are together; None where that is 0 or 1, or its values have gaps in memory."""
    length = x._values.shape[x._ragged_idx - 1]
    return length if length > 1 and layout(x._values)[0] else None


def layout(values: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """Whether a tensor lies in memory without gaps, and then its dimensions from the outermost to the innermost, else its strides."""
    strides, step = values.stride(), 1
    order = tuple(sorted(range(values.dim()), key=lambda d: -strides[d]))
    for d in reversed(order):
        if strides[d] != step:
            return False, tuple(strides)
        step = step * values.shape[d]
    return True, order


def structure_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inner tensors that say where its sequences lie."""
    return {name: getattr(x, name) for name in taken_apart(x)[0][1:]}


def ragged_source(x: torch.Tensor) -> torch.Tensor:
    """The tensor by which its ragged length is known."""
    return x._offsets if x._lengths is None else x._lengths


def ragged_identity(x: torch.Tensor) -> int:
    """What its ragged length is known by, or that of nested tensors with these offsets: a number."""
    if is_jagged_class(type(x)):
        return x._size[x._ragged_idx].node.nested_int()
    return sys.modules[_MODULE].get_tensor_symint(x).node.nested_int()


def new_ragged() -> torch.SymInt:
    """A ragged length that is no other's."""
    from torch.nested._internal.nested_int import NestedIntNode

    return torch.SymInt(NestedIntNode(next(_identities), 1))


def prepare() -> None:
    """Have torch make the tensor that it passes along when it makes nested tensors: while fakes are made it would be one, and stay."""
    from torch.nested._internal.nested_tensor import _nt_view_dummy

    _nt_view_dummy()
