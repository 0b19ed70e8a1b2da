"""Attributes as Python has them, where Thunder's interpreter takes what it saw before.

Thunder remembers what an attribute of an object was, and what was last assigned to it.  That is wrong for a property that is read again
after what it is computed from has changed, for a property that is assigned to, for a class with a ``__setattr__`` or
``__getattribute__`` of its own, and for an attribute that was changed through ``__dict__``: each gave silently another result than
eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from thunder.core import interpreter as thunders
from thunder.core.interpreter import INTERPRETER_SIGNALS, ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap_const
from thunder.core.jit_ext import _general_jit_getattr_lookaside, get_jit_ctx
from thunder.core.proxies import Proxy

_nothing = object()
_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
# what holds no attributes that a program computes or assigns, or says of itself what they are
_SIMPLE = (type, super, ModuleType, FunctionType, MethodType, CellType, Proxy, torch.Tensor, str, int, float, tuple, list, dict)
_HAS_ASSIGNED = "_thunder_norm_has_assigned"  # the program has set an attribute


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it reads or sets an attribute in a way that Thunder has not; None to leave it to Thunder."""
    if fn is getattr and len(args) >= 2:
        return _read(*args[:2])
    if fn is object.__getattribute__ and len(args) == 2:
        return _general_jit_getattr_lookaside
    if (fn is setattr or fn is object.__setattr__) and len(args) == 3:
        setattr(get_jit_ctx(), _HAS_ASSIGNED, True)
        return _assignment(fn, *(a.value for a in args))
    return None


def _read(obj: WrappedValue, name: WrappedValue) -> Callable | None:
    value = obj.value
    if isinstance(value, _SIMPLE) or type(name.value) is not str or thunders.DUNDER_PATTERN.match(name.value):
        return None  # the interpreter itself asks for __dict__
    if isinstance(type(value).__getattribute__, FunctionType):
        return _by_getattribute
    cached = obj.attribute_wrappers.get(name.value)
    if cached is None and not getattr(get_jit_ctx(), _HAS_ASSIGNED, False):
        return None
    if _is_computed(value, name.value):
        return _computed
    if cached is None:
        return None
    attributes = obj.attribute_wrappers.get("__dict__")
    held = vars(value) if attributes is None and hasattr(value, "__dict__") else getattr(attributes, "value", None)
    now = held.get(name.value, _nothing) if type(held) is dict else _nothing
    if now is not _nothing and cached.value is not now and cached.original_value is not now:
        del obj.attribute_wrappers[name.value]
    return None


def _of_class(value: Any, name: str) -> Any:
    return next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), _nothing)


def _is_computed(value: Any, name: str) -> bool:
    """Whether Python code of a property or another descriptor says what the attribute is."""
    found = _of_class(value, name)
    if isinstance(found, property):
        return isinstance(found.fget, FunctionType)
    if not isinstance(getattr(type(found), "__get__", None), FunctionType):
        return False
    return hasattr(type(found), "__set__") or name not in getattr(value, "__dict__", ())


def _computed(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    cached = obj.attribute_wrappers.get(name.value)
    result = thunders._object_getattribute_lookaside(obj, name)
    if cached is not None and result is not _EXCEPTION_RAISED and _is_same(cached, result):
        return cached
    obj.attribute_wrappers.pop(name.value, None)
    if result is not _EXCEPTION_RAISED:  # what it is computed from is guarded; of itself it may be other than before the call
        return thunders.wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[obj.provenance, name.provenance]))
    if not isinstance(thunders.get_interpreterruntimectx().curexc, AttributeError):
        return result
    return _by_getattr(obj, name, *default)


def _is_same(cached: WrappedValue, result: Any) -> bool:
    if cached.value is result or cached.original_value is result:
        return True
    return type(result) in (str, int, float, bool, tuple) and type(cached.value) is type(result) and cached.value == result


def _by_getattribute(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    result = thunders._interpret_call(wrap_const(type(obj.value).__getattribute__), obj, name)
    if result is _EXCEPTION_RAISED and isinstance(thunders.get_interpreterruntimectx().curexc, AttributeError):
        return _by_getattr(obj, name, *default)
    return result


def _by_getattr(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """What is asked after an AttributeError: the class's ``__getattr__``, then the default."""
    ctx = thunders.get_interpreterruntimectx()
    result: Any = _EXCEPTION_RAISED
    method = getattr(type(obj.value), "__getattr__", None)
    if method is not None:
        ctx.curexc = None
        result = thunders._interpret_call(wrap_const(method), obj, name)
    if result is _EXCEPTION_RAISED and default and isinstance(ctx.curexc, AttributeError):
        ctx.curexc = None
        return default[0]
    return result


def _assignment(fn: Callable, obj: Any, name: Any, value: Any) -> Callable | None:
    if isinstance(obj, _SIMPLE) or type(name) is not str:
        return None
    if fn is setattr and isinstance(obj, torch.nn.Module):
        is_member = issubclass(getattr(value, "python_typ", type(value)), (torch.nn.Module, torch.nn.Parameter))
        if is_member or name in _members(obj):
            return None
    elif fn is setattr and isinstance(type(obj).__setattr__, FunctionType):
        return _by_setattr
    found = _of_class(obj, name)
    if isinstance(found, property):
        return _by_property
    return _by_descriptor if isinstance(getattr(type(found), "__set__", None), FunctionType) else None


def _members(module: torch.nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers, *module._modules}


def _by_setattr(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    result = thunders._interpret_call(wrap_const(type(obj.value).__setattr__), obj, name, value)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


def _by_property(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    setter = _of_class(obj.value, name.value).fset
    if setter is None:
        return do_raise(AttributeError(f"property {name.value!r} of {type(obj.value).__name__!r} object has no setter"))
    return _set(wrap_const(setter), obj, name, value)


def _by_descriptor(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    descriptor = wrap_const(_of_class(obj.value, name.value))
    return _set(wrap_const(type(descriptor.value).__set__), obj, name, value, descriptor)


def _set(setter: WrappedValue, obj: WrappedValue, name: WrappedValue, value: WrappedValue, *before: WrappedValue) -> Any:
    result = thunders._interpret_call(setter, *before, obj, value)
    obj.attribute_wrappers.pop(name.value, None)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)
