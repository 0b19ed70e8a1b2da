"""Attributes, variables of closures, and calls of bound methods."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes, is_of_program
from thunder_norm.tracing.native.builtins import truth
from thunder_norm.tracing.native.elements import note_attribute
from thunder_norm.tracing.native.inner import native_of, unbound
from thunder_norm.tracing.python import methods_in_c
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.torch_functions import class_members
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import (
    InterpreterStack,
    Py_NULL,
    WrappedValue,
    check_and_append,
    do_raise,
    is_opaque,
    unwrap,
    wrap_const,
)
from thunder.core.proxies import Proxy, TensorProxy

_handlers = thunders._default_opcode_handler_map
_lookasides = thunders._default_lookaside_map
_original_getattribute = thunders._object_getattribute_lookaside
_of_jit = jit_ext._general_jit_lookaside_map
_original_dispatch = methods_in_c.call_dispatch
_original_load_deref = _handlers["LOAD_DEREF"]
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_OF_THUNDER = "__thunder_interpreter_orig_fn"
_IS_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_nothing = object()


def _getattribute(obj: Any, name: Any) -> Any:
    uobj, uname = unwrap(obj), unwrap(name)
    kind = type(uobj)
    if (
        not isinstance(obj, WrappedValue)
        or type(uname) is not str
        or isinstance(uobj, (Proxy, torch.Tensor))
        or (thunders.DUNDER_PATTERN.match(uname) and not isinstance(uobj, (type, super)))
    ):
        return _original_getattribute(obj, name)
    if isinstance(uobj, (type, super)):
        try:
            return getattr(uobj, uname)
        except Exception as e:  # noqa: BLE001 - the program's
            return do_raise(e)
    found = in_classes(kind.__mro__, uname, _nothing)
    descriptor = type(found)
    if isinstance(found, property) and descriptor.__get__ is property.__get__:
        return _of_property(obj, found, uname)
    if type(descriptor) is not type:
        return _original_getattribute(obj, name)
    get = _nothing if found is _nothing else getattr(descriptor, "__get__", _nothing)
    if get is not _nothing:
        if not is_opaque(get):
            return _original_getattribute(obj, name)
        if hasattr(descriptor, "__set__") or hasattr(descriptor, "__delete__"):
            return _got(get, found, uobj, kind)
    own = obj.attribute_wrappers.get("__dict__")
    if own is None:
        own = _attributes(obj)
    if own.value is not _nothing:
        if type(own.value) is not dict:
            return _original_getattribute(obj, name)
        value = own.value.get(uname, _nothing)
        if value is not _nothing:
            return value
    if get is not _nothing:
        return _got(get, found, uobj, kind)
    return found if found is not _nothing else do_raise(no_attribute(uobj, uname))


def no_attribute(obj: Any, name: str) -> AttributeError:
    """Python's error, which Thunder's names the attribute alone in."""
    kind = type(obj)
    # a class in C goes by its whole name
    called = (
        kind.__name__
        if kind.__flags__ & _IS_MADE_BY_PYTHON or kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__name__}"
    )
    return AttributeError(f"{called!r} object has no attribute {name!r}", name=name, obj=obj)


def _of_property(obj: WrappedValue, found: property, name: str) -> Any:
    """What a property computes; Thunder takes what the object itself has under its name, if the property has no setter."""
    if found.fget is None:
        return do_raise(AttributeError(f"property {name!r} of {type(obj.value).__qualname__!r} object has no getter"))
    is_found = found.fset is not None or found.fdel is not None or name not in (getattr(obj.value, "__dict__", None) or ())
    if is_found and type(found) is property:
        return _original_getattribute(obj, wrap_const(name))
    return thunders._interpret_call(wrap_const(found.fget), obj)


def _attributes(obj: WrappedValue) -> Any:
    """``obj.__dict__``, or _nothing if it has none."""
    held = getattr(obj.value, "__dict__", _nothing)
    if type(held) is not dict:
        return thunders._interpret_call(getattr, obj, wrap_const("__dict__"), wrap_const(_nothing))
    guards.note_attribute(obj, "__dict__")
    return thunders.wrap_attribute(held, obj, wrap_const("__dict__"))


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


def _load_deref(inst: Any, /, stack: InterpreterStack, frame: Any, **state: Any) -> Any:
    cell = frame.localsplus[inst.arg]
    known = cell.attribute_wrappers.get("cell_contents") if type(unwrap(cell)) is CellType else None
    if known is not None and (known.value is (held := _contents(cell.value)) or known.original_value is held):
        return check_and_append(stack, thunders.load_deref_callback(known, frame.get_localsplus_name(inst.arg)))
    return _original_load_deref(inst, stack=stack, frame=frame, **state)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none
        return _nothing


def _load_method(obj: WrappedValue, name: WrappedValue, stack: InterpreterStack) -> Any:
    method = thunders._interpret_call(getattr, obj, name)
    if method is _EXCEPTION_RAISED:
        return method
    if getattr(method.value, "__self__", _nothing) is obj.value:
        thunders.populate_attribute_wrapper(method, "__self__", obj)
    first, second = unbound(method) if type(method.value) is MethodType else (wrap_const(Py_NULL()), method)
    stack.append(first)
    stack.append(second)
    return None


def _call_dispatch(compilectx: Any, runtimectx: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    if fn is getattr:  # there always is a lookaside
        lookaside = compilectx.lookaside(fn, *args)
        return lookaside if lookaside is _EXCEPTION_RAISED else lookaside(*args)
    if fn is bool and _of_jit.get(bool) is jit_ext._general_jit_bool_lookaside and (answer := truth(args[0])) is not None:
        return answer
    called = unwrap(fn)
    if type(called) is not MethodType or hasattr(called, _OF_THUNDER):
        if not callable(called) and not isinstance(called, Proxy):
            return do_raise(TypeError(f"{type(called).__name__!r} object is not callable"))
        if isinstance(called, TensorProxy):
            method = class_members.call_of(fn if isinstance(fn, WrappedValue) else wrap_const(fn))
            return method if method is _EXCEPTION_RAISED else thunders._interpret_call(method, *args, **kwargs)
        # Thunder would look for a name that functions of its own have
        if type(called) not in _FUNCTIONS and _answers_any_name(called):
            call = thunders._interpret_call(getattr, wrap_const(type(called)), wrap_const("__call__"))
            return call if call is _EXCEPTION_RAISED else thunders._interpret_call(call, fn, *args, **kwargs)
        inner = native_of(called)
        found = None if inner is None else inner(called, *args, **kwargs)
        return _original_dispatch(compilectx, runtimectx, fn, *args, **kwargs) if found is None else found
    function, owner = unbound(fn if isinstance(fn, WrappedValue) else wrap_const(fn))
    return thunders._interpret_call(function, owner, *args, **kwargs)


def _answers_any_name(called: Any) -> bool:
    """Whether the class of an object that is called, one of a program's, answers itself what it has under a name."""
    return is_of_program(type(called), "__getattr__") and not isinstance(called, torch.nn.Module)


REPLACEMENTS = (
    Replacement(
        thunders, "_object_getattribute_lookaside", _getattribute, "the same, with `getattr(type, '__get__')` interpreted"
    ),
    Replacement(_lookasides, setattr, _setattr, "`lambda typ, o, n, v: typ.__setattr__(o, n, v)` in _setattr_lookaside"),
    Replacement(_handlers, "STORE_ATTR", _store_attr, "impl in _store_attr_handler"),
    Replacement(
        thunders,
        "_call_dispatch",
        _call_dispatch,
        "_impl for bound methods; getattr and bool, which the interpreter itself calls, without a wrapper of theirs",
    ),
    *(
        ()
        if sys.version_info < (3, 11)  # other places of variables
        else (Replacement(_handlers, "LOAD_DEREF", _load_deref, "_load_deref_handler: _interpret_call(getattr, cell, ...)"),)
    ),
    *(
        ()
        if sys.version_info >= (3, 13)  # another order on the stack
        else (
            Replacement(thunders, "load_method_helper", _load_method, "load_method_helper: _interpret_call(getattr, meth, ...)"),
        )
    ),
)
