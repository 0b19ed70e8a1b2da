"""Attributes as Python has them, where Thunder's interpreter takes what it saw before.

Thunder remembers what an attribute of an object was, and what was last assigned to it.  That is wrong for a property that is read again
after what it is computed from has changed, for a property that is assigned to, for a class with a ``__setattr__`` or
``__getattribute__`` of its own, for an attribute that was deleted or changed through ``__dict__``, and for all but the first attribute
that a module sets on itself: each gave silently another result, or another state, than eager mode.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import MISSING as _nothing
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.torch_functions import tensor_attributes, tensor_classes
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import INTERPRETER_SIGNALS, ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy

_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
# what holds no attributes that a program computes or assigns, or says of itself what they are
_SIMPLE = (type, ModuleType, FunctionType, MethodType, CellType, Proxy, torch.Tensor)
_HOLDS_NO_CODE = (ModuleType, FunctionType, MethodType, CellType, Proxy, torch.Tensor)
_PLAIN = (str, int, float, tuple, list, dict)  # where no subclass has attributes of its own
_CONTAINERS = (list, dict, set, deque)
_CONSTANTS = (bool, int, float, complex, str, bytes)
_HAS_ASSIGNED = "_thunder_norm_has_assigned"  # the program has set an attribute of what was there before it
_MEMBERS = ("_parameters", "_buffers", "_modules")


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it reads or sets an attribute in a way that Thunder has not; None to leave it to Thunder."""
    if fn is getattr and len(args) >= 2:
        if type(args[0].value) in weakref.ProxyTypes:
            return _of_referent
        if type(args[1].value) is str and args[1].provenance.inst is not PseudoInst.CONSTANT:
            return _by_known_name
        if args[1].value == "numel" and type(args[0].value) is tuple:
            return tensor_attributes.numel_of_shape
        if args[1].value == "data" and type(args[0].value) is TensorProxy:
            return tensor_attributes.data_of
        if type(args[0].value) is TensorProxy and (of_class := tensor_classes.method(args[0], args[1].value)) is not None:
            return of_class
        if type(args[1].value) is str and not isinstance(args[0].value, _HOLDS_NO_CODE):
            guards.note_attribute(args[0], args[1].value)
        return tensor_attributes.read if tensor_attributes.is_users(*args[:2]) else _read(*args[:2])
    if fn is hasattr and len(args) == 2:
        if tensor_attributes.is_users(*args):
            return tensor_attributes.has
        return _is_there if _is_assigned(*args) else None
    if fn is object.__getattribute__ and len(args) == 2:
        return _by_object
    if (fn is setattr or fn is object.__setattr__) and len(args) == 3:
        return _assignment(fn, *args)
    if (fn is delattr or fn is object.__delattr__) and len(args) == 2:
        if type(args[0].value) is TensorProxy:
            return tensor_attributes.deleted
        return _deletion(*args)
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


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (isinstance(value, _PLAIN) and type(value).__dictoffset__ == 0)


# -- reading ------------------------------------------------------------------------------------------------------------------


def _read(obj: WrappedValue, name: WrappedValue) -> Callable | None:
    value = obj.value
    if type(value) is CellType or isinstance(value, type) and name.value in obj.attribute_wrappers:
        _forget_if_assigned(obj, name.value)
    if _is_simple(value) or type(name.value) is not str or thunders.DUNDER_PATTERN.match(name.value):
        return None  # the interpreter itself asks for __dict__
    if type(value) is super:
        return _by_super if _property_above(value, name.value) is not None else None
    if isinstance(type(value).__getattribute__, FunctionType):
        return _by_getattribute
    if _is_computed(value, name.value):
        has_changed = getattr(jit_ext.get_jit_ctx(), _HAS_ASSIGNED, False) or name.value in obj.attribute_wrappers
        # a prologue that reads it would compute and keep it before the call
        has_changed = has_changed or isinstance(_of_class(value, name.value), functools.cached_property)
        return _computed if has_changed else None
    _forget_if_changed(obj, name.value)
    return None


