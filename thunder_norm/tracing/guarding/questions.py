"""Guards of what a program asks Python about an object: its type, of which classes it is, which names it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from thunder_norm.tracing.guarding.classes import saying_themselves
from thunder_norm.tracing.guarding.guards import is_guarded, note, surroundings
from thunder.core.interpreter import WrappedValue
from thunder.core.proxies import Proxy, TensorProxy

_ASK_FOR_TYPES = (isinstance, type, callable)


def note_asked(fn: Callable, args: tuple[WrappedValue, ...]) -> None:
    """Note what `fn` says of its arguments, if it is such a question."""
    if not args:
        return
    if fn is dir and len(args) == 1 and not isinstance(args[0].value, Proxy):
        note(args[0], "names", None, dir(args[0].value))
    elif fn is inspect.signature and isinstance(args[0].value, FunctionType) and (met := surroundings()) is not None:
        met.note_function(args[0].value, ())
    elif fn is issubclass and len(args) == 2:
        _note_class(args[0].value)
        for cls in saying_themselves(args[1].value, "__subclasscheck__"):
            _note_answer(issubclass, (args[0].value, cls))
    elif fn in _ASK_FOR_TYPES:
        note(args[0], "type", None, type(args[0].value))
        if fn is isinstance and len(args) == 2:
            _note_class(type(args[0].value))
            _note_instance(args[0], args[1].value)


def _note_instance(asked: WrappedValue, classes: Any) -> None:
    """Note what classes say that say themselves which objects are theirs."""
    value = asked.value if asked.original_value is asked.nothing else asked.original_value
    for cls in saying_themselves(classes, "__instancecheck__"):
        if not is_guarded(asked):
            _note_answer(isinstance, (torch.empty(0) if isinstance(value, TensorProxy) else value, cls))
            continue
        try:
            is_one = isinstance(value, cls)
        except Exception:  # noqa: BLE001 - the program is told that too, or is one of a class before, which is noted (TypedDict)
            break
        note(asked, "instance", f"{cls.__qualname__} {id(cls)}", (cls, is_one))


def _note_class(cls: Any) -> None:
    if isinstance(cls, type) and (found := surroundings()) is not None:
        found.note_class(cls)


def _note_answer(function: Callable, given: tuple[Any, ...]) -> None:
    if (found := surroundings()) is not None:
        found.note_answer(function, given)
