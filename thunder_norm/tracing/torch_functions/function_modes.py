"""Modes that a program enters: ``with Mode():`` of a ``TorchFunctionMode``, whose ``__torch_function__`` is interpreted for each call.

Torch keeps modes in a stack of the process, and would call them for what is done while tracing.  Those of the program are kept here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, GetSetDescriptorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.flop_counter import FlopCounterMode

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.torch_functions.tensor_classes import own_operator
from thunder.core import jit_ext
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

_current = jit_ext._jit_ctx.get
_ENTERED = "_thunder_norm_function_modes"  # of an acquisition: those that the program is in, innermost last

_OFF = "_thunder_norm_function_modes_off"  # of an acquisition: in how many contexts the program is that turn them off


def _entered() -> list[WrappedValue]:
    return vars(get_jit_ctx()).setdefault(_ENTERED, [])


def turn(by: int) -> None:
    """Have no mode be called from here on (1), or end that (-1): ``torch._C.DisableTorchFunction``."""
    state = vars(get_jit_ctx())
    state[_OFF] = state.get(_OFF, 0) + by


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it is a function of torch, and the program is in a mode; None otherwise."""
    if fn is GetSetDescriptorType.__get__ and len(args) > 1 and isinstance(args[1].value, TensorProxy):
        name = wrap_const(args[0].value.__name__)
        return lambda _, obj, *__: _interpret_call(getattr, obj, name)  # what a mode was told, and calls
    state = vars(_current())
    if not state.get(_ENTERED) or state.get(_OFF):
        return None
    if fn is getattr:
        getter = getter_told(*args[:2]) if len(args) > 1 else None
        return None if getter is None else lambda obj, *_: _interpret_call(_in_mode, wrap_const(getter), obj)
    if is_iteration(fn, args):
        return lambda x: _interpret_call(iterated, x)
    function = function_told(fn, args)
    return None if function is None else functools.partial(_interpret_call, _in_mode, wrap_const(function))


def getter_told(obj: WrappedValue, name: WrappedValue) -> Callable | None:
    """What torch tells modes and classes when an attribute of a tensor is read; None where nothing is."""
    if not isinstance(obj.value, TensorProxy) or type(name.value) is not str:
        return None
    found = getattr(torch.Tensor, name.value, None)
    return found.__get__ if type(found) is GetSetDescriptorType and found.__get__ in _told_to_modes() else None


def function_told(fn: Callable, args: Sequence[WrappedValue]) -> Callable | None:
    """What torch tells modes and classes is called: of methods and operators of tensors in a trace, those of torch's."""
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return fn
    name = _name_of(fn)
    if is_iteration(fn, args):
        return None
    if args and isinstance(args[0].value, TensorProxy):
        if isinstance(fn, Symbol) or getattr(type(args[0].value), name, None) is fn:
            fn = getattr(torch.Tensor, name, fn)
        if name.startswith("__") and getattr(torch.Tensor, name, None) is fn is not getattr(object, name, None):
            fn = _told_of_operator(name, len(args))
    try:
        return fn if fn in _told_to_modes() else None
    except TypeError:  # not hashable
        return None


def is_iteration(fn: Any, args: Sequence[WrappedValue]) -> bool:
    """Whether it is what iterates over a tensor, which torch writes with functions that are told."""
    if len(args) != 1 or not isinstance(args[0].value, TensorProxy) or getattr(fn, "__name__", "") != "__iter__":
        return False
    return own_operator(args[0], "__iter__") is not fn


def iterated(x: torch.Tensor) -> Any:
    """Interpreted: as torch writes it."""
    if x.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(x.unbind(0))


def _name_of(fn: Any) -> str:
    """What torch calls a function: of some Thunder's symbol has another name, and an id that ends with torch's."""
    if isinstance(fn, Symbol):
        return fn.id.rpartition(".")[2] if isinstance(fn.id, str) else fn.name
    return getattr(fn, "__name__", "")