def _forget_if_changed(obj: WrappedValue, name: str) -> None:
    """Do not take an attribute for what it was before it was changed through ``__dict__``."""
    attributes = obj.attribute_wrappers.get("__dict__")
    if attributes is not None and _is_written(attributes, name):
        obj.attribute_wrappers[name] = attributes.item_wrappers[name]
        return
    if obj.attribute_wrappers.get(name) is None:
        return
    held = getattr(obj.value, "__dict__", None) if attributes is None else attributes.value
    now = held.get(name, _nothing) if type(held) is dict else _nothing
    if now is _nothing:
        now = _of_class(obj.value, name)  # a class attribute that was assigned since
        if hasattr(type(now), "__get__"):
            return
    _forget_if_other(obj, name, now)


def _is_written(attributes: WrappedValue, name: str) -> bool:
    """Whether the program has put what an attribute is into a ``__dict__`` that was there before."""
    item = attributes.item_wrappers.get(name) if isinstance(attributes.item_wrappers, dict) else None
    now = attributes.value.get(name, _nothing)
    if item is None or not _is_of(item, now):
        return False
    if attributes.original_value is not attributes.nothing:  # the program works with a copy
        return attributes.original_value.get(name, _nothing) is not now
    return not jit_ext.should_register_for_prologue(item.provenance)  # what was there before may stand at two places


def _is_of(wrapped: WrappedValue, value: Any) -> bool:
    return wrapped.value is value or wrapped.original_value is value


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
    if cached is None or now is _nothing or _is_of(cached, now):
        return
    del obj.attribute_wrappers[name]


def _of_class(value: Any, name: str) -> Any:
    return in_classes(type(value).__mro__, name)


def _is_computed(value: Any, name: str) -> bool:
    """Whether Python code of a property or another descriptor says what the attribute is."""
    found = _of_class(value, name)
    if isinstance(found, property):
        return isinstance(found.fget, FunctionType)
    if not isinstance(getattr(type(found), "__get__", None), FunctionType):
        return False
    return hasattr(type(found), "__set__") or name not in getattr(value, "__dict__", ())


