"""Conversions that run methods of the program's objects: ``int(o)``, ``float(o)``, ``str(o)``, ``f"{o}"``.

Thunder calls them as functions in C, and nothing guards what the methods read.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, interpreter_needs_wrap, wrap_const
from thunder.core.proxies import Proxy, TensorProxy

_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
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
    if fn is format and args and not kwargs:
        return _formatting(*args)
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


# -- texts --------------------------------------------------------------------------------------------------------------------

_TEXTS = frozenset(map(id, (str, repr, ascii, format, str.format, str.format_map, str.__mod__)))
_WRITTEN = f"<{TensorProxy.__name__}("  # as it writes itself


def written_out(fn: Callable) -> Callable | None:
    """What to call instead of a function that writes values out, where nothing says what they are: a tensor may be deep inside of them."""
    return functools.partial(_without_proxies, fn) if id(fn) in _TEXTS else None


def _without_proxies(fn: Callable, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for such a function.

    Raises:
        DataDependentError: what it writes says what stands for a tensor.
    """
    # what `__new__` is given is looked into, as of any function in C
    run = functools.partial(thunders._interpret_call, str.__new__, wrap_const(str)) if fn is str else interpreter_needs_wrap(fn)
    text = run(*args, **kwargs)
    if text is not _EXCEPTION_RAISED and type(text.value) is str and _WRITTEN in text.value:
        raise data_dependent("the text of an object that holds it")
    return text


# -- formatting ---------------------------------------------------------------------------------------------------------------

_handlers = thunders._default_opcode_handler_map
_CONVERSIONS = (None, str, repr, ascii)
_HAS_SPECIFICATION = 4
_FORMATTING = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")  # the first up to Python 3.12


def _formatting(value: WrappedValue, specification: WrappedValue | None = None) -> Callable | None:
    """What to call instead of `format`, as `lookaside` says: a class without ``__format__`` is asked for its string."""
    mro = type(value.value).__mro__[:-1]
    if issubclass(type(value.value), Proxy):
        return None
    found = in_classes(mro, "__format__", None)
    if isinstance(found, FunctionType):
        guards.note_attribute(value, "__format__")
        given = wrap_const("") if specification is None else specification
        return lambda *_: thunders._interpret_call(wrap_const(found), value, given)
    is_string = found is None and (specification is None or specification.value == "")
    return (lambda *_: thunders._interpret_call(str, value)) if is_string else None


def _format_of(opname: str) -> Any:
    """The handler of a part of an f-string."""

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
        flags = inst.arg or 0 if opname == "FORMAT_VALUE" else _HAS_SPECIFICATION * (opname == "FORMAT_WITH_SPEC")
        specification = (stack.pop_wrapped(),) if flags & _HAS_SPECIFICATION else ()
        found = stack.pop_wrapped()
        if (conversion := _CONVERSIONS[flags & 3]) is not None:
            found = thunders._interpret_call(conversion, found)
        if found is not _EXCEPTION_RAISED:
            found = thunders._interpret_call(format, found, *specification)
        return found if found is _EXCEPTION_RAISED else stack.append(found)

    return handler


REPLACEMENTS = tuple(
    Replacement(
        _handlers, name, _format_of(name), "_format_value_handler and its likes: value = stack.pop(), of which no guard knows"
    )
    for name in _FORMATTING
    if name in _handlers
)
