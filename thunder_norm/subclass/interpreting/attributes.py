"""What a program is told when it asks tensors for attributes and types, or Python for what a wrapper is."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.lengths import as_number
from thunder_norm.subclass.backward import given_attributes, tensor_hooks, users_attributes
from thunder_norm.subclass.backward.set_attributes import Held
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting.operations import call
from thunder_norm.subclass.recording import trace
from thunder_norm.tracing.guarding import held_by_classes
from thunder_norm.tracing.guarding.classes import MISSING
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.torch_functions.class_members import arguments_of_super
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.tracing.torch_functions.tensor_classes import operator_of
from thunder_norm.wrapper_classes import is_wrapper, overrides_torch_function
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    unwrap,
    wrap_const,
)


def from_user() -> bool:
    """Whether the call comes from the program, not from Thunder's own Python (the interpreter's, its backend for einops)."""
    frame = get_interpreterruntimectx().peek_frame_stack()
    return frame is None or (frame.module or "").partition(".")[0] != "thunder"


def address_refused(name: str) -> UnsupportedOpError:
    """The error for a program that asks where a tensor is."""
    return UnsupportedOpError(
        with_details(f"{name}() of a tensor", at=location_of_user(), why="there is no memory yet while the trace is acquired")
    )


def read_attribute(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for ``getattr(x, name)`` with a wrapper x."""
    cls, runtime = type(obj.value.fake), get_interpreterruntimectx()
    if cls.__getattribute__ is object.__getattribute__:
        return _read(acquisition, obj, name, *default)
    found: Any = INTERPRETER_SIGNALS.EXCEPTION_RAISED
    for reader in filter(None, (cls.__getattribute__, getattr(cls, "__getattr__", None))):
        runtime.curexc = None  # an AttributeError of the one before
        found = _interpret_call(reader, obj, name)
        if found is not INTERPRETER_SIGNALS.EXCEPTION_RAISED or not isinstance(runtime.curexc, AttributeError):
            return found
    if not default:
        return found
    runtime.curexc = None
    return default[0]


