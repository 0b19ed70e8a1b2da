"""``__new__`` of lists, dicts and tuples for classes derived from them, and classes that a program makes.

Thunder makes an object of such a class by calling the class, or its ``__new__``, once more: natively, with other arguments than the
program's.  A constructor written in Python then runs twice, or fails, or what it returned the second time is taken.  Here the class that
is asked makes the object, as Python has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    _tuple_new_provenance_tracking_lookaside,
    _type_lookaside,
    do_raise,
    populate_attribute_wrapper,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.proxies import Proxy


def _native(base: type, cls: WrappedValue) -> Any:
    """An empty object of a class, or the signal of Python's error for what is no class derived from `base`."""
    try:
        return base.__new__(cls.value)
    except TypeError as e:
        return do_raise(e)


def _register(base: type, wrapped: Callable[[Any, WrappedValue], Any]) -> None:
    @instead_of(base.__new__)
    def new(cls: WrappedValue, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        made = _native(base, cls)
        return made if made is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrapped(made, cls)


# how Thunder wraps what it makes
_register(list, lambda made, cls: wrap_const(made))
_register(dict, lambda made, cls: wrap(made, provenance=ProvenanceRecord(PseudoInst.NEW, inputs=[cls.provenance])))


@instead_of(tuple.__new__)
def _new_tuple(cls: WrappedValue, iterable: WrappedValue | None = None) -> Any:
    made = _native(tuple, cls)
    if made is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return made
    iterable = wrap_const(()) if iterable is None else iterable
    if stored.has_own_methods(type(iterable.value)):  # Thunder takes the elements of any list or tuple by index
        listed: Any = _interpret_call(list, iterable)
        if listed is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return listed
        iterable = listed
    if cls.value is tuple or _has_fields_alone(cls.value):
        return _tuple_new_provenance_tracking_lookaside(cls, iterable)
    plain = _tuple_new_provenance_tracking_lookaside(wrap_const(tuple), iterable)
    if plain is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return plain
    found = wrap(tuple.__new__(cls.value, plain.value), provenance=plain.provenance)
    found.item_wrappers = plain.item_wrappers
    return found


@instead_of(type.__call__)
def _instance(cls: WrappedValue, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """``cls(...)``: what ``__new__`` makes is initialized only if it is an instance of the class."""
    made = _interpret_call(cls.value.__new__, cls, *args, **kwargs)
    if made is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not _is_instance(made, cls.value):
        return made
    if isinstance(made.value, Proxy):
        initialize = _interpret_call(getattr, made, wrap_const("__init__"))
        if initialize is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return initialize
        populate_attribute_wrapper(initialize, "__self__", made)
        done = _interpret_call(initialize, *args, **kwargs)
    else:  # of its class: a generic alias (`Callable[[int], str]`) answers for the class that it is of
        done = _interpret_call(type(made.value).__init__, made, *args, **kwargs)
    if done is INTERPRETER_SIGNALS.EXCEPTION_RAISED or (said := unwrap(done)) is None:
        return done if done is INTERPRETER_SIGNALS.EXCEPTION_RAISED else made
    kind = _interpret_call(type, done).value if isinstance(said, Proxy) else type(said)
    return do_raise(TypeError(f"__init__() should return None, not {kind.__name__!r}"))


def lookaside(fn: Any) -> Callable | None:
    """What to call instead of ``super().__call__`` of a metaclass, which is a method of C with the class in it."""
    if type(fn) is not MethodWrapperType or fn.__name__ != "__call__" or not isinstance(fn.__self__, type):
        return None
    return functools.partial(_instance, wrap_const(fn.__self__))


@instead_of(type)
def _type(value: WrappedValue, *of_new: WrappedValue, **options: WrappedValue) -> Any:
    """The class of an object, and with a name, bases and a dict a new class, which Thunder has no answer to."""
    if not of_new:
        return _type_lookaside(value)
    try:
        return wrap_const(type(*map(unwrap, (value, *of_new)), **{k: unwrap(v) for k, v in options.items()}))
    except Exception as e:  # noqa: BLE001 - whatever ``__init_subclass__`` raises
        return do_raise(e)


def _is_instance(made: WrappedValue, cls: type) -> bool:
    """Whether its class is derived from `cls`: `nn.Parameter` says of any tensor that is marked as one that it is an instance."""
    kind = _interpret_call(type, made).value if isinstance(made.value, Proxy) else type(made.value)
    return cls in kind.__mro__


def _has_fields_alone(kind: type) -> bool:
    """Whether a class is what `collections.namedtuple` or `typing.NamedTuple` makes, of which Thunder writes the constructor into traces."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and hasattr(kind, "_make")
