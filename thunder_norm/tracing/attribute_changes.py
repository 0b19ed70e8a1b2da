"""Attributes that a program sets and deletes: of what was there before when the program has run, of what it has made at once.

Thunder knows nothing of properties and ``__setattr__``, of deletions, and of objects that it takes for constants.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards, held_by_classes, overwritten
from thunder_norm.tracing.guarding.classes import MISSING as _nothing
from thunder_norm.tracing.guarding.classes import in_classes, is_of_program
from thunder_norm.tracing.guarding.ways import is_imported, path_of
from thunder_norm.tracing.member_dicts import MEMBERS, note_member_dict, note_written, store
from thunder_norm.tracing.native.calls import no_attribute
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.torch_functions import class_members, tensor_attributes
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy

_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
# what holds no attributes that a program computes or assigns, or says of itself what they are
_SIMPLE = (type, ModuleType, FunctionType, MethodType, CellType, Proxy, torch.Tensor)
_WITH_OWN_SETTER = (ModuleType, MethodType, BaseException)  # before Python 3.13: a `__setattr__` in C, which is called as it is
_PLAIN = (str, int, float, tuple, list, dict)  # where no subclass has attributes of its own
_CONTAINERS = (list, dict, set, deque)
_OF_CALLS = ("__defaults__", "__kwdefaults__", "__code__")  # of functions
_MAKING_FUNCTIONS = ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")  # the latter gives one its defaults from Python 3.13 on
# what Python does where a class says nothing
SETTING = (object.__setattr__, SimpleNamespace.__setattr__)
DELETING = (object.__delattr__, SimpleNamespace.__delattr__)


def is_simple(value: Any) -> bool:
    """Whether an object has no attributes that a program computes or sets."""
    return isinstance(value, _SIMPLE) or (isinstance(value, _PLAIN) and type(value).__dictoffset__ == 0)


def of_class(value: Any, name: str) -> Any:
    """What the class of an object has under a name, or `MISSING`."""
    return in_classes(type(value).__mro__, name)


def note_overwritten(obj: WrappedValue, name: WrappedValue) -> None:
    """Note that an attribute is set or deleted that the interpreter changes at once: of a class, a module of Python's, a function, or in a slot."""
    owner = obj.value
    if isinstance(owner, Proxy) or type(name.value) is not str:
        return
    if isinstance(owner, type | ModuleType | FunctionType) or isinstance(of_class(owner, name.value), MemberDescriptorType):
        overwritten.note(vars(owner) if isinstance(owner, FunctionType) else owner, name.value)
    if isinstance(owner, type) and issubclass(owner, torch.Tensor):
        held_by_classes.note(owner)


# -- setting ------------------------------------------------------------------------------------------------------------------


