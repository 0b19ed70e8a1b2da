"""Classes derived from torch.Tensor that do not dispatch: in a trace their tensors are plain ones, with the methods that the class has.

Operations are torch's: a ``__torch_function__`` of the class sees them when the trace runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise, populate_attribute_wrapper, wrap_const
from thunder.core.proxies import TensorProxy

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_OF_TENSORS = frozenset(torch.Tensor.__mro__) | _PLAIN
_AS_TORCHS = frozenset(
    {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "data", "grad"}
)  # libraries make them faster


def method(obj: WrappedValue, name: Any) -> Callable | None:
    """What to call for `getattr` of an input whose class has a method or property of its own under `name`; None otherwise."""
    if name == "as_subclass" and type(obj.value) is TensorProxy:
        return refused
    cls = type(obj.original_value)
    if cls in _PLAIN or type(obj.value) is not TensorProxy or not _is_plain_class(cls) or name in _AS_TORCHS:
        return None
    found = in_classes(_own(cls), name)
    if isinstance(found, FunctionType):
        return functools.partial(_bound, found)
    if isinstance(found, property) and found.fget is not None:
        return functools.partial(_computed, found.fget)
    return None if found is MISSING else functools.partial(_of_class, cls)


def makes_one(fn: Callable, args: Sequence[WrappedValue]) -> bool:
    """Whether a call makes a tensor of such a class of one that a trace has: a method of torch's that is called by its name, or the class."""
    if fn is torch.Tensor.as_subclass:
        return any(type(a.value) is TensorProxy for a in args[:1])
    if fn is torch.Tensor._make_subclass:
        return len(args) > 1 and type(args[1].value) is TensorProxy and _is_plain_class(args[0].value)
    if not isinstance(fn, type(torch.Tensor)) or fn in _PLAIN or not _is_plain_class(fn):
        return False
    return in_classes(_own(fn), "__new__") is MISSING and any(type(a.value) is TensorProxy for a in args)


def operators_of(cls: type) -> list[str]:
    """The operators of torch's tensors that a class without dispatch has written anew: a trace does torch's."""
    return [name for base in _own(cls) for name in vars(base) if name in _OPERATORS] if _is_plain_class(cls) else []


def _is_plain_class(cls: type) -> bool:
    return issubclass(cls, torch.Tensor) and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _own(cls: type) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if base not in _OF_TENSORS)


def refused(*_: WrappedValue, **__: WrappedValue) -> Any:
    """Called for what makes a tensor of such a class in a program."""
    return do_raise(
        UnsupportedSubclassError(
            with_details(
                "as_subclass of a tensor in a jitted function: one of a class without __torch_dispatch__ is made",
                at=location_of_user(),
                why="a trace has plain tensors and those that classes with a __torch_dispatch__ hold",
                instead="x.as_subclass(torch.Tensor) of what the function is given, or of what it returns",
            )
        )
    )


def _noted(obj: WrappedValue) -> None:
    guards.note(obj, "type", None, type(obj.original_value))


def _bound(function: FunctionType, obj: WrappedValue, *_: WrappedValue) -> WrappedValue:
    _noted(obj)
    bound = wrap_const(MethodType(function, obj.value))
    populate_attribute_wrapper(bound, "__self__", obj)
    return bound


def _computed(getter: Callable, obj: WrappedValue, *_: WrappedValue) -> Any:
    _noted(obj)
    return _interpret_call(getter, obj)


def _of_class(cls: type, obj: WrappedValue, name: WrappedValue, *_: WrappedValue) -> Any:
    _noted(obj)
    return _interpret_call(getattr, wrap_const(cls), name)


_OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
    for prefix in ("", "r", "i")
) | {
    f"__{name}__"
    for name in "lt le gt ge eq ne neg pos abs invert getitem setitem bool int float index len iter contains".split()
}
