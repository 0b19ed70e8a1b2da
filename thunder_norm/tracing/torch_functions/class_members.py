"""Members of classes derived from torch.Tensor that do not dispatch: what a program reads, sets, deletes and calls of their tensors.

Python looks for them in the class of an object, which what stands for a tensor in a trace is not of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import (
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding import guards, held_by_classes
from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions.tensor_classes import class_of, note_asked, operator_of, own_classes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    populate_attribute_wrapper,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_OF_TORCHS = frozenset(
    {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "data", "grad"}
)  # what we ask is not the class's
_PASSED_OVER = "_thunder_norm_passed_over"  # of an acquisition: what the next read of an attribute does not ask
_WHOLE_CLASS, _GETATTRIBUTE = "the class", "its __getattribute__"


# -- reading --------------------------------------------------------------------------------------------------------------------


def reading(obj: WrappedValue, name: Any, *, is_set: bool) -> Callable | None:
    """What to call for `getattr` of a plain tensor whose class has something of its own to say; None otherwise.

    Args:
        obj: the tensor.
        name: of the attribute.
        is_set: whether the tensor has it of its own.
    """
    if type(obj.value) is not TensorProxy:
        return None
    if name == "as_subclass":
        return functools.partial(_bound, _as_subclass)
    own = own_classes(class_of(obj))
    if not own or not isinstance(name, str) or (name in _OF_TORCHS and not _is_asked_by_program()):
        return None
    passed_over = vars(get_jit_ctx()).pop(_PASSED_OVER, None)
    if passed_over == _WHOLE_CLASS:
        return None
    asked = in_classes(own, "__getattribute__")
    if passed_over != _GETATTRIBUTE and isinstance(asked, FunctionType):
        return functools.partial(_by_getattribute, asked)
    found = in_classes(own, name)
    if is_set and not _is_first(found):
        return None
    if isinstance(found, _METHODS):
        return functools.partial(_bound, found)
    if isinstance(found, MemberDescriptorType):
        return None if is_set else functools.partial(_computed, _get_slot, found)
    get = _getter(found)
    if get is not None:
        return functools.partial(_computed, get, found)
    if found is not MISSING:
        return _of_class
    if hasattr(torch.Tensor, name):
        return None
    note_asked(obj, name)
    return _missing if isinstance(in_classes(own, "__getattr__"), FunctionType) else None


def _getter(found: Any) -> Callable | None:
    """What computes an attribute, if something in a class does it by code."""
    if isinstance(found, property):
        return _get_property
    if isinstance(found, GetSetDescriptorType):
        return _get_of_torch
    return _get_described if isinstance(getattr(type(found), "__get__", None), FunctionType) else None


def read_by_object(obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for ``object.__getattribute__`` of a plain tensor, which a class's own ``__getattribute__`` asks."""
    return _read_passing_over(_GETATTRIBUTE, obj, name)


def _read_passing_over(what: str, obj: WrappedValue, name: WrappedValue) -> Any:
    state = vars(get_jit_ctx())
    state[_PASSED_OVER] = what
    try:
        return _interpret_call(getattr, obj, name)
    finally:
        state.pop(_PASSED_OVER, None)


def _is_asked_by_program() -> bool:
    """Whether the call does not come from Thunder's own Python, or ours, to which a tensor is what torch says of it."""
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is None or (frame.module or "").partition(".")[0] not in ("thunder", "thunder_norm")


def _is_first(found: Any) -> bool:
    """Whether something in a class comes before what an object has of its own."""
    return any(hasattr(type(found), name) for name in ("__set__", "__delete__"))