def assignment(fn: Callable, obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Callable | None:
    """What to call instead of `setattr` or ``object.__setattr__``; None to leave it to Thunder."""
    owner = obj.value
    if type(owner) is TensorProxy:
        says = class_members.setting(obj, name.value, by_object=fn is not setattr)
        return says or tensor_attributes.assignment(obj, name, value)
    if type(owner) is FunctionType and fn is setattr and name.value not in dir(FunctionType):
        return _at_once  # whose attributes are a place that is looked at afterwards
    if type(owner) is FunctionType and name.value in _OF_CALLS:
        return _at_once if getattr(obj.provenance.inst, "opname", "") in _MAKING_FUNCTIONS else _into_function
    if isinstance(owner, _WITH_OWN_SETTER) and fn is not setattr:
        return _at_once
    if is_simple(owner) or isinstance(owner, super) or type(name.value) is not str:
        return None
    was_made = is_new(obj)
    if not was_made:
        note_written()
    if fn is setattr and isinstance(owner, torch.nn.Module):
        held = [held_in(obj, members) for members in MEMBERS if members in vars(owner)]
        if not held:  # before ``nn.Module.__init__``, in a module that the program makes
            return _at_once
        if held[-1].get(name.value, _nothing) is value.value or (
            name.value in held[0] and _is_its_own_parameter(obj, name, value)
        ):
            return lambda *_: wrap_const(None)  # it holds that already
        is_member = issubclass(getattr(value.value, "python_typ", value.python_typ), (torch.nn.Module, torch.nn.Parameter))
        if is_member or any(name.value in members for members in held):
            return None
    elif fn is setattr and (isinstance(type(owner).__setattr__, FunctionType) or _is_of_a_container(owner)):
        return _by_setattr
    found = of_class(owner, name.value)
    if isinstance(found, property):
        return _by_property
    if isinstance(getattr(type(found), "__set__", None), FunctionType):
        return _by_descriptor
    is_slot = isinstance(found, MemberDescriptorType)  # Thunder knows what `setattr` stores there alone
    if (is_slot and fn is not setattr) or (
        was_made and isinstance(owner, _CONTAINERS)
    ):  # of a subclass of these it writes into a copy
        return _at_once
    if fn is setattr or type(owner) in jit_ext._TORCH_DYNAMIC_TYPES or not hasattr(owner, "__dict__"):
        return None
    return _at_once if was_made else _into_dict


def _is_of_a_container(owner: Any) -> bool:
    """Whether assigning an attribute is what a list or dict does by a method of another name: ``__setattr__ = dict.__setitem__``."""
    return isinstance(owner, list | dict) and type(owner).__setattr__ is not object.__setattr__


def _is_its_own_parameter(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> bool:
    """Whether the tensor that is assigned is the parameter that has the name, which was changed in place (``self.weight *= 2``), or not at all."""
    if type(value.value) is not TensorProxy:
        return False
    held = thunders._interpret_call(getattr, obj, name)
    return held is not _EXCEPTION_RAISED and held.value is aliases.written_tensor(value.value)


def is_new(obj: WrappedValue) -> bool:
    """Whether the program made an object: Thunder takes a container of a class of the user's for a constant, or for what was last done to it."""
    if isinstance(obj.value, thunders.ThunderInterpreterObject):  # a view of a dict, or an iterator
        return True
    is_made = isinstance(obj.value, _CONTAINERS) and not jit_ext.should_register_for_prologue(obj.provenance)
    return is_made or jit_ext.is_created_during_tracing(obj.provenance)


def _at_once(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for attributes of what the program made, and for slots, where Thunder knows nothing of what it sets."""
    try:
        object.__setattr__(obj.value, name.value, value.value)
    except Exception as e:
        return do_raise(e)
    obj.attribute_wrappers[name.value] = value
    return wrap_const(None)


def _into_function(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for what a function that was there before is called with."""
    raise UnsupportedOpError(
        with_details(
            f"a traced function gives {obj.value.__qualname__} another {name.value}",
            why="a trace is made once, for what functions do when the call begins",
            instead="do so before the call, or give the arguments in the call: functools.partial",
        )
    )


def _into_dict(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``object.__setattr__`` of what was there before: it is written when the program runs.

    Thunder's own calls ``__setitem__`` of the dict it wrote into the last time, which it knows nothing of, and looks at all that is in it.
    """
    if jit_ext.should_register_for_prologue(obj.provenance) and obj.original_value is obj.nothing:
        if getattr(obj.provenance, "proxy", None) is None:
            obj.provenance.proxy = obj.anyproxy = AnyProxy(obj.value, history=obj.provenance)
    attributes = thunders._interpret_call(getattr, obj, wrap_const("__dict__"))
    if attributes is _EXCEPTION_RAISED:
        return attributes
    note_member_dict(attributes)
    path = path_of(attributes.provenance)
    if path is None or is_imported(path):
        return thunders._interpret_call(dict.__setitem__, attributes, name, value)
    store(attributes, name, value)
    return wrap_const(None)


def _by_setattr(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    result = thunders._interpret_call(wrap_const(type(obj.value).__setattr__), obj, name, value)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


def _by_property(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    setter = of_class(obj.value, name.value).fset
    if setter is None:
        return do_raise(AttributeError(f"property {name.value!r} of {type(obj.value).__name__!r} object has no setter"))
    return _set(wrap_const(setter), obj, name, value)


def _by_descriptor(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    descriptor = wrap_const(of_class(obj.value, name.value))
    guards.note_descriptor(descriptor.value)
    return _set(wrap_const(type(descriptor.value).__set__), obj, name, value, descriptor)


def _set(setter: WrappedValue, obj: WrappedValue, name: WrappedValue, value: WrappedValue, *before: WrappedValue) -> Any:
    result = thunders._interpret_call(setter, *before, obj, value)
    obj.attribute_wrappers.pop(name.value, None)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


# -- deleting -----------------------------------------------------------------------------------------------------------------


def deletion(fn: Callable, obj: WrappedValue, name: WrappedValue) -> Callable | None:
    """What to call instead of `delattr` or ``object.__delattr__``: code of the program's, or, of what was there before, the epilogue in each call."""
    obj.attribute_wrappers.pop(name.value, None)
    owner = obj.value
    if type(owner) is TensorProxy:
        return class_members.deleting(obj, name.value, by_object=fn is not delattr) or tensor_attributes.deleted
    if not is_simple(owner) and not isinstance(owner, super) and type(name.value) is str:
        if fn is delattr and is_of_program(type(owner), "__delattr__"):
            return _by_delattr
        found = of_class(owner, name.value)
        if isinstance(found, property):
            return _by_deleter
        if isinstance(getattr(type(found), "__delete__", None), FunctionType):
            return _by_deleting_descriptor
    kind = next((k for k in (*MEMBERS, "__dict__") if name.value in held_in(obj, k)), None)
    if not (isinstance(owner, torch.nn.Module) or type(owner).__delattr__ in DELETING):
        return None
    if kind is None:
        is_deleted = not is_simple(owner) and name.value in (
            getattr(owner, "__dict__", None) or ()
        )  # until the call ends it is there
        return _not_there if is_deleted else None
    if is_simple(owner) or is_new(obj):
        attributes = obj.attribute_wrappers.get("__dict__")
        if attributes is not None and isinstance(attributes.item_wrappers, dict):
            attributes.item_wrappers.pop(name.value, None)
            attributes.key_wrappers.pop(name.value, None)
        return None
    return functools.partial(_deleted_from, kind)


def _not_there(obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for what the program has deleted already."""
    return do_raise(no_attribute(obj.value, name.value))


def _by_delattr(obj: WrappedValue, name: WrappedValue) -> Any:
    result = thunders._interpret_call(wrap_const(type(obj.value).__delattr__), obj, name)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


def _by_deleter(obj: WrappedValue, name: WrappedValue) -> Any:
    deleter = of_class(obj.value, name.value).fdel
    if deleter is None:
        return do_raise(AttributeError(f"property {name.value!r} of {type(obj.value).__name__!r} object has no deleter"))
    result = thunders._interpret_call(wrap_const(deleter), obj)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


def _by_deleting_descriptor(obj: WrappedValue, name: WrappedValue) -> Any:
    descriptor = wrap_const(of_class(obj.value, name.value))
    guards.note_descriptor(descriptor.value)
    result = thunders._interpret_call(wrap_const(type(descriptor.value).__delete__), descriptor, obj)
    return result if result is _EXCEPTION_RAISED else wrap_const(None)


def held_in(obj: WrappedValue, kind: str) -> Any:
    """What is in a dict of an object by now, `__dict__` or one of the members of a module."""
    known = obj.attribute_wrappers.get(kind)
    if known is not None:
        return known.value
    own = getattr(obj.value, "__dict__", None)
    if type(own) is not dict:
        return {}
    return own if kind == "__dict__" else own.get(kind, {}) if isinstance(obj.value, torch.nn.Module) else {}


def _deleted_from(kind: str, obj: WrappedValue, name: WrappedValue) -> Any:
    held = thunders._interpret_call(getattr, obj, wrap_const(kind))
    note_member_dict(held)
    note_written()
    return thunders._interpret_call(dict.__delitem__, held, name)
