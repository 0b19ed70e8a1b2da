"""Attributes, and calls of bound methods."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.native.elements import note_attribute
from thunder_norm.tracing.native.inner import native_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, do_raise, is_opaque, unwrap, wrap_const
from thunder.core.proxies import Proxy

_handlers = thunders._default_opcode_handler_map
_lookasides = thunders._default_lookaside_map
_original_getattribute = thunders._object_getattribute_lookaside
_original_dispatch = thunders._call_dispatch
_nothing = object()


def _getattribute(obj: Any, name: Any) -> Any:
    uobj, uname = unwrap(obj), unwrap(name)
    kind = type(uobj)
    if (
        not isinstance(obj, WrappedValue)
        or type(uname) is not str
        or isinstance(uobj, (type, super, Proxy, torch.Tensor))
        or thunders.DUNDER_PATTERN.match(uname)
    ):
        return _original_getattribute(obj, name)
    found = in_classes(kind.__mro__, uname, _nothing)
    descriptor = type(found)
    if descriptor is property or type(descriptor) is not type:
        return _original_getattribute(obj, name)
    get = _nothing if found is _nothing else getattr(descriptor, "__get__", _nothing)
    if get is not _nothing:
        if not is_opaque(get):
            return _original_getattribute(obj, name)
        if hasattr(descriptor, "__set__") or hasattr(descriptor, "__delete__"):
            return _got(get, found, uobj, kind)
    own = obj.attribute_wrappers.get("__dict__")
    if own is None:
        own = thunders._interpret_call(getattr, obj, wrap_const("__dict__"), wrap_const(_nothing))
    if own.value is not _nothing:
        if type(own.value) is not dict:
            return _original_getattribute(obj, name)
        value = own.value.get(uname, _nothing)
        if value is not _nothing:
            return value
    if get is not _nothing:
        return _got(get, found, uobj, kind)
    return found if found is not _nothing else do_raise(AttributeError(uname))


def _got(get: Any, descriptor: Any, obj: Any, kind: type) -> Any:
    try:
        return get(descriptor, obj, kind)
    except Exception as e:  # noqa: BLE001 - the program's
        return do_raise(e)


def _setattr(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    setter = thunders._interpret_call(getattr, wrap_const(type(obj.value)), wrap_const("__setattr__"))
    stored = thunders._interpret_call(setter, obj, name, value)
    if stored is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return stored
    note_attribute(obj, name, value)
    return wrap_const(None)


def _store_attr(inst: Any, /, stack: InterpreterStack, co: Any, **state: Any) -> Any:
    name = wrap_const(co.co_names[inst.arg])
    obj, value = stack.pop_wrapped(), stack.pop_wrapped()
    return thunders.check_signal(thunders._interpret_call(setattr, obj, name, value))


def _call_dispatch(compilectx: Any, runtimectx: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    called = unwrap(fn)
    if type(called) is not MethodType or hasattr(called, "__thunder_interpreter_orig_fn"):
        inner = native_of(called)
        found = None if inner is None else inner(called, *args, **kwargs)
        return _original_dispatch(compilectx, runtimectx, fn, *args, **kwargs) if found is None else found
    method = fn if isinstance(fn, WrappedValue) else wrap_const(fn)
    function = thunders._interpret_call(getattr, method, wrap_const("__func__"))
    owner = thunders._interpret_call(getattr, method, wrap_const("__self__"))
    return thunders._interpret_call(function, owner, *args, **kwargs)


REPLACEMENTS = (
    Replacement(
        thunders, "_object_getattribute_lookaside", _getattribute, "the same, with `getattr(type, '__get__')` interpreted"
    ),
    Replacement(_lookasides, setattr, _setattr, "`lambda typ, o, n, v: typ.__setattr__(o, n, v)` in _setattr_lookaside"),
    Replacement(_handlers, "STORE_ATTR", _store_attr, "impl in _store_attr_handler"),
    Replacement(thunders, "_call_dispatch", _call_dispatch, "_impl for bound methods"),
)
