"""Tensors that a program makes of numbers alone, given where torch takes numbers: sizes, positions, ends of slices.

``x.narrow(0, torch.tensor(1), 2)`` decides nothing that a trace does not know: the operation is given the number.  An index that Thunder
does not know is given as one that it knows, for which torch does the same: a list for a range, a mask of bools for one of bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.tracing.torch_functions import known_values
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, _interpret_call, wrap
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

_OF_NUMBERS = frozenset("arange zeros ones empty rand randn eye".split())
_OF_A_TENSOR = frozenset(
    "view reshape expand repeat narrow tensor_split unflatten new_zeros new_ones new_empty __getitem__ __setitem__".split()
)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is given such a tensor for a number; None for all others."""
    name = fn.name if isinstance(fn, Symbol) else getattr(fn, "__name__", "")
    place = 0 if name in _OF_NUMBERS else 1
    if name not in _OF_NUMBERS and name not in _OF_A_TENSOR:
        return None
    if not any(map(_is_looked_at, (*args[place:], *kwargs.values()))) or not _is_torchs(fn, name):
        return None
    number = {"__getitem__": functools.partial(_index, reads=True), "__setitem__": _index, "tensor_split": _positions}.get(
        name, _number
    )
    places = range(place, 2 if name == "__setitem__" else len(args))
    new = [_replaced(a, number) if i in places else a for i, a in enumerate(args)]
    named = {k: v if k == "input" else _replaced(v, number) for k, v in kwargs.items()}
    if all(a is b for a, b in zip((*new, *named.values()), (*args, *kwargs.values()), strict=True)):
        return None
    return lambda *_, **__: _interpret_call(fn, *new, **named)


def _is_torchs(fn: Callable, name: str) -> bool:
    return isinstance(fn, Symbol) or any(getattr(owner, name, None) is fn for owner in (torch, torch.Tensor, TensorProxy))


def _is_looked_at(value: Any) -> bool:
    value = value.value if isinstance(value, WrappedValue) else value
    if isinstance(value, slice):
        return any(map(_is_looked_at, (value.start, value.stop, value.step)))
    return any(map(_is_looked_at, value)) if type(value) in (list, tuple) else type(value) in (TensorProxy, range)


def _replaced(given: WrappedValue, number: Callable[[Any], Any]) -> WrappedValue:
    """The argument with numbers for the tensors in it; itself where there are none whose value is known."""
    if not _is_looked_at(given.value):
        return given
    new = number(given.value)
    if new is given.value:
        return given
    return wrap(new, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[given.provenance]))


def _number(value: Any, max_dims: int = 0) -> Any:
    """The number that a tensor of one holds, and those that are in a list or tuple."""
    value = value.value if isinstance(value, WrappedValue) else value
    if type(value) in (list, tuple):
        new = [_number(v) for v in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
    if type(value) is not TensorProxy or value.ndim > max_dims or not dtypes.is_exact_dtype(value.dtype):
        return value
    known = known_values.value_of(value)
    return value if known is None else known.tolist()


def _positions(value: Any) -> Any:
    return _number(value, 1)


def _index(value: Any, reads: bool = False) -> Any:
    """An index with numbers for the ends of slices and for tensors without dimensions: with them it is a view.

    One that reads may be a mask of bytes besides; torch has no such that write.
    """
    value = value.value if isinstance(value, WrappedValue) else value
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        new = [_number(v) for v in parts]
        return value if all(a is b for a, b in zip(new, parts, strict=True)) else slice(*new)
    if type(value) is tuple:
        new = tuple(_index(v, reads) for v in value)
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    if type(value) is range:
        return list(value)
    if type(value) is not TensorProxy or value.dtype is not dtypes.uint8:
        return _number(value) if type(value) is TensorProxy else value
    return ltorch.to(value, torch.bool) if reads else value
