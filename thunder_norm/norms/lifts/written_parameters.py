"""What a program writes into tensors that it made of parameters: ``b = w.clone(); b[2:4].zero_()``.

What is written is computed out of place.  From then on the result stands for the tensor, and the same part of it for each tensor that
shares its memory; the tensors themselves, and what was made of them before, stay what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_norm.core import in_place, registry
from thunder_norm.core.tensors import describe
from thunder_norm.core.views import Layout, Run, ways_through
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.op_names import op_name
from thunder_norm.rules.layout.writing import with_entries
from thunder_norm.subclass.acquiring.writes import has_memory

# They change how a tensor is seen, not what is in the memory that it shares.
_OF_SHAPES = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ detach_ as_strided_".split())


class Write(NamedTuple):
    """An operation in place, and the one that computes the same out of place, with its arguments."""

    func: Callable
    operation: Callable
    args: tuple
    kwargs: dict


def write_of(func: Callable, args: tuple, kwargs: dict) -> Write | None:
    """A call as what it writes; None if it does not work in place, or no operation with a norm rule computes the same out of place."""
    found = in_place.out_of_place(func, args, kwargs)
    if found is None or found[0] is None or getattr(func, "__name__", "") in _OF_SHAPES:
        return None
    if not args:  # the target by name
        return None
    op = registry.find_op(registry.key_of(found[0]))
    if op is None or not op.rules:
        return None
    if func is torch.Tensor.__setitem__:
        found = found[0], (args[0], _without_dots(args[1], args[0].ndim), *args[2:]), kwargs
    return Write(func, *found)


def _without_dots(index: Any, ndim: int) -> Any:
    """An index with as many slices as its ``...`` stands for, which no operation of a trace takes."""
    items = index if isinstance(index, tuple) else (index,)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if at is None:
        return index
    named = sum(getattr(item, "ndim", 1) if _is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis)
    return (*items[:at], *[slice(None)] * (ndim - named), *items[at + 1 :])


def _is_mask(item: Any) -> bool:
    return "bool" in str(getattr(item, "dtype", ""))


def sharing_memory(target: torch.Tensor, known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the tensors that have their entries where the target has its own, each once and without it."""
    if not has_memory(target):
        return []
    storage = target.untyped_storage()._cdata
    found = (t for t in known if t is not target and has_memory(t) and t.untyped_storage()._cdata == storage)
    return list({id(t): t for t in found}.values())


def values_after(
    write: Write,
    tensors: Sequence[torch.Tensor],
    handles: Sequence[Any],
    run: Run,
    tensor_of: Callable[[Any], torch.Tensor],
    location: str | None,
) -> list[Any]:
    """What stands for each of the tensors in one memory after a write into the first.

    Args:
        write: what is done.
        tensors: the target, and the others in its memory.
        handles: what the program's operations take for them.
        run: runs an operation on handles.
        tensor_of: the tensor that a handle stands for.
        location: the user's line.

    Raises:
        UnsupportedOpError: the target would become one of another shape or type, or is not, with the others, part of one of them.
    """
    ways = ways_through([Layout.of(t) for t in tensors])
    if ways is None:
        raise refused(write.func, tensors[0], location, "it shares its memory with tensors that are not all parts of one")
    up, below = ways
    value = run(write.operation, *write.args, **write.kwargs)
    if (tuple(value.shape), value.dtype) != (tuple(handles[0].shape), handles[0].dtype):
        raise refused(write.func, tensors[0], location, "its shape or its dtype would be another one")
    for place, part in up:
        value = part.put_into(handles[place], value, with_entries, run)
    found = [functools.reduce(lambda now, part: part.taken_from(now, run), down, value) for down in below]
    if len({tensor_of(new).untyped_storage()._cdata for new in found}) > 1:
        raise refused(
            write.func, tensors[0], location, "it shares its memory with tensors that are no views of what it would become"
        )
    return found


def refused(func: Callable, target: torch.Tensor, location: str | None, why: str) -> UnsupportedOpError:
    """The error for a write that is not followed, into a tensor made from parameters or of them: a norm would silently stay what it was."""
    return UnsupportedOpError(
        with_details(
            f"in-place {op_name(func)} on a tensor made from parameters",
            called_with=describe(target),
            at=location,
            why=why,
            instead="use the out-of-place operation and assign its result",
        )
    )