def _read(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """``x.name`` as Python finds it, whatever the class's ``__getattribute__`` would do."""
    proxy, attribute = obj.value, unwrap(name)
    try:
        is_torchs = not overrides_torch_function(type(proxy.fake)) or (
            attribute == "grad" and given_attributes.is_gradient_torchs(acquisition, proxy.fake)
        )
        is_torchs = is_torchs or attribute == "is_leaf"  # which the class, asked about the input, says or leaves to torch
        found = given_attributes.of_wrapper(acquisition, obj, attribute) if is_torchs else None
        found = users_attributes.of_user(acquisition, obj, name) if found is None else found
        if found is not None:
            return found
        if held_by_classes.is_held(_of_class_alone(proxy.fake, attribute)):
            cls = type(proxy.fake)
            given = [p.history for p in (proxy, *acquisition.wrappers.inputs()) if type(p.fake) is cls and p.history is not None]
            return held_by_classes.read(cls, name, given[0] if given else None)
        value = attribute_of(acquisition, proxy, attribute)
        if type(value) is Held:
            return value.wrapped
    except AttributeError as e:
        return default[0] if default else do_raise(e)
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        return do_raise(acquisition.refuse(e))
    except Exception as e:  # noqa: BLE001 - what the property raises is the program's to handle
        return do_raise(e)
    return wrapped_result(value, [obj.provenance, name.provenance])


def _of_class_alone(fake: torch.Tensor, name: str) -> Any:
    """What the class of a wrapper, and none of torch's, has under a name that the wrapper has not; MISSING if there is nothing."""
    is_asked = name not in vars(fake) and type(fake).__getattribute__ is object.__getattribute__
    return operator_of(type(fake), name) if is_asked else MISSING


def read_own(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for ``object.__getattribute__(x, name)``, ``super().__getattribute__(name)`` too: ``x.name`` without the class's ``__getattr__``."""
    fake, attribute = obj.value.fake, unwrap(name)
    if not (attribute in vars(fake) or any(attribute in vars(base) for base in type(fake).__mro__)):
        return do_raise(AttributeError(f"{type(fake).__name__!r} object has no attribute {attribute!r}"))
    return _read(acquisition, obj, name)


@dataclass(frozen=True)
class _Above:
    """What ``super()`` is in a method of a wrapper's class: what classes after one say of the wrapper."""

    cls: type
    proxy: SubclassProxy


def above(*args: WrappedValue) -> WrappedValue | None:
    """What ``super(*args)`` is for the program, if that is about a wrapper; of no arguments those of the method it is called in."""
    args = arguments_of_super(*args)
    if len(args) != 2 or not isinstance(args[0].value, type) or not isinstance(args[1].value, SubclassProxy):
        return None
    return wrapped_result(_Above(args[0].value, args[1].value), [a.provenance for a in args])


def read_above(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for ``super().name`` where `above` stands for ``super()``."""
    proxy, mro = obj.value.proxy, type(obj.value.proxy.fake).__mro__
    owner = next((base for base in mro[mro.index(obj.value.cls) + 1 :] if unwrap(name) in vars(base)), None)
    if owner is None:
        return default[0] if default else do_raise(AttributeError(f"'super' object has no attribute {unwrap(name)!r}"))
    found = vars(owner)[unwrap(name)]
    try:
        if hasattr(type(found), "__set__"):
            value = _computed_attribute(acquisition, proxy, unwrap(name), owner, found)
        else:
            value = _class_attribute(acquisition, proxy, found)
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        return do_raise(acquisition.refuse(e))
    except Exception as e:  # noqa: BLE001 - what the property raises is the program's to handle
        return do_raise(e)
    return wrapped_result(value, [obj.provenance, name.provenance])


def is_above(value: Any) -> bool:
    """Whether a value is one of `above`."""
    return type(value) is _Above


def has_attribute(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> Any:
    """Called for ``hasattr(x, name)`` with a wrapper x."""
    if users_attributes.is_there(acquisition, obj, name):
        return wrapped_result(True, [obj.provenance, name.provenance])
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.fakes.mode:
        value = hasattr(obj.value.fake, unwrap(name))
    return wrapped_result(value, [obj.provenance, name.provenance])


def attribute_of(acquisition: Acquisition, proxy: SubclassProxy, name: str) -> Any:
    """``x.name`` for a wrapper: metadata and context as constants, inner tensors as proxies, methods bound to the proxy.

    Raises:
        AttributeError: the class has no such attribute.
        UnsupportedOpError: reading it runs something that cannot be traced.
    """
    fake = proxy.fake
    cls = type(fake)
    if name == "__class__":
        return cls
    if name == "data_ptr" and cls.data_ptr is torch.Tensor.data_ptr:
        raise address_refused(name)
    if name == "_is_view" and cls._is_view is torch.Tensor._is_view:
        raise UnsupportedOpError(
            with_details(f"._is_view() of a {cls.__name__}", at=location_of_user(), instead="x._base is not None")
        )
    if name == "__dict__":
        raise UnsupportedOpError(f"__dict__ of a {cls.__name__} is not available while tracing; read the attributes by name")
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is not None:
        found = vars(owner)[name]
        if hasattr(type(found), "__set__"):  # goes before what the instance holds; all others go after it
            return _computed_attribute(acquisition, proxy, name, owner, found)
        if name not in vars(fake):
            return _class_attribute(acquisition, proxy, found)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.fakes.mode:
        value = getattr(fake, name)
    return to_value(acquisition, value)


def _computed_attribute(acquisition: Acquisition, proxy: SubclassProxy, name: str, owner: type, found: Any) -> Any:
    """The value of a property or of an attribute that torch computes, found in class `owner`."""
    if name in _OF_HISTORY:
        acquisition.follow_held([proxy])
    if name == "retains_grad" and not overrides_torch_function(type(proxy.fake)):
        return tensor_hooks.is_retained(acquisition, proxy)
    if isinstance(found, property) and owner is not torch.Tensor:
        return call(acquisition, found.fget, (proxy,), {})
    if isinstance(found, types.MemberDescriptorType) or (
        name in METADATA_ATTRIBUTES and not overrides_torch_function(type(proxy.fake))
    ):
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), acquisition.fakes.mode:
            value = getattr(proxy.fake, name)
        return to_value(acquisition, value)
    if name == "data" and not overrides_torch_function(type(proxy.fake)):  # torch asks the class to detach it
        return call(acquisition, torch.Tensor.data.__get__, (proxy,), {})
    if name == "grad" and given_attributes.is_gradient_torchs(acquisition, proxy.fake):
        is_set = name in acquisition.wrappers.attributes.get(id(proxy.fake), ())
        with torch._C.DisableTorchFunctionSubclass():  # see `given_attributes` for inputs
            return to_value(acquisition, proxy.fake.grad) if is_set else None
    if name == "_base" and not overrides_torch_function(type(proxy.fake)):
        return _base_of(acquisition, proxy)
    if name in ("grad", "_base"):
        raise UnsupportedOpError(f".{name} of a {type(proxy.fake).__name__} is not available while tracing")
    return call(acquisition, found.__get__, (proxy,), {})


def _base_of(acquisition: Acquisition, proxy: SubclassProxy) -> Any:
    """What a wrapper that the program computes is a view of."""
    with torch._C.DisableTorchFunctionSubclass():
        base = proxy.fake._base
    known = None if base is None else acquisition.wrappers.proxy_of(base)
    real = None if known is None else acquisition.fakes.real_input(known)
    if real is not None and real._base is not None:
        raise UnsupportedOpError(
            with_details("._base of a view of an input that is a view itself", at=location_of_user(), instead="ask the input")
        )
    return to_value(acquisition, base)


def _class_attribute(acquisition: Acquisition, proxy: SubclassProxy, found: Any) -> Any:
    """What the class holds under the name of an attribute that the instance does not hold, as Python hands it out."""
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, type(proxy.fake))
    if isinstance(found, functools.partial) and sys.version_info < (3, 14):
        return found  # which is no method before; Python 3.13 has a `__get__` for the warning that it will be one
    if callable(found) and hasattr(type(found), "__get__"):
        return types.MethodType(found, proxy)
    if hasattr(type(found), "__get__"):  # functools.cached_property and other computed attributes
        return call(acquisition, found.__get__, (proxy,), {})
    return to_value(acquisition, found)


METADATA_ATTRIBUTES = frozenset(
    "shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_leaf names itemsize nbytes is_nested is_sparse "
    "is_quantized grad_fn retains_grad is_mkldnn is_mps is_xpu is_xla".split()
)

_OF_HISTORY = frozenset({"requires_grad", "is_leaf", "grad_fn"})


def to_value(acquisition: Acquisition, value: Any) -> Any:
    """A value read from a fake wrapper, as the interpreter should see it."""
    if is_wrapper(value):
        known = acquisition.wrappers.proxy_of(value)
        return trace.open_inner_wrapper(acquisition, value) if known is None else known
    if isinstance(value, FakeTensor):
        proxy = acquisition.fakes.proxy_of(value)
        if proxy is None:
            raise UnsupportedOpError("an attribute holds a tensor that is none of those the wrapper is taken apart into")
        acquisition.fakes.hold(value)
        return proxy
    if isinstance(value, (list, dict, set)) and users_attributes.contents(value) is not None:
        return value  # what the program puts into it, operations find there
    if type(value) in (list, tuple):
        return type(value)(to_value(acquisition, v) for v in value)
    if type(value) is dict:
        return {key: to_value(acquisition, v) for key, v in value.items()}
    return as_number(value)


ASKS_FOR_OVERRIDES = (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
)


def has_override(acquisition: Acquisition, fn: Callable, *args: WrappedValue) -> Any:
    """Called for ``torch.overrides.has_torch_function`` and its like."""
    values = (tuple(unwrap(v) for v in a.value) if type(a.value) in (list, tuple) else a.value for a in args)
    return wrapped_result(fn(*(acquisition.to_fake(v) for v in values)), [a.provenance for a in args])


def is_instance(obj: WrappedValue, cls: WrappedValue) -> Any:
    """Called for ``isinstance(x, cls)`` with a wrapper x."""
    result = isinstance(obj.value.fake, unwrap(cls))
    return wrapped_result(result, [obj.provenance, cls.provenance])


def type_of(obj: WrappedValue) -> Any:
    """Called for ``type(x)`` with a wrapper x."""
    # the interpreter itself looks operators up on the type and must find the proxy's
    result = type(obj.value.fake) if from_user() else type(obj.value)
    return wrapped_result(result, [obj.provenance])


def _compare(name: str, a: SubclassProxy, b: Any) -> Any:
    """A comparison: the interpreter evaluates it natively, where an exception would be taken for a crash."""
    acquisition = a.acquisition
    try:
        return call(acquisition, getattr(torch.Tensor, name), (a, b), {})
    except Exception as e:  # noqa: BLE001 - raised at the interpreter's next call
        acquisition.refused.raise_later(e)
        return a


def _native(name: str, proxy: SubclassProxy, *args: Any) -> Any:
    """A special method that C code (sum, max, operator.add, ...) calls on a proxy."""
    if name in _COMPARISONS and not proxy.is_live:  # after the acquisition a proxy is only ever compared for identity
        return (proxy is args[0]) == (name == "__eq__")
    own = operator_of(type(proxy.fake), name)
    if isinstance(own, types.FunctionType):
        return _interpreted(own, proxy, *args)
    if name in _CONVERSIONS:
        what = "used as a condition" if name == "__bool__" else f"turned into a Python {name.strip('_')}"
        raise proxy.acquisition.refuse(data_dependent_on_wrapper(f"a {type(proxy.fake).__name__} was {what}"))
    if name in _COMPARISONS:
        return _compare(name, proxy, *args)
    return call(proxy.acquisition, getattr(torch.Tensor, name), (proxy, *args), {})


def _interpreted(method: types.FunctionType, *args: Any) -> Any:
    """What a method of the user's says, called from C code."""
    result = _interpret_call(wrap_const(method), *map(wrap_const, args))
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        runtime = get_interpreterruntimectx()
        error, runtime.curexc = runtime.curexc, None
        raise error
    return unwrap(result)


_COMPARISONS = frozenset("__lt__ __le__ __gt__ __ge__ __eq__ __ne__".split())
_CONVERSIONS = frozenset("__bool__ __int__ __float__ __complex__ __index__".split())

SubclassProxy.run_special_method = staticmethod(_native)