@functools.cache
def _told_of_operator(name: str, operands: int) -> Callable:
    """An operator is told as the method that it is: ``x + y`` as ``torch.Tensor.add``."""
    with _First() as first, contextlib.suppress(_FirstCall):
        getattr(torch.Tensor, name)(*[torch.empty((), device="meta")] * operands)
    return getattr(torch.Tensor, name) if first.told is None else first.told


class _FirstCall(Exception):
    """Nothing more is to be done."""


class _First(TorchFunctionMode):
    """Knows which function of torch is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Callable | None = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.empty:
            return func(*args, **(kwargs or {}))
        self.told = func
        raise _FirstCall


@functools.cache
def _told_to_modes() -> frozenset[Callable]:
    listed = frozenset(torch.overrides.get_testing_overrides()) | frozenset(_device_constructors()) | _TOLD_TOO
    of_torch = [(of, name) for of in (torch._C._VariableFunctions, torch._C._nn) for name in dir(of)]
    members = [getattr(of, name) for of, name in of_torch if not hasattr(object, name)]
    written_in_c = {
        f for f in members if isinstance(f, BuiltinFunctionType)
    }  # of which the list has those without "_" in their names
    return listed | (written_in_c - torch.overrides.get_ignored_functions())


_METHODS = "new new_empty new_full new_ones new_tensor new_zeros new_empty_strided stride to_padded_tensor unflatten".split()
_OF_TENSORS = "as_strided fill normal rand_like randint_like randn_like vander".split()
_TOLD_TOO = frozenset(  # which torch's list leaves out
    {torch.autograd.grad, *(getattr(torch.Tensor, name) for name in _METHODS), *(getattr(torch, name) for name in _OF_TENSORS)}
)


def _in_mode(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call the innermost mode, which is not entered meanwhile."""
    mode = torch._C._pop_torch_function_stack()
    try:
        found = mode.__torch_function__(function, tuple(_types([*args, *kwargs.values()])), args, kwargs)
    finally:
        torch._C._push_on_torch_function_stack(mode)
    if found is NotImplemented:
        raise TypeError(f"no implementation found for '{function}' on types that implement __torch_function__: [{type(mode)}]")
    return found


def _types(values: Any) -> list[type]:
    found = []
    for v in values:
        for cls in _types(v) if isinstance(v, (list, tuple)) else [type(v)]:
            is_told = issubclass(cls, torch.Tensor) and cls.__torch_function__ is not torch._C._disabled_torch_function_impl
            if is_told and cls is not torch.Tensor and cls not in found:
                found.append(cls)
    return found


@instead_of(torch._C._push_on_torch_function_stack)
def _enter(mode: WrappedValue) -> WrappedValue:
    if isinstance(mode.value, DeviceContext):  # a default that torch and Thunder ask for
        torch._C._push_on_torch_function_stack(mode.value)
    else:
        _entered().append(mode)
    return wrap_const(None)


@instead_of(torch._C._pop_torch_function_stack)
def _leave() -> WrappedValue:
    return _entered().pop() if _entered() else wrap_const(torch._C._pop_torch_function_stack())


@instead_of(torch._C._len_torch_function_stack)
def _how_many() -> WrappedValue:
    return wrap_const(torch._C._len_torch_function_stack() + len(_entered()))


@instead_of(torch._C._get_function_stack_at)
def _at(place: WrappedValue) -> WrappedValue:
    of_process = torch._C._len_torch_function_stack()
    if place.value < of_process:
        return wrap_const(torch._C._get_function_stack_at(place.value))
    return _entered()[place.value - of_process]


@instead_of(FlopCounterMode.__enter__)  # which enters more, and would be left in that
@instead_of(torch._C._push_on_torch_dispatch_stack)
def _enter_dispatch_mode(mode: WrappedValue) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"{type(mode.value).__name__}, a TorchDispatchMode, inside a jitted function",
                at=location_of_user(),
                why="the program is traced once, without values, in operations that are not those of eager mode",
                instead="enter it around the program in eager mode; or a TorchFunctionMode",
            )
        )
    )
