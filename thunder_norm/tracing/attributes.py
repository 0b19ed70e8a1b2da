"""Attributes as Python has them, where Thunder's interpreter takes what it saw before.

Thunder remembers what an attribute of an object was, and what was last assigned to it.  That is wrong for a property that is read again
after what it is computed from has changed, for a property that is assigned to, for a class with a ``__setattr__`` or
``__getattribute__`` of its own, for an attribute that was deleted or changed through ``__dict__``, and for all but the first attribute
that a module sets on itself: each gave silently another result, or another state, than eager mode.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import torch

from thunder_norm.tracing.attribute_changes import (
    DELETING,
    MEMBERS,
    SETTING,
    assignment,
    deletion,
    held_in,
    is_new,
    is_simple,
    note_overwritten,
    of_class,
)
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import MISSING as _nothing
from thunder_norm.tracing.guarding.classes import in_classes, is_answered_by_code
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.member_dicts import has_written, is_copy, note_member_dict
from thunder_norm.tracing.torch_functions import class_members, known_classes, tensor_attributes, tensor_classes
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_SIGNALS, ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import Proxy, TensorProxy

_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
_HOLDS_NO_CODE = (ModuleType, FunctionType, MethodType, CellType, Proxy, torch.Tensor)
_WRITING = (*SETTING, *DELETING, type.__setattr__, type.__delattr__)
_CONSTANTS = (bool, int, float, complex, str, bytes)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it reads or sets an attribute in a way that Thunder has not; None to leave it to Thunder."""
    if fn is super:
        return class_members.above(*args) if known_classes.are_met() else None
    if fn is getattr and len(args) >= 2:
        if class_members.is_above(args[0].value):
            return class_members.read_above
        if type(args[0].value) in weakref.ProxyTypes:
            return _of_referent
        if type(args[1].value) is str and args[1].provenance.inst is not PseudoInst.CONSTANT:
            return _by_known_name
        if args[1].value == "numel" and type(args[0].value) is tuple:
            return tensor_attributes.numel_of_shape
        if type(args[0].value) is TensorProxy:
            own = class_members.reading(args[0], args[1].value, is_set=tensor_attributes.is_users(*args[:2]))
            if own is not None:
                return own
        if args[1].value == "data" and type(args[0].value) is TensorProxy:
            return tensor_attributes.data_of
        if tensor_attributes.is_unknown_gradient(*args[:2]):
            return tensor_attributes.gradient_of
        if args[1].value == "__dict__" and tensor_classes.of_class(args[0]):
            return tensor_attributes.own_dict
        if args[1].value == "__dict__" and not is_simple(args[0].value) and not is_new(args[0]):
            return _own_dict
        if type(args[1].value) is str and not isinstance(args[0].value, _HOLDS_NO_CODE):
            guards.note_attribute(args[0], args[1].value)
        return tensor_attributes.read if tensor_attributes.is_users(*args[:2]) else _read(*args[:2])
    if fn is hasattr and len(args) == 2:
        if tensor_attributes.is_users(*args):
            return tensor_attributes.has
        if tensor_classes.of_class(args[0]) and type(args[1].value) is str:
            return _has
        if is_simple(args[0].value) or type(args[1].value) is not str:
            return None
        return _has if has_written() or is_answered_by_code(args[0].value, args[1].value) else None
    if fn is object.__getattribute__ and len(args) == 2:
        if type(args[0].value) is TensorProxy:
            return class_members.read_by_object
        return None if isinstance(args[0].value, TensorProxy) else _by_object
    is_of_c = type(fn) is WrapperDescriptorType
    if is_of_c and fn.__objclass__ in (property, MemberDescriptorType):
        return _by_descriptor(fn.__name__, *args)
    if (fn is setattr or fn is delattr or (is_of_c and fn in _WRITING)) and len(args) >= 2:
        note_overwritten(*args[:2])
    if (fn is setattr or (is_of_c and fn in SETTING)) and len(args) == 3:
        return assignment(fn, *args)
    if (fn is delattr or (is_of_c and fn in DELETING)) and len(args) == 2:
        return deletion(fn, *args)
    return None


