"""What torch takes for an argument of an operation, and Thunder does not: NumPy's numbers, Python's types as dtypes, bytes, torch's names."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import get_testing_overrides

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.op_names import PYTHONS_DTYPES
from thunder_norm.tracing.lookasides import look_up
from thunder.core import dtypes
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    wrap,
    wrap_const,
)
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map

_STORE = "_store_subscr_handler"  # what Thunder calls for ``given[1][given[0]] = given[2]``
_CONDITIONS = {torch.where: 0, torch.Tensor.where: 1}  # and where each has its condition
_MAY_HOLD_NUMBERS = (slice, tuple, list, np.generic)
_IN_PYTHON = (types.FunctionType, types.MethodType, torch.nn.Module)
_METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is an operation on tensors that is given such an argument; None for all others."""
    given = (*args, *kwargs.values())
    if any([type(v.value) is type and _is_dtype(v) for v in given]) and (
        _is_operation(fn, given) or getattr(torch, getattr(fn, "__name__", ""), None) is fn
    ):
        return lambda *args, **kwargs: _interpret_call(
            fn, *map(_as_torchs, args), **{k: _as_torchs(v) for k, v in kwargs.items()}
        )
    place: Any = look_up(_CONDITIONS, fn)
    if place is not None and _is_of_bytes(args[place] if place < len(args) else kwargs.get("condition")):
        return functools.partial(_where, fn, place)
    if not any([isinstance(v.value, _MAY_HOLD_NUMBERS) and holds_number(v) for v in given]):
        return None
    if isinstance(fn, _METHODS) and isinstance(args[0].value, np.generic):
        is_with_tensor = fn.__name__.startswith("__") and len(args) == 2 and isinstance(args[1].value, TensorProxy)
        return _left_to_the_tensor if is_with_tensor else None
    if not _is_operation(fn, given):
        return None
    return lambda *args, **kwargs: _interpret_call(fn, *map(as_pythons, args), **{k: as_pythons(v) for k, v in kwargs.items()})


