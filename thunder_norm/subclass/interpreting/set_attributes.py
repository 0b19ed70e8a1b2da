"""What happens where a program sets or deletes an attribute of a wrapper."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import NothingWrittenWarning, UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward import set_attributes, users_attributes
from thunder_norm.subclass.backward.given_attributes import is_gradient_torchs
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.wrapper_classes import flattened, overrides_torch_function
from thunder.core import interpreter
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise, unwrap, wrap_const
from thunder.core.proxies import TensorProxy


def lookaside(acquisition: Acquisition, fn: Callable, obj: WrappedValue, name: WrappedValue, *value: WrappedValue) -> Any:
    """Called where an attribute of a wrapper is set, or deleted if there is no value.

    ``x.data = value`` gives x the metadata of the value, in eager mode, and nothing that is inside of it.  ``x.requires_grad = value`` is
    a call of the method, but for a class that has all such calls in its `__torch_function__` and no method of its own.
    """
    cls, attribute = type(obj.value.fake), unwrap(name)
    if attribute == "requires_grad" and value and _has_flag_by_method(cls):
        return _nothing_of(interpreter._interpret_call(_set_flag, obj, *value))
    if attribute == "data":
        return _set_data(acquisition, obj, name, *value)
    own = cls.__setattr__ if value else cls.__delattr__
    if fn in (setattr, delattr) and isinstance(own, types.FunctionType):
        return _nothing_of(interpreter._interpret_call(own, obj, name, *value))
    descriptor = in_classes(cls.__mro__, attribute, None)
    if isinstance(descriptor, property) and descriptor is not vars(torch.Tensor).get(attribute):
        accessor = descriptor.fset if value else descriptor.fdel
        if accessor is None:
            what = "setter" if value else "deleter"
            return do_raise(AttributeError(f"property {attribute!r} of {cls.__name__!r} object has no {what}"))
        return _nothing_of(interpreter._interpret_call(accessor, obj, *value))
    is_gradient = attribute == "grad" and descriptor is torch.Tensor.grad and is_gradient_torchs(acquisition, obj.value.fake)
    if is_gradient and not value:
        value = (wrap_const(None),)
    is_plain = is_gradient or not hasattr(type(descriptor), "__set__") or isinstance(descriptor, types.MemberDescriptorType)
    why = acquisition.hindrance_to_attributes(obj.value.fake) if is_plain else "it is torch's"
    if is_jagged_class(cls) and (attribute in flattened(obj.value.fake)[0] or attribute.startswith("_")):
        why = "it is torch's"
    if why is not None:
        return _refuse(acquisition, obj, attribute, why, "make a new instance")
    try:
        is_users = not value and users_attributes.is_there(acquisition, obj, name)
        set_attributes.put(acquisition, obj.value, attribute, *value, is_users=is_users)
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        return do_raise(acquisition.refuse(e))
    except Exception as e:  # noqa: BLE001 - what Python says is the program's to handle
        return do_raise(e)
    return wrap_const(None)


def _nothing_of(result: Any) -> Any:
    return result if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED else wrap_const(None)


def _refuse(acquisition: Acquisition, obj: WrappedValue, attribute: str, why: str, instead: str) -> Any:
    what = f"attribute {attribute!r} of a {type(obj.value.fake).__name__} is set or deleted"
    return do_raise(acquisition.refuse(UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead=instead))))


def _has_flag_by_method(cls: type[torch.Tensor]) -> bool:
    return not overrides_torch_function(cls) or cls.requires_grad_ is not torch.Tensor.requires_grad_


def _set_flag(tensor: torch.Tensor, value: bool) -> None:
    tensor.requires_grad_(value)


def _set_data(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *value: WrappedValue) -> Any:
    cls = type(obj.value.fake).__name__
    why = "in eager mode its metadata become those of the value, and what is inside of it stays what it was"
    instead = "write into it, wrapper.copy_(value) under torch.no_grad(), or make a new instance"
    if not value or not _has_metadata_of(acquisition, obj.value.fake, value[0].value):
        return _refuse(acquisition, obj, "data", why, instead)
    warnings.warn(
        with_details(f".data of a {cls} is set, which changes nothing", at=location_of_user(), why=why, instead=instead),
        NothingWrittenWarning,
        stacklevel=2,
    )
    return wrap_const(None)


def _has_metadata_of(acquisition: Acquisition, fake: torch.Tensor, value: Any) -> bool:
    if overrides_torch_function(type(fake)) or not isinstance(value, TensorProxy):
        return False
    is_wrapped = isinstance(value, SubclassProxy)
    like = value.fake if is_wrapped else _plain_known(acquisition, value)
    if like is None:  # Thunder computed it: nobody knows its strides
        return False
    found = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.layout) for t in (fake, like)]
    return found[0] == found[1]


def _plain_known(acquisition: Acquisition, proxy: TensorProxy) -> torch.Tensor | None:
    known = acquisition.fakes.known(proxy)
    return acquisition.fakes.real_input(proxy) if known is None else known