def _of_referent(proxy: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for an attribute of a ``weakref.proxy``, which has those of its object: the ways to them lead through it."""
    try:
        referent = proxy.value.__repr__.__self__
    except ReferenceError as e:
        return do_raise(e)
    return thunders._interpret_call(getattr, thunders.wrap(referent, provenance=proxy.provenance), name, *default)


def _by_known_name(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for a name that the program has read or computed: what that depends on is guarded, and there is a way to the attribute."""
    return thunders._interpret_call(getattr, obj, wrap_const(name.value), *default)


def _own_dict(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for the dict of what was there before: what the program stores in it itself is written as attributes are."""
    found = jit_ext._general_jit_getattr_lookaside(obj, name, *default)
    if found is not _EXCEPTION_RAISED and type(found.value) is dict:
        note_member_dict(found)
    return found


_OF_RAISING = (
    "__context__",
    "__cause__",
    "__suppress_context__",
    "__traceback__",
)  # of exceptions, which change as they are raised


# -- reading ------------------------------------------------------------------------------------------------------------------


def _read(obj: WrappedValue, name: WrappedValue) -> Callable | None:
    value = obj.value
    if type(value) is CellType or isinstance(value, type) and name.value in obj.attribute_wrappers:
        _forget_if_assigned(obj, name.value)
    if isinstance(value, BaseException) and name.value in _OF_RAISING:
        _forget_if_other(obj, name.value, getattr(value, name.value))
    if is_simple(value) or type(name.value) is not str or thunders.DUNDER_PATTERN.match(name.value):
        return None  # the interpreter itself asks for __dict__
    if type(value) is super:
        return _by_super if _property_above(value, name.value) is not None else None
    if isinstance(type(value).__getattribute__, FunctionType):
        return _by_getattribute
    if _is_computed(value, name.value):
        return _computed
    _forget_if_changed(obj, name.value)
    return None


def _forget_if_changed(obj: WrappedValue, name: str) -> None:
    """Do not take an attribute for what it was before it was changed through ``__dict__``."""
    attributes, cached = obj.attribute_wrappers.get("__dict__"), obj.attribute_wrappers.get(name)
    own = held_in(obj, "__dict__")
    now = own.get(name, _nothing) if type(own) is dict else _nothing
    if is_copy(attributes) and now is not _nothing and attributes.original_value.get(name, _nothing) is not now:
        if (stored := attributes.item_wrappers.get(name)) is not None:  # by ``vars(obj)[name] = value``
            obj.attribute_wrappers[name] = stored
        return
    if cached is None:
        return
    if now is _nothing:  # `register_buffer` puts a member there without an assignment
        now = next((members[name] for kind in MEMBERS if name in (members := held_in(obj, kind))), _nothing)
    if now is _nothing:
        now = of_class(obj.value, name)  # a class attribute that was assigned since
        if hasattr(type(now), "__get__"):
            return
    _forget_if_other(obj, name, now)


def _forget_if_assigned(obj: WrappedValue, name: str) -> None:
    """Do not take a variable of a closure, or an attribute of a class, for what it was before it was assigned elsewhere."""
    if isinstance(obj.value, type):
        now = in_classes(obj.value.__mro__, name)
        if not hasattr(type(now), "__get__"):
            _forget_if_other(obj, name, now)
        return
    try:
        _forget_if_other(obj, name, obj.value.cell_contents)
    except ValueError:  # it has none
        obj.attribute_wrappers.pop(name, None)


def _forget_if_other(obj: WrappedValue, name: str, now: Any) -> None:
    cached = obj.attribute_wrappers.get(name)
    if cached is None or now is _nothing or cached.value is now or cached.original_value is now:
        return
    del obj.attribute_wrappers[name]


def _is_computed(value: Any, name: str) -> bool:
    """Whether Python code of a property or another descriptor says what the attribute is."""
    found = of_class(value, name)
    if isinstance(found, property):
        return isinstance(found.fget, FunctionType)
    if not isinstance(getattr(type(found), "__get__", None), FunctionType):
        return False
    return hasattr(type(found), "__set__") or name not in getattr(value, "__dict__", ())


def _computed(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for what is computed anew; what it is computed from is guarded, itself it may be other than before the call."""
    guards.note_descriptor(of_class(obj.value, name.value))
    cached = obj.attribute_wrappers.get(name.value)
    result = thunders._object_getattribute_lookaside(obj, name)
    if result is _EXCEPTION_RAISED:
        obj.attribute_wrappers.pop(name.value, None)
        is_missing = isinstance(thunders.get_interpreterruntimectx().curexc, AttributeError)
        return _by_getattr(obj, name, *default) if is_missing else result
    if cached is not None and _is_same(cached, result):
        return cached
    obj.attribute_wrappers.pop(name.value, None)
    if cached is None and not _is_known(result) and not _has_changed(obj, name):
        return thunders.wrap_attribute(result, obj, name)  # there is a way to what it holds
    return thunders.wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[obj.provenance, name.provenance]))