def _bound(function: Callable, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> WrappedValue:
    note_asked(obj, name.value)
    bound = wrap_const(MethodType(function, obj.value))
    populate_attribute_wrapper(bound, "__self__", obj)
    return bound


def _computed(get: Callable, found: Any, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for what Python code in the class computes; where that says that there is no such attribute, ``__getattr__`` is asked."""
    note_asked(obj, name.value, may_be_own=_is_first(found))
    result = get(found, obj)
    return _missing(obj, name, *default) if _is_missing(result) else result


def _get_property(found: property, obj: WrappedValue) -> Any:
    if found.fget is None:
        return do_raise(AttributeError(f"property of {class_of(obj).__name__!r} object has no getter"))
    return _interpret_call(wrap_const(found.fget), obj)


def _get_of_torch(found: GetSetDescriptorType, obj: WrappedValue) -> Any:
    return _read_passing_over(_WHOLE_CLASS, obj, wrap_const(found.__name__))


def _get_slot(found: MemberDescriptorType, obj: WrappedValue) -> Any:
    """A place of ``__slots__`` that the program has put nothing into."""
    name, kind = found.__name__, class_of(obj)
    if obj.original_value is obj.nothing:
        return do_raise(AttributeError(f"{kind.__name__!r} object has no attribute {name!r}"))
    return do_raise(
        UnsupportedSubclassError(
            with_details(
                f"{name!r}, one of the __slots__ of {kind.__name__}, is read of an input",
                at=location_of_user(),
                why="a trace looks at what is in the __dict__ of the tensor in each call",
                instead="a class without __slots__",
            )
        )
    )


def _get_described(found: Any, obj: WrappedValue) -> Any:
    guards.note_descriptor(found)
    return _interpret_call(wrap_const(type(found).__get__), wrap_const(found), obj, wrap_const(class_of(obj)))


def _by_getattribute(asked: FunctionType, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    note_asked(obj, "__getattribute__")
    result = _interpret_call(wrap_const(asked), obj, name)
    return _missing(obj, name, *default) if _is_missing(result) else result


def _is_missing(result: Any) -> bool:
    return result is INTERPRETER_SIGNALS.EXCEPTION_RAISED and isinstance(get_interpreterruntimectx().curexc, AttributeError)


def _missing(obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for what nobody has: the class's ``__getattr__`` is asked, then there is the default."""
    runtime, result = get_interpreterruntimectx(), INTERPRETER_SIGNALS.EXCEPTION_RAISED
    asked = in_classes(own_classes(class_of(obj)), "__getattr__")
    if isinstance(asked, FunctionType):
        runtime.curexc = None
        result = _interpret_call(wrap_const(asked), obj, name)
    if default and _is_missing(result):
        runtime.curexc = None
        return default[0]
    return result


def _of_class(obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    note_asked(obj, name.value)
    return held_by_classes.read(class_of(obj), name, obj.provenance if guards.is_guarded(obj) else None)


def _as_subclass(x: torch.Tensor, cls: Any) -> torch.Tensor:
    return torch.Tensor.as_subclass(x, cls)


# -- setting, deleting and calling --------------------------------------------------------------------------------------------


def setting(obj: WrappedValue, name: Any, *, by_object: bool) -> Callable | None:
    """What to call for `setattr` of a plain tensor whose class has something of its own to say; None otherwise.

    Args:
        obj: the tensor.
        name: of the attribute.
        by_object: whether it is ``object.__setattr__``, which asks no ``__setattr__`` of the class.
    """
    return _changing(obj, name, by_object, "__setattr__", "__set__", _set_property, _set_described)


def deleting(obj: WrappedValue, name: Any, *, by_object: bool) -> Callable | None:
    """The same for `delattr`."""
    return _changing(obj, name, by_object, "__delattr__", "__delete__", _delete_property, _delete_described)


def _changing(
    obj: WrappedValue,
    name: Any,
    by_object: bool,
    of_class: str,
    of_descriptor: str,
    by_property: Callable,
    by_descriptor: Callable,
) -> Callable | None:
    own = own_classes(class_of(obj))
    says = MISSING if by_object else in_classes(own, of_class)
    if isinstance(says, FunctionType):
        return functools.partial(_done, says, of_class)
    found = in_classes(own, name) if isinstance(name, str) else MISSING
    if isinstance(found, property):
        return functools.partial(by_property, found)
    if isinstance(getattr(type(found), of_descriptor, None), FunctionType):
        return functools.partial(by_descriptor, found)
    return None


def _done(method: FunctionType, name: str, obj: WrappedValue, *given: WrappedValue) -> Any:
    note_asked(obj, name)
    return _nothing_of(_interpret_call(wrap_const(method), obj, *given))


def _nothing_of(result: Any) -> Any:
    return result if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrap_const(None)


def _set_property(found: property, obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    if found.fset is None:
        return do_raise(AttributeError(f"property {name.value!r} of {class_of(obj).__name__!r} object has no setter"))
    return _nothing_of(_interpret_call(wrap_const(found.fset), obj, value))


def _set_described(found: Any, obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
    guards.note_descriptor(found)
    return _nothing_of(_interpret_call(wrap_const(type(found).__set__), wrap_const(found), obj, value))


def _delete_described(found: Any, obj: WrappedValue, name: WrappedValue) -> Any:
    guards.note_descriptor(found)
    return _nothing_of(_interpret_call(wrap_const(type(found).__delete__), wrap_const(found), obj))


def _delete_property(found: property, obj: WrappedValue, name: WrappedValue) -> Any:
    if found.fdel is None:
        return do_raise(AttributeError(f"property {name.value!r} of {class_of(obj).__name__!r} object has no deleter"))
    return _nothing_of(_interpret_call(wrap_const(found.fdel), obj))


def call_of(obj: WrappedValue) -> Any:
    """What a tensor's class says to a call of the tensor, ``x(1)``, bound to it."""
    found = operator_of(class_of(obj), "__call__")
    if not isinstance(found, FunctionType):
        return do_raise(TypeError(f"{class_of(obj).__name__!r} object is not callable"))
    return _bound(found, obj, wrap_const("__call__"))


# -- super() --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Above:
    """What stands for ``super()`` in a method of a class, called with a tensor."""

    cls: type
    tensor: TensorProxy


def above(*args: WrappedValue) -> Callable | None:
    """What to call for ``super(*args)``, if that is about a tensor of such a class; None otherwise."""
    of = arguments_of_super(*args)
    if len(of) != 2 or not isinstance(of[0].value, type) or type(of[1].value) is not TensorProxy:
        return None
    cls, obj = of
    if cls.value not in class_of(obj).__mro__:
        return lambda *_: do_raise(TypeError("super(type, obj): obj must be an instance or subtype of type"))
    wrapped = wrap_const(_Above(cls.value, obj.value))
    populate_attribute_wrapper(wrapped, "tensor", obj)
    return lambda *_: wrapped


def arguments_of_super(*args: WrappedValue) -> tuple[WrappedValue, ...]:
    """The arguments of a call of `super`; of one without any those of the method it is in."""
    if args:
        return args
    frame = get_interpreterruntimectx().frame_stack[-1]
    found = {frame.get_localsplus_name(i): v for i, v in enumerate(frame.localsplus)}
    names = ("__class__", frame.code.co_varnames[0] if frame.code.co_argcount else "")
    return tuple([_opened(found[name]) for name in names if isinstance(found.get(name), WrappedValue)])


def _opened(held: WrappedValue) -> WrappedValue:
    is_cell = isinstance(held.value, CellType)
    return _interpret_call(lambda c: c.cell_contents, held) if is_cell else held


def is_above(value: Any) -> bool:
    """Whether a value is what stands for ``super()``."""
    return type(value) is _Above


def read_above(stands: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for ``super().name``."""
    obj = stands.attribute_wrappers["tensor"]
    mro = class_of(obj).__mro__
    found = in_classes(mro[mro.index(stands.value.cls) + 1 :], name.value)
    if found is MISSING:
        if default:
            return default[0]
        return do_raise(AttributeError(f"'super' object has no attribute {name.value!r}"))
    if isinstance(found, _METHODS):
        return _bound(found, obj, name)
    get = _getter(found)
    if get is not None:
        return get(found, obj)
    return wrap_const(found.__get__(None, class_of(obj)) if isinstance(found, classmethod | staticmethod) else found)