def by_position(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, an operation of which Thunder has other names for what torch demands; None for all others."""
    if not kwargs or not (isinstance(fn, Symbol) or look_up(_torch_to_thunder_function_map, fn) is not None):
        return None
    given, rest = list(args), dict(kwargs)
    for name in _demanded(fn)[len(args) :]:
        if name not in rest:
            return None
        given.append(rest.pop(name))
    return None if len(given) == len(args) else lambda *_, **__: _interpret_call(fn, *given, **rest)


def written_into(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, an operation of which Thunder knows no ``out``, or does not write it; None for all others."""
    if fn is torch.norm and len(args) > _OUT_OF_NORM:
        kwargs = {"out": args[_OUT_OF_NORM], **dict(zip(("dtype",), args[_OUT_OF_NORM + 1 :], strict=False)), **kwargs}
        args = args[:_OUT_OF_NORM]
    if "out" not in kwargs or not isinstance(kwargs["out"].value, TensorProxy):
        return None
    if not (isinstance(fn, Symbol) or fn is torch.norm or look_up(_torch_to_thunder_function_map, fn) is not None):
        return None
    rest = {name: v for name, v in kwargs.items() if name != "out"}
    return lambda *_, **__: _interpret_call(_into, wrap_const(fn), kwargs["out"], *args, **rest)


_OUT_OF_NORM = 4  # where torch.norm has it, which alone takes it by position


def _into(fn: Callable, out: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    made = fn(*args, **kwargs)
    if made.shape != out.shape or made.dtype != out.dtype:
        raise UnsupportedOpError(
            f"out= of another shape or dtype: {list(made.shape)}, {made.dtype} into {list(out.shape)}, {out.dtype}; "
            "use what the operation returns"
        )
    return out.copy_(made)


# What makes a tensor of numbers alone.
_FACTORIES = {
    getattr(torch, name): name
    for name in "zeros ones full empty eye arange range linspace logspace rand randn randint randperm".split()
}
_OF_NEW_MEMORY = frozenset({"out", "requires_grad", "layout", "pin_memory"})  # which what is given has already


def filled(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, where it fills a tensor that is given (``torch.eye(3, out=x)``); None for all others."""
    if "out" not in kwargs or not isinstance(kwargs["out"].value, TensorProxy) or look_up(_FACTORIES, fn) is None:
        return None
    rest = {name: v for name, v in kwargs.items() if name not in _OF_NEW_MEMORY}
    return lambda *_, **__: _interpret_call(_filled, wrap_const(fn), kwargs["out"], *args, **rest)


def _filled(fn: Callable, out: torch.Tensor, /, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if dtype is not None and dtype != out.dtype:
        raise RuntimeError(f"dtype {dtype} does not match dtype of out parameter ({out.dtype})")
    made = fn(*args, dtype=out.dtype, device=out.device, **kwargs)
    if made.shape != out.shape:
        raise UnsupportedOpError(
            f"out= of another shape: {list(made.shape)} into {list(out.shape)}, which is resized; use what the operation returns"
        )
    return out if fn is torch.empty else out.copy_(made)


@functools.cache
def _demanded(fn: Callable) -> tuple[str, ...]:
    """The parameters without a default that torch has first, in order."""
    if fn is torch.where:
        return "condition", "input", "other"
    torchs = getattr(torch.Tensor, fn.name, None) if isinstance(fn, Symbol) else fn
    written = get_testing_overrides().get(torchs)
    parameters = () if written is None else inspect.signature(written).parameters.values()
    demanded = itertools.takewhile(lambda p: p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD, parameters)
    return tuple(p.name for p in demanded)


def _is_dtype(value: WrappedValue) -> bool:
    return type(value.value) is type and value.value in PYTHONS_DTYPES


def _as_torchs(value: WrappedValue) -> WrappedValue:
    if not _is_dtype(value):
        return value
    return wrap(PYTHONS_DTYPES[value.value], provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[value.provenance]))


def _where(fn: Callable, place: int, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``torch.where`` and the method, where the condition is of bytes: all but 0 are true."""
    condition = args[place] if place < len(args) else kwargs["condition"]
    rest = {name: v for name, v in kwargs.items() if v is not condition}
    truth = _interpret_call(lambda bytes_: bytes_ != 0, condition)
    if truth is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return truth
    before, after = args[:place], args[place + 1 :]
    return _interpret_call(fn, *before, truth, *after, **rest)


def _is_of_bytes(value: WrappedValue | None) -> bool:
    return value is not None and isinstance(value.value, TensorProxy) and value.value.dtype is dtypes.uint8


def _left_to_the_tensor(*_: WrappedValue) -> WrappedValue:
    """What ``number * x`` of NumPy says for a tensor x, whose ``__array_priority__`` is higher."""
    return wrap_const(NotImplemented)


def holds_number(value: Any) -> bool:
    """Whether a value is a number of NumPy, or a tuple, list or slice with one in it."""
    held = value.value if isinstance(value, WrappedValue) else value
    if isinstance(held, slice):
        return any(isinstance(v, np.generic) for v in (held.start, held.stop, held.step))
    if type(held) in (tuple, list):
        return any(map(holds_number, held))
    return isinstance(held, np.generic)


def _is_operation(fn: Callable, given: tuple[WrappedValue, ...]) -> bool:
    if isinstance(fn, Symbol) or look_up(_torch_to_thunder_function_map, fn) is not None:
        return True
    if not any(isinstance(v.value, TensorProxy) for v in given) or fn in (getattr, setattr):
        return False
    owner = getattr(fn, "__objclass__", None) or fn
    if getattr(owner, "__qualname__", "").startswith(_STORE):
        return isinstance(given[1].value, TensorProxy)  # otherwise a key is what it is
    module = getattr(owner, "__module__", None) or ""
    if module == thunders.__name__ and any(isinstance(v.value, list) for v in given):
        return False  # its helpers change lists that they are given
    root = module.partition(".")[0]
    if root == "torch" and isinstance(fn, _IN_PYTHON) and fn not in get_testing_overrides():
        return False  # no operation: it is interpreted, and may call the user's functions
    return root in ("torch", "thunder")


def as_pythons(value: WrappedValue) -> WrappedValue:
    """A number of Python for one of NumPy, also inside of tuples, lists and slices; all else as it is."""
    if not holds_number(value):
        return value
    return wrap(_converted(value.value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[value.provenance]))


def _converted(held: Any) -> Any:
    if isinstance(held, slice):
        return slice(*map(_converted, (held.start, held.stop, held.step)))
    if type(held) in (tuple, list):
        return type(held)(map(_converted, held))
    if isinstance(held, np.bool_):  # for torch a number with a fraction, and no flag
        return float(held)
    return held.item() if isinstance(held, np.generic) else held
