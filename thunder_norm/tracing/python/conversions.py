"""Conversions that run methods of the program's objects: ``int(o)``, ``float(o)``, ``str(o)``.

Thunder calls them as functions in C, and nothing guards what the methods read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType

from thunder_norm.tracing import guards
from thunder_norm.tracing.classes import in_classes
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, wrap_const
from thunder.core.proxies import Proxy

# the methods that Python tries, in order
_METHODS: dict[Callable, tuple[str, ...]] = {
    int: ("__int__", "__index__"),
    float: ("__float__", "__index__"),
    complex: ("__complex__", "__float__", "__index__"),
    operator.index: ("__index__",),
    str: ("__str__", "__repr__"),
    repr: ("__repr__",),
}


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is such a conversion of an object of a user's class; None for all others."""
    if len(args) != 1 or kwargs or not (isinstance(fn, type) or fn is repr or fn is operator.index) or fn not in _METHODS:
        return None
    mro = type(args[0].value).__mro__[:-1]
    if issubclass(type(args[0].value), Proxy):
        return None
    name = next((name for name in _METHODS[fn] if in_classes(mro, name, None) is not None), None)
    found = None if name is None else in_classes(mro, name)
    if name is None or not isinstance(found, FunctionType):
        return None
    guards.note_attribute(args[0], name)
    return lambda value: thunders._interpret_call(_converted, wrap_const(fn), wrap_const(found), value)


def _converted(fn: Callable, method: Callable, value: object) -> object:
    found = method(value)
    return found if fn is repr else fn(found)
