"""Which results were computed twice, by the same operation from the same tensors.

    top = torch.maximum(f + m, i)
    decay, gain = torch.exp(f + m - top), torch.exp(i - top)

Both ``f + m`` are other tensors with the same numbers and the same claims.  Arithmetic, functions of entries and changes of their places are numbered by what they compute
(value numbering), beside the tensors that hold the numbers; what is written into is no longer what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.context import current_environment
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor


class _Value:
    """The numbers of a tensor that was given, or what an operation makes of others and of numbers; `kept`: what its key has the ids of."""

    __slots__ = ("__weakref__", "is_made", "kept")

    def __init__(self, is_made: bool, kept: Any = None):
        self.is_made, self.kept = is_made, kept


_values: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by the tensor that holds it: how often that had been written into, it, and claims
_made: weakref.WeakValueDictionary[tuple, _Value] = weakref.WeakValueDictionary()  # by operation and arguments


_Claims = tuple[torch.Tensor | None, torch.Tensor | None]  # norm_size and perturbation_size


def made_as(t: torch.Tensor, claims: _Claims) -> _Value | None:
    """What an operation computed that a tensor holds, if its result had these claims: the same for what computes it again."""
    held = _values.get(t)
    if held is None or held[0] != current_environment().writes_into(t) or not held[1].is_made:
        return None
    return held[1] if all(a is b for a, b in zip(held[2], claims, strict=True)) else None


def moves_by(x: NormedTensor, moved: torch.Tensor) -> None:
    """Have a result of an operation another perturbation_size, which is the same number."""
    held = _values.get(x.backing)
    if held is not None and all(a is b for a, b in zip(held[2], (x.norm_size, x.perturbation_size), strict=True)):
        _values[x.backing] = (*held[:2], (x.norm_size, moved))
    x.perturbation_size = moved


def _held_by(t: torch.Tensor) -> _Value:
    held, writes = _values.get(t), current_environment().writes_into(t)
    if held is None or held[0] != writes:
        held = _values[t] = writes, _Value(is_made=False), (None, None)
    return held[1]


def _part(x: Any) -> tuple[Any, Any]:
    """An argument as a part of a key, and what is kept for it: of what was given, the claims that its user may have made himself."""
    if not isinstance(x, torch.Tensor):
        return _plain(x), None
    if not isinstance(x, NormedTensor):
        value = _held_by(x)
        return value, value
    made = made_as(x.backing, (x.norm_size, x.perturbation_size))
    if made is not None:
        return (made, type(x), x.elem_dims), made
    value = _held_by(x.backing)
    return (value, type(x), x.elem_dims, id(x.norm_size), id(x.perturbation_size)), (value, x.norm_size, x.perturbation_size)


def _plain(x: Any) -> Any:
    """An argument that is no tensor, or what stands for it and can be a key; sizes and places in lists, slices."""
    if isinstance(x, list | tuple):
        return (type(x), *map(_plain, x))
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    return type(x), x  # an index of True is another than 1


_PLAIN = (int, float, torch.dtype, torch.device, torch.memory_format, type(None), type(Ellipsis))


def _is_plain(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return all(map(_is_plain, (x.start, x.stop, x.step))) if isinstance(x, slice) else isinstance(x, _PLAIN)


def note(op: Callable) -> Callable[[tuple, Mapping[str, Any], Any], None]:
    """What numbers the results of an operation."""

    def rule(args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
        given = (*args, *(v for _, v in sorted(kwargs.items())))
        if not isinstance(out, NormedTensor) or not all(isinstance(v, torch.Tensor) or _is_plain(v) for v in given):
            return
        if out.backing.is_inference():  # of these nobody counts the writes
            return
        parts = [_part(v) for v in given]
        if op in _SYMMETRIC and not kwargs and len(parts) == 2:
            parts.sort(key=lambda part: hash(part[0]))
        key = (op, out.dtype, len(args), *sorted(kwargs), *(part for part, _ in parts))  # autocast chooses the dtype
        value = _made.get(key)
        if value is None:
            value = _made[key] = _Value(True, [kept for _, kept in parts])
        writes = current_environment().writes_into(out.backing)
        _values[out.backing] = writes, value, (out.norm_size, out.perturbation_size)

    return rule


_NOTED = (
    torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.neg, torch.exp, torch.log, torch.square, torch.abs, torch.relu, torch.sqrt,
    torch.sigmoid, torch.tanh, torch.reciprocal, F.softplus, F.logsigmoid,
)  # fmt: skip
_SYMMETRIC = (torch.add, torch.mul)
_LAID_OUT = (
    torch.unsqueeze, torch.squeeze, torch.Tensor.__getitem__, torch.transpose, torch.permute, torch.t, torch.movedim, torch.Tensor.view,
    torch.reshape, torch.flatten, torch.Tensor.expand, torch.broadcast_to, torch.Tensor.repeat, torch.clone, torch.Tensor.contiguous,
    torch.Tensor.to, torch.Tensor.float, torch.Tensor.double,
)  # fmt: skip
for _op in (*_NOTED, *_LAID_OUT):
    normed_op(_op).register_condition(note(_op))
