"""Functions and methods of the program's that C code runs, which nobody interprets: of what they read no way is known."""

from __future__ import annotations

import builtins
import contextvars
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any

from thunder_norm.context_variables import setting
from thunder_norm.tracing.guarding.classes import LIBRARIES, in_classes, is_of_program
from thunder_norm.tracing.guarding.looked_into import look_into
from thunder.core.interpreter import WrappedValue

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not one of Python's own
_told: contextvars.ContextVar[Callable[..., None] | None] = contextvars.ContextVar("thunder_norm_run_unseen", default=None)


def telling(told: Callable[..., None]) -> AbstractContextManager[None]:
    """Have `told` told the functions, classes and objects whose code may run unseen: later calls are to find what that can reach."""
    return setting(_told, told)


def note(*running: Any) -> None:
    """Note functions, or objects and classes that have some."""
    told = _told.get()
    if told is not None and running:
        told(*running)


def note_methods(kind: type, names: Iterable[str]) -> None:
    """Note those of some methods that a class of the program's has."""
    if kind.__flags__ & _HEAP_TYPE:
        note(*(in_classes(kind.__mro__, name) for name in names if is_of_program(kind, name)))


def note_given(fn: Callable, args: tuple[WrappedValue, ...], kwargs: Mapping[str, WrappedValue]) -> None:
    """Note what a function or class in C is given to run."""
    values = (*args, *kwargs.values())
    if fn is builtins.__build_class__:  # the body of the class, what its bases say of it, and what objects in it do
        note(*(a.value for a in values if isinstance(a.value, FunctionType | type)))
    elif isinstance(fn, type) and issubclass(fn, type) and len(args) > 2:
        note(*args[1].value, *(v for v in args[2].value.values() if _has_code(v)))
    elif _is_in_c(getattr(fn, "__module__", None) or "builtins"):  # json's, say
        note(*(a.value for a in look_into(values) if _has_code(a.value)))


def is_of_c(fn: Any) -> bool:
    """Whether an object that is called is of a class of a module in C."""
    return _is_in_c(type(fn).__module__)


@functools.lru_cache(maxsize=1024)
def _is_in_c(module: str) -> bool:
    """Whether a module of Python's library has no text; what `builtins` has is known."""
    found = sys.modules.get(module)
    return (
        found is not None
        and module != "builtins"
        and module in sys.stdlib_module_names
        and not str(getattr(found, "__file__", "")).endswith(".py")
    )


def _has_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType) or (
        type(value).__flags__ & _HEAP_TYPE != 0 and type(value).__module__.partition(".")[0] not in LIBRARIES
    )
