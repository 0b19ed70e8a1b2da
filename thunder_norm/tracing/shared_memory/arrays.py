"""Tensors that lie in the memory of an array of NumPy: ``torch.from_numpy(a)``, and what else copies nothing.

An array that was there before the call is looked up in each call, and a tensor in its memory is an input of the computation: what it holds
by then is read, and what the program writes arrives in it.  An array that the program makes is numbers in the trace.  What NumPy itself does with
either it does while the trace is acquired, before the program writes anything: that is refused where it would see, or be, another number.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from thunder_norm.context_variables import setting
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.ways import MEMORY
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.shared_memory import aliases
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    wrap,
    wrap_const,
)
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx

_MAKERS: dict[Any, bool] = {  # and whether they always share the memory of an array
    torch.from_numpy: True,
    torch.from_dlpack: True,
    torch.as_tensor: False,
    torch.asarray: False,
    torch.tensor: False,
}


_LOOK_AT_NO_ITEM = frozenset(map(id, (isinstance, type, hasattr, callable, id)))


@dataclass
class _Shared:
    """An array, and the tensor in its memory."""

    array: np.ndarray
    then: bytes
    tensor: TensorProxy
    location: str | None
    is_given: bool  # and was there before the call
    is_used: bool = False  # since the tensor was made


@dataclass
class _Arrays:
    """What the program of one acquisition does with arrays."""

    shared: list[_Shared] = field(default_factory=list)
    used: dict[int, np.ndarray] = field(default_factory=dict)  # that NumPy was given, by their ids


_current: contextvars.ContextVar[_Arrays | None] = contextvars.ContextVar("thunder_norm_arrays", default=None)


def noted() -> AbstractContextManager[None]:
    """Note what a program does with arrays meanwhile."""
    return setting(_current, _Arrays())


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it makes a tensor of an array that was there before the call; None for all others."""
    always = look_up(_MAKERS, fn)
    if always is None or not args or not isinstance(args[0].value, np.ndarray) or not guards.is_guarded(args[0]):
        return None
    memory = _memory_of(args[0].value)
    return None if memory is None else functools.partial(_in_memory, None if always else fn, memory)


def _memory_of(array: np.ndarray) -> torch.Tensor | None:
    """A tensor in the memory of an array; None where torch has none, or warns that nobody may write there."""
    if not array.flags.writeable:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return torch.from_numpy(array)
    except (TypeError, ValueError, UserWarning):  # torch says it when it is called
        return None


def _in_memory(convert: Callable | None, memory: torch.Tensor, data: WrappedValue, **kwargs: WrappedValue) -> Any:
    name = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=MEMORY)
    tensor = wrap(memory, provenance=ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[data.provenance, name]))
    _note_shared(data.value, tensor.value, is_given=True)
    if convert is None:
        return tensor
    if convert is torch.tensor:
        return _interpret_call(_copied, tensor, **kwargs)
    if "device" not in kwargs and (device := torch.get_default_device()) != memory.device:
        kwargs["device"] = wrap_const(device)
    return _interpret_call(convert, tensor, **kwargs)


def _copied(
    data: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """``torch.tensor`` of an array."""
    copied = data.clone().to(device=torch.get_default_device() if device is None else device, dtype=dtype)
    return copied.requires_grad_() if requires_grad else copied


def reading_memory(prologue: TraceCtx) -> TraceCtx:
    """The prologue, in which a tensor in the memory of an array is made where it looks for it."""
    if not any(map(_reads_memory, prologue.bound_symbols)):
        return prologue
    new = from_trace(prologue)
    with tracectx(new):
        new.bound_symbols = [
            bindable("memory_of_array", torch.from_numpy)(b.args[0], output=b.output) if _reads_memory(b) else b
            for b in prologue.bound_symbols
        ]
    return new


def _reads_memory(bsym: Any) -> bool:
    return bsym.sym.id is PrimIDs.UNPACK_ATTR and bsym.args[1] == MEMORY


# -- what NumPy does with them ------------------------------------------------------------------------------------------------


def following(found: Callable | None, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call for `fn`, for which `found` is called, so that arrays which it is given are noted."""
    arrays = _current.get()
    if arrays is None:
        return found
    if args and isinstance(args[0].value, np.ndarray) and look_up(_MAKERS, fn) is not None:
        is_made = fn is not torch.tensor and not guards.is_guarded(args[0])
        return functools.partial(_noted, found) if found is not None and is_made else found
    is_interpreted = found is None and isinstance(fn, FunctionType | MethodType)
    if not is_interpreted and id(fn) not in _LOOK_AT_NO_ITEM:
        for value in (getattr(fn, "__self__", None), *[a.value for a in args]):
            for part in value if type(value) in (list, tuple) else (value,):
                array = part.value if isinstance(part, WrappedValue) else part
                if isinstance(array, np.ndarray):
                    _note_used(arrays, array)
    return found


def _noted(found: Callable, data: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    result = found(data, *args, **kwargs)
    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED and isinstance(result.value, TensorProxy):
        _note_shared(data.value, result.value, is_given=False)
    return result


def _note_shared(array: np.ndarray, tensor: TensorProxy, *, is_given: bool) -> None:
    arrays = _current.get()
    if arrays is not None:
        arrays.shared.append(_Shared(array, array.tobytes(), tensor, location_of_user(), is_given))


def _note_used(arrays: _Arrays, array: np.ndarray) -> None:
    arrays.used[id(array)] = array
    for shared in arrays.shared:
        shared.is_used = shared.is_used or np.may_share_memory(array, shared.array)


def check(trace: TraceCtx) -> None:
    """Look at the arrays that the program has made tensors of; of those that were given, and of which NumPy has read nothing, no numbers are guarded.

    Raises:
        UnsupportedOpError: NumPy has changed one since, or the program one that NumPy looks at, or that lies in the memory of another.
    """
    arrays = _current.get()
    if arrays is None or not arrays.shared:
        return
    written = aliases.written(trace)
    for a in arrays.shared:
        if a.array.tobytes() != a.then:
            raise _refused(a, "an array is changed after a tensor was made in its memory")
        if a.tensor.name not in written:
            continue
        others = [b.array for b in arrays.shared if b is not a and not (a.is_given and b.is_given)]
        others += () if a.is_given else guards.arrays_that_were_there()
        if a.is_used or any(np.may_share_memory(a.array, other) for other in others):
            raise _refused(a, "a tensor in the memory of an array is written into, and the array is used again")
    guards.let_change([a.array for a in arrays.shared if a.is_given and id(a.array) not in arrays.used])


def _refused(shared: _Shared, what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            what,
            at=shared.location,
            why="NumPy runs while the trace is acquired, and the program in each call",
            instead="torch.tensor(array), which copies it; or do all of it with tensors",
        )
    )