def _is_known(result: Any) -> bool:
    """Whether nothing has to be read of what is computed: a prologue that reads it would compute it before the call, and keep it."""
    return result is None or isinstance(result, (Proxy, *_CONSTANTS))


def _has_changed(obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether what is computed may be another than it would be before the call, or is kept where it is computed."""
    return has_written() or isinstance(of_class(obj.value, name.value), functools.cached_property)


def _has(obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for `hasattr`, for which Thunder asks the object as it was before."""
    ctx = thunders.get_interpreterruntimectx()
    if thunders._interpret_call(getattr, obj, name) is not _EXCEPTION_RAISED:
        return wrap_const(True)
    if not isinstance(ctx.curexc, AttributeError):
        return _EXCEPTION_RAISED
    ctx.curexc = None
    return wrap_const(False)


def _is_same(cached: WrappedValue, result: Any) -> bool:
    if cached.value is result or cached.original_value is result:
        return True
    return type(result) in (str, int, float, bool) and type(cached.value) is type(result) and cached.value == result


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


def _by_object(obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for ``object.__getattribute__``, which does not ask ``__getattr__``."""
    if is_simple(obj.value) or thunders.DUNDER_PATTERN.match(name.value):
        return jit_ext._general_jit_getattr_lookaside(obj, name)
    is_computed = _is_computed(obj.value, name.value)
    if not is_computed:
        _forget_if_changed(obj, name.value)
    cached = obj.attribute_wrappers.get(name.value)
    if cached is not None and not is_computed:
        return cached
    result = thunders._object_getattribute_lookaside(obj, name)
    if result is _EXCEPTION_RAISED:
        return result
    if cached is not None and not _is_same(cached, result):
        del obj.attribute_wrappers[name.value]
    if type(result) in _CONSTANTS and isinstance(type(obj.value).__getattribute__, FunctionType):
        guards.note(obj, "own attribute", name.value, same_as(result))  # to a prologue the object would say something else
        return wrap_const(result)
    found = thunders.wrap_attribute(result, obj, name)
    if isinstance(obj.value, torch.nn.Module) and name.value in jit_ext.MODULE_MEMBER_DICT_ATTRS:
        found.provenance.ext_flag |= jit_ext.EXT_FLAG_IS_MODULE_MEMBER_DICT
    return found


def _by_descriptor(method: str, descriptor: WrappedValue, obj: WrappedValue | None = None, *_: WrappedValue) -> Callable | None:
    """What to call instead of a method in C of a property, or of a slot, that is called by its name: ``Base.rate.__set__(self, rate)``."""
    found = descriptor.value
    if obj is None or obj.value is None:
        return None
    if isinstance(found, property):
        called = {"__get__": found.fget, "__set__": found.fset, "__delete__": found.fdel}.get(method)
        named: tuple[WrappedValue, ...] = ()
        if not isinstance(called, FunctionType):
            return None
    else:
        if of_class(obj.value, found.__name__) is not found:
            return None
        called = {"__get__": object.__getattribute__, "__set__": object.__setattr__, "__delete__": object.__delattr__}.get(method)
        named = (wrap_const(found.__name__),)
        if called is None:
            return None
    count = 1 if method == "__set__" else 0  # what follows in ``__get__`` is the class
    return lambda _, obj, *others: thunders._interpret_call(called, obj, *named, *others[:count])


def _property_above(value: Any, name: str) -> Any:
    """The getter of the property that ``super().name`` stands for; None if it is something else."""
    if isinstance(value.__self__, type) or value.__self_class__ is None:
        return None
    mro = value.__self_class__.__mro__
    found = in_classes(mro[mro.index(value.__thisclass__) + 1 :], name)
    return found.fget if isinstance(found, property) and isinstance(found.fget, FunctionType) else None


def _by_super(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    owner = obj.attribute_wrappers.get("__self__") or thunders._interpret_call(getattr, obj, wrap_const("__self__"))
    return thunders._interpret_call(wrap_const(_property_above(obj.value, name.value)), owner)
