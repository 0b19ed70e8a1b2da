"""What Thunder's interpreter is told when it meets an object that cannot be taken apart; see `opaque_objects`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.interpreting import opaque_objects
from thunder_norm.subclass.interpreting.attributes import ASKS_FOR_OVERRIDES, METADATA_ATTRIBUTES, from_user
from thunder_norm.subclass.interpreting.opaque_objects import OpaqueProxy, is_opaque_class
from thunder_norm.subclass.interpreting.operations import AUTOGRAD_APPLY, on_proxies, torch_callable
from thunder_norm.subclass.interpreting.plain_operations import written_out
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import wrapped_result
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.wrapper_classes import is_wrapper_class
from thunder.core.interpreter import WrappedValue, do_raise, get_interpreterruntimectx, unwrap
from thunder.core.jit_ext import get_jit_ctx

_READS = (bool, float, int, complex, torch.Tensor.item, torch.Tensor.tolist)


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Callable | None:
    """What to call instead of interpreting `fn`, if such an object takes part in the call, or is made; None for all others."""
    if isinstance(fn, type) and issubclass(fn, torch.Tensor) and is_opaque_class(fn) and not is_wrapper_class(fn):
        return _called(acquisition, fn)
    if not acquisition.opaque.is_met:
        return None
    first = args[0].value if args else None
    found = _about_object(acquisition, fn, args) if isinstance(first, OpaqueProxy) else None
    if found is not None:
        return found
    objects = [v for v in tree_leaves([value_of(a) for a in (*args, *kwargs.values())]) if isinstance(v, OpaqueProxy)]
    if not objects:
        return None
    if fn in ASKS_FOR_OVERRIDES:
        return functools.partial(_has_override, fn)
    if fn is AUTOGRAD_APPLY:
        return lambda cls, *inputs, **options: _called(acquisition, unwrap(cls).apply)(*inputs, **options)
    torch_fn = torch_callable(fn)
    if torch_fn is not None:
        return _called(acquisition, torch_fn)
    if type(fn) is types.FunctionType and any(getattr(type(p.example), fn.__name__, None) is fn for p in objects):
        return _called(acquisition, fn)
    return written_out(fn)


def _called(acquisition: Acquisition, fn: Callable) -> Callable:
    return on_proxies(lambda *args, **kwargs: _call(acquisition, fn, args, kwargs))


def _call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    line = get_interpreterruntimectx().get_current_user_source_location()
    get_jit_ctx().computation_trace.set_current_source_location(*line)
    acquisition.opaque.is_met = acquisition.watches = True
    try:
        if fn is torch.Tensor.__iter__:
            return iter(opaque_objects.call(acquisition, torch.Tensor.unbind, args, kwargs))
        return opaque_objects.call(acquisition, fn, args, kwargs)
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        raise acquisition.refuse(e)  # noqa: B904 - the same exception


def _about_object(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What Python itself asks of an object: attributes, types, values."""
    if fn is getattr and len(args) >= 2:
        return functools.partial(_read_attribute, acquisition)
    if fn is hasattr:
        return lambda obj, name: wrapped_result(hasattr(obj.value.example, unwrap(name)), [obj.provenance, name.provenance])
    if fn in (setattr, delattr, object.__setattr__, object.__delattr__):
        return functools.partial(_refuse_setattr, acquisition)
    if fn is isinstance:
        return lambda obj, cls: wrapped_result(isinstance(obj.value.example, unwrap(cls)), [obj.provenance, cls.provenance])
    if fn is type and len(args) == 1:
        return lambda obj: wrapped_result(type(obj.value.example) if from_user() else OpaqueProxy, [obj.provenance])
    if fn in _READS or torch_callable(fn) in _READS:
        return functools.partial(_refuse_value, acquisition)
    return None


def _read_attribute(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *default: WrappedValue) -> Any:
    """Called for ``getattr(x, name)``."""
    proxy, attribute = obj.value, unwrap(name)
    cls, provenance = type(proxy.example), [obj.provenance, name.provenance]
    found = next((vars(base)[attribute] for base in cls.__mro__ if attribute in vars(base)), None)
    if attribute == "requires_grad":
        return wrapped_result(proxy.requires_grad, provenance)
    if attribute in METADATA_ATTRIBUTES or attribute == "__class__":
        return wrapped_result(getattr(proxy.example, attribute), provenance)
    if isinstance(found, staticmethod | classmethod):
        return wrapped_result(getattr(cls, attribute), provenance)
    if callable(found) and hasattr(type(found), "__get__"):
        return wrapped_result(types.MethodType(found, proxy), provenance)
    if not hasattr(proxy.example, attribute):
        return default[0] if default else do_raise(AttributeError(f"{cls.__name__!r} object has no attribute {attribute!r}"))
    if attribute in ("data", "grad", "__dict__"):
        error = UnsupportedOpError(f".{attribute} of a {cls.__name__} is not available while tracing")
        return do_raise(acquisition.refuse(error))
    return _called(acquisition, _getter(attribute))(obj)


@functools.cache
def _getter(attribute: str) -> Callable:
    def get(x: torch.Tensor) -> Any:
        return getattr(x, attribute)

    get.__name__ = f"get_{attribute}"
    return get


def _has_override(fn: Callable, *args: WrappedValue) -> Any:
    """Called for ``torch.overrides.has_torch_function`` and its like."""

    def example(value: Any) -> Any:
        return value.example if isinstance(value, OpaqueProxy) else value

    values = (tuple(map(example, map(unwrap, a.value))) if type(a.value) in (list, tuple) else example(a.value) for a in args)
    return wrapped_result(fn(*values), [a.provenance for a in args])


def _refuse_setattr(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    cls = type(obj.value.example).__name__
    what = f"attribute {unwrap(name)!r} of a {cls} is set or deleted"
    return do_raise(acquisition.refuse(UnsupportedOpError(with_details(what, at=location_of_user()))))


def _refuse_value(acquisition: Acquisition, obj: WrappedValue, *_: Any, **__: Any) -> Any:
    what = f"the value of a {type(obj.value.example).__name__} was asked for"
    return do_raise(acquisition.refuse(data_dependent_on_wrapper(what)))


def _comparison(name: str) -> Callable:
    def compare(self: OpaqueProxy, other: Any) -> Any:
        """Called by C code, and by Thunder's interpreter, which would take an exception for a crash of its own."""
        acquisition = self.acquisition
        if acquisition is None or acquisition.is_finished:  # a proxy is only ever compared for identity then
            return (self is other) == (name == "__eq__")
        try:
            return _call(acquisition, getattr(torch.Tensor, name), (self, other), {})
        except Exception as e:  # noqa: BLE001 - raised at the interpreter's next call
            acquisition.refused.raise_later(e)
            return self

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(OpaqueProxy, _name, _comparison(_name))
