"""Lists and tuples that a program gives to torch's operations, as a trace can have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_norm.subclass.interpreting.operations import torch_callable
from thunder.core.interpreter import WrappedValue, wrap


def given_plainly(found: Any, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
    """Let an operation keep copies of lists of numbers, which the program may change afterwards, and lists and tuples for what derives from them.

    Thunder's trace prints a ``torch.Size`` as an object by a name that nobody defines, and its pytrees do not know named tuples.
    """
    if not callable(found) or not any(map(_is_copied, (*args, *kwargs.values()))) or torch_callable(fn) is None:
        return found
    return lambda *args, **kwargs: found(*map(_copied, args), **{k: _copied(v) for k, v in kwargs.items()})


def _is_copied(a: WrappedValue) -> bool:
    return (type(a.value) is list and all(type(v) is int for v in a.value)) or _holds_derived(a)


def _holds_derived(a: Any) -> bool:
    value = a.value if isinstance(a, WrappedValue) else a
    if type(value) in (list, tuple):
        return any(map(_holds_derived, value))
    return isinstance(value, list | tuple)


def _copied(a: WrappedValue) -> WrappedValue:
    return wrap(_as_plain(a.value), provenance=a.provenance) if _is_copied(a) else a


def _as_plain(value: Any) -> Any:
    value = value.value if isinstance(value, WrappedValue) else value
    return (list if isinstance(value, list) else tuple)(map(_as_plain, value)) if isinstance(value, list | tuple) else value