def _computed(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for what is computed anew; what it is computed from is guarded, itself it may be other than before the call."""
    cached = obj.attribute_wrappers.get(name.value)
    result = thunders._object_getattribute_lookaside(obj, name)
    if result is _EXCEPTION_RAISED:
        obj.attribute_wrappers.pop(name.value, None)
        is_missing = isinstance(thunders.get_interpreterruntimectx().curexc, AttributeError)
        return _by_getattr(obj, name, *default) if is_missing else result
    if cached is not None and _is_same(cached, result):
        return cached
    obj.attribute_wrappers.pop(name.value, None)
    return thunders.wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[obj.provenance, name.provenance]))


def _is_same(cached: WrappedValue, result: Any) -> bool:
    if _is_of(cached, result):
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
    if _is_simple(obj.value) or thunders.DUNDER_PATTERN.match(name.value):
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


# -- setting ------------------------------------------------------------------------------------------------------------------


def _assignment(fn: Callable, obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Callable | None:
    owner = obj.value
    if type(owner) is TensorProxy:
        return tensor_attributes.assignment(obj, name, value)
    if _is_simple(owner) or isinstance(owner, super) or type(name.value) is not str:
        return None
    is_new = _is_new(obj)
    if not is_new:
        setattr(jit_ext.get_jit_ctx(), _HAS_ASSIGNED, True)
    if fn is setattr and isinstance(owner, torch.nn.Module):
        held = [vars(owner)[members] for members in _MEMBERS if members in vars(owner)]
        if not held:  # before ``nn.Module.__init__``, in a module that the program makes
            return _on_new
        if held[-1].get(name.value, _nothing) is value.value or (
            name.value in held[0] and _is_its_own_parameter(obj, name, value)
        ):
            return lambda *_: wrap_const(None)  # it holds that already
        is_member = issubclass(getattr(value.value, "python_typ", value.python_typ), (torch.nn.Module, torch.nn.Parameter))
        if is_member or any(name.value in members for members in held):
            return None
    elif fn is setattr and (isinstance(type(owner).__setattr__, FunctionType) or _is_of_a_container(owner)):
        return _by_setattr
    found = _of_class(owner, name.value)
    if isinstance(found, property):
        return _by_property
    if isinstance(getattr(type(found), "__set__", None), FunctionType):
        return _by_descriptor
    if is_new and isinstance(owner, _CONTAINERS):  # of a subclass of these Thunder writes into a copy
        return _on_new
    if fn is setattr or type(owner) in jit_ext._TORCH_DYNAMIC_TYPES or not hasattr(owner, "__dict__"):
        return None
    return _on_new if is_new else _into_dict


def _is_of_a_container(owner: Any) -> bool:
    """Whether assigning an attribute is what a list or dict does by a method of another name: ``__setattr__ = dict.__setitem__``."""
    return isinstance(owner, list | dict) and type(owner).__setattr__ is not object.__setattr__


def _is_its_own_parameter(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> bool:
    """Whether the tensor that is assigned is the parameter that has the name, which was changed in place (``self.weight *= 2``), or not at all."""
    if type(value.value) is not TensorProxy:
        return False
    held = thunders._interpret_call(getattr, obj, name)
    return held is not _EXCEPTION_RAISED and held.value is aliases.written_tensor(value.value)


def _is_new(obj: WrappedValue) -> bool:
    """Whether the program made an object: Thunder takes a container of a class of the user's for a constant, or for what was last done to it."""
    if isinstance(obj.value, thunders.ThunderInterpreterObject):  # a view of a dict, or an iterator
        return True
    is_made = isinstance(obj.value, _CONTAINERS) and not jit_ext.should_register_for_prologue(obj.provenance)
    return is_made or jit_ext.is_created_during_tracing(obj.provenance)


def _on_new(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for attributes of what the program made, where Thunder knows nothing of what it sets."""
    try:
        object.__setattr__(obj.value, name.value, value.value)
    except Exception as e:
        return do_raise(e)
    obj.attribute_wrappers[name.value] = value
    return wrap_const(None)


def _into_dict(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    """Called for ``object.__setattr__`` of what was there before: it is written when the program runs.

    Thunder's own calls ``__setitem__`` of the dict it wrote into the last time, which it knows nothing of.
    """
    if jit_ext.should_register_for_prologue(obj.provenance) and obj.original_value is obj.nothing:
        if getattr(obj.provenance, "proxy", None) is None:
            obj.provenance.proxy = obj.anyproxy = AnyProxy(obj.value, history=obj.provenance)
    attributes = thunders._interpret_call(getattr, obj, wrap_const("__dict__"))
    if attributes is _EXCEPTION_RAISED:
        return attributes
    attributes.provenance.ext_flag |= jit_ext.EXT_FLAG_IS_MODULE_MEMBER_DICT
    return thunders._interpret_call(dict.__setitem__, attributes, name, value)


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


def _is_assigned(obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether an object that was there before has an attribute for the program, which is set when the program runs, or has had it."""
    held = (obj.attribute_wrappers.get(place) for place in ("__dict__", *_MEMBERS))
    return any(d is not None and d.original_value is not d.nothing and name.value in d.value for d in held)


def _is_there(obj: WrappedValue, name: WrappedValue) -> WrappedValue:
    """Called for `hasattr` of what `_is_assigned`."""
    return wrap_const(True)


def _deletion(obj: WrappedValue, name: WrappedValue) -> Callable | None:
    """What to call for an attribute that only the program has set so far: Python deletes others."""
    attributes, is_assigned = obj.attribute_wrappers.get("__dict__"), _is_assigned(obj, name)
    _forget(obj, name)
    if attributes is None or not is_assigned:
        return None
    changes = jit_ext.get_jit_ctx()._additional_outputs.get(attributes, [])
    changes[:] = [c for c in changes if c[2].value != name.value]
    return None if name.value in attributes.original_value else lambda *_: wrap_const(None)


def _forget(obj: WrappedValue, name: WrappedValue) -> None:
    """What is known of an attribute that is about to be deleted."""
    obj.attribute_wrappers.pop(name.value, None)
    attributes = obj.attribute_wrappers.get("__dict__")
    if attributes is not None and isinstance(attributes.item_wrappers, dict):
        attributes.item_wrappers.pop(name.value, None)
        attributes.key_wrappers.pop(name.value, None)
        if attributes.original_value is not attributes.nothing:  # the copy that the program works with
            attributes.value.pop(name.value, None)
