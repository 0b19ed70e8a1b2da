"""Patterns of ``match``, of classes and of mappings, and ``isinstance`` where a class does not say which objects are its own.

For ``case Point(x=0)`` Thunder compares with all of ``__match_args__``, not with those that the pattern gives, ``case int(n)`` finds
nothing, and where a class does not match it leaves another value than None on the stack, which is taken for a match.
"""

from __future__ import annotations

import dis
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import asks_program, saying_themselves
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import Proxy

_handlers = thunders._default_opcode_handler_map
_MATCHES_ITSELF = 1 << 22  # in ``__flags__`` of a class, as of int and str: its one positional pattern is for the whole
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_MISSING = object()
_CHECKS = {isinstance: "__instancecheck__", issubclass: "__subclasscheck__"}


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call for an ``isinstance`` or ``issubclass`` that a program's own method answers, or that raises an error, as of a `TypedDict`.

    Thunder does not look into the method, and raises the error where no ``except`` of the program is.
    """
    if (check := look_up(_CHECKS, fn)) is None:
        return None
    if len(args) != 2 or not _may_be_asked(args[1].value):
        return lambda *given, **named: _misused(fn, given, named)
    classes = args[1].value
    if any(asks_program(cls, check) for cls in _each(classes)):
        answer = _of_any if not isinstance(classes, type) else _of_class if fn is isinstance else _under_class
        return lambda *given: thunders._interpret_call(answer, *given, wrap_const(fn))
    if isinstance(args[0].value, Proxy) or not any(saying_themselves(args[1].value, check)):
        return None
    try:
        fn(args[0].value, args[1].value)
    except Exception as e:  # noqa: BLE001 - whatever the class raises
        error = e
        return lambda *_: do_raise(error)
    return None


def _may_be_asked(classes: Any) -> bool:
    """Whether ``isinstance`` takes it for classes: one of torch's for a dtype (`torch.FloatTensor`) is an object that says it itself."""
    if isinstance(classes, type | tuple | types.UnionType) or typing.get_origin(classes) is typing.Union:
        return True
    try:
        isinstance(None, classes)
    except Exception:  # noqa: BLE001 - the program is about to meet it
        return False
    return True


def _misused(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
    """Python's error for a call of ``isinstance`` with other than an object and classes."""
    try:
        found = fn(*(a.value for a in args), **{name: v.value for name, v in kwargs.items()})
    except Exception as e:  # noqa: BLE001 - as Python says it
        return do_raise(e)
    return wrap_const(found)


def _each(classes: Any) -> Iterator[Any]:
    """Of what ``isinstance`` is given, each class."""
    is_union = typing.get_origin(classes) in (typing.Union, types.UnionType)
    if is_union or isinstance(classes, tuple):
        for cls in classes.__args__ if is_union else classes:
            yield from _each(cls)
    else:
        yield classes


def _of_any(asked: Any, classes: Any, ask: Callable) -> bool:
    """``isinstance`` or ``issubclass`` of several classes, in Python."""
    for cls in classes if isinstance(classes, tuple) else classes.__args__:
        if ask(asked, cls):
            return True
    return False


def _of_class(obj: Any, cls: type, _: Callable) -> bool:
    """``isinstance`` of a class, in Python."""
    return type(obj) is cls or bool(type(cls).__instancecheck__(cls, obj))


def _under_class(asked: type, cls: type, _: Callable) -> bool:
    """``issubclass`` of a class, in Python."""
    return bool(type(cls).__subclasscheck__(cls, asked))


def _class_handler(inst: dis.Instruction, /, stack: InterpreterStack, **_: Any) -> Any:
    by_name, cls, subject = stack.pop(), stack.pop_wrapped(), stack.pop_wrapped()
    matches = thunders._interpret_call(isinstance, subject, cls)
    if matches is _EXCEPTION_RAISED or not matches.value:
        return matches if matches is _EXCEPTION_RAISED else stack.append(wrap_const(None))
    try:
        is_itself, names = _attributes(cls.value, inst.arg or 0, by_name)
    except TypeError as e:
        return do_raise(e)
    found = thunders._interpret_call(_bound, subject, wrap_const(is_itself), *map(wrap_const, names))
    return found if found is _EXCEPTION_RAISED else stack.append(found)


def _attributes(cls: type, count: int, by_name: tuple[str, ...]) -> tuple[bool, list[str]]:
    """Which attributes ``case cls(...)`` asks for, with `count` patterns by position; and whether the one pattern is for the whole."""
    matched = getattr(cls, "__match_args__", None)
    if (surroundings := guards.surroundings()) is not None:
        surroundings.note_of_class(cls, "__match_args__")
    is_itself = matched is None and bool(cls.__flags__ & _MATCHES_ITSELF)
    matched = () if matched is None or not count else matched
    if type(matched) is not tuple:
        raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {type(matched).__name__})")
    allowed = 1 if is_itself else len(matched)
    if allowed < count:
        raise TypeError(f"{cls.__name__}() accepts {allowed} positional sub-pattern{'s'[: allowed != 1]} ({count} given)")
    names: list[str] = []
    for name in (*matched[:count], *by_name):
        if not isinstance(name, str):
            raise TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})")
        if name in names:
            raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}")
        names.append(name)
    return is_itself and count == 1, names


def _bound(subject: Any, is_itself: bool, *names: str) -> tuple[Any, ...] | None:
    """What a class pattern binds; None where an attribute is missing."""
    found = [subject] if is_itself else []
    for name in names:
        value = getattr(subject, name, _MISSING)
        if value is _MISSING:
            return None
        found.append(value)
    return tuple(found)


def _keys_handler(inst: dis.Instruction, /, stack: InterpreterStack, **_: Any) -> Any:
    keys, subject = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    found = thunders._interpret_call(_of_keys, subject, keys)
    return found if found is _EXCEPTION_RAISED else stack.append(found)


def _of_keys(subject: Any, keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    found = [subject.get(key, _MISSING) for key in keys]
    return None if any(value is _MISSING for value in found) else tuple(found)


REPLACEMENTS = (
    Replacement(_handlers, "MATCH_CLASS", _class_handler, "_match_class_handler, _match_class_impl: for attr_name in match_args"),
    Replacement(_handlers, "MATCH_KEYS", _keys_handler, "_match_keys_handler: _interpret_call_with_unwrapping(_match_keys_impl"),
)
