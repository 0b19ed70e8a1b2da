"""Tensors that a program makes of lists, and by calling a class: ``torch.tensor([x.sum(), 2])``, ``torch.LongTensor(2, 3)``.

They are written as the functions that do the same: what makes tensors in C knows no proxies, and Thunder nothing but numbers in lists.
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of, look_up
from thunder_norm.tracing.torch_functions import tensor_classes
from thunder.core import devices, dtypes
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it makes a tensor, of a sequence say, as Thunder does not; None for all others."""
    if fn is torch.Tensor._make_subclass and args and issubclass(args[0].value, torch.nn.Parameter):
        return _refuse_parameter
    of_class = tensor_classes.making(fn, args, _of_any_class)
    if of_class is not None:
        return of_class
    if fn is torch.Tensor.new and args and type(args[0].value) is TensorProxy:
        return _new
    place: Any = 1 if isinstance(fn, Symbol) and fn.name == "new_tensor" else look_up(_OF_SEQUENCES, fn)
    if place is None:
        return None
    if len(args) == place and (name := "obj" if fn is torch.asarray else "data") in kwargs:
        rest = {k: v for k, v in kwargs.items() if k != name}
        return lambda *_, **__: _interpret_call(fn, *args, kwargs[name], **rest)
    if len(args) <= place:
        return None
    data = args[place]
    held = _held(data.value)
    if fn is torch.as_tensor and type(held) in (TensorProxy, bool, int, float, complex):
        return functools.partial(_interpret_call, _converted if type(held) is TensorProxy else torch.tensor)
    if fn is torch.asarray and type(held) is TensorProxy and "requires_grad" in kwargs and not unwrap(kwargs["requires_grad"]):
        return _detached
    if isinstance(held, range) or (_is_read_as_list(held) and fn is not torch.asarray):  # which takes the memory
        listed = wrap(list(held), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[data.provenance]))
        return lambda *_, **__: _interpret_call(fn, *args[:place], listed, *args[place + 1 :], **kwargs)
    if not isinstance(held, list | tuple | np.generic):
        return None
    leaves = list(_leaves(held))
    if any(isinstance(v, TensorProxy) for v in leaves):
        return functools.partial(_of_parts, place, leaves, _shape(held))
    own = None if place else _values_of_numpy(leaves)  # what a tensor makes has its dtype
    if own is None or "dtype" in kwargs:
        is_of_numbers = fn is torch.as_tensor and all(isinstance(v, bool | int | float | complex) for v in leaves)
        return functools.partial(_interpret_call, torch.tensor) if is_of_numbers else None
    return lambda *_, **__: _interpret_call(fn, *args, **kwargs, dtype=wrap_const(own))


def _refuse_parameter(*_: WrappedValue, **__: WrappedValue) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                "a parameter that the program makes",
                at=location_of_user(),
                why="the parameters of a trace are those that its modules have when it is acquired",
                instead="a tensor in its place; or, to change one, with torch.no_grad(): self.weight.copy_(value)",
            )
        )
    )


def _converted(data: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """``torch.as_tensor`` of a tensor."""
    return data if dtype is None and device is None else data.to(device=device, dtype=dtype)


def _detached(obj: WrappedValue, requires_grad: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``torch.asarray(x, requires_grad=False)``."""
    return _interpret_call(_without_history, obj, **kwargs)


def _without_history(obj: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None, copy: Any = None) -> torch.Tensor:
    if not obj.requires_grad:
        return torch.asarray(obj, dtype=dtype, device=device, copy=copy)
    is_copied = copy or dtype not in (None, obj.dtype) or (device is not None and torch.device(device) != obj.device)
    if obj.is_leaf and not is_copied:  # torch hands a leaf back, and it requires none from then on
        return obj.requires_grad_(False)
    return torch.asarray(obj.detach(), dtype=dtype, device=device, copy=copy)


def _of_parts(place: int, leaves: list[Any], shape: tuple[int, ...], *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for a sequence with tensors of one entry in it, which torch reads as numbers."""
    dtype = unwrap(kwargs.pop("dtype")) if "dtype" in kwargs else None
    if place:  # a method
        dtype = dtypes.to_torch_dtype(args[0].value.dtype) if dtype is None else dtype
        kwargs.setdefault("device", wrap_const(devices.to_torch_device(args[0].value.device)))
    dtype = functools.reduce(torch.promote_types, map(_dtype_of, leaves)) if dtype is None else dtype
    if any(isinstance(v, TensorProxy) and math.prod(v.shape) != 1 for v in leaves):
        return do_raise(ValueError("only one element tensors can be converted to Python scalars"))
    return _interpret_call(_stacked, args[place], wrap_const(dtype), wrap_const(shape), **kwargs)


def _stacked(
    data: Any, dtype: torch.dtype, shape: tuple[int, ...], device: Any = None, requires_grad: bool = False
) -> torch.Tensor:
    parts = [
        v.detach().reshape(()).to(dtype) if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=dtype) for v in _flat(data)
    ]
    made = torch.stack(parts).reshape(shape).to(torch.get_default_device() if device is None else device)
    return made.requires_grad_() if requires_grad else made


def _flat(data: Any) -> list[Any]:
    return [leaf for item in data for leaf in _flat(item)] if isinstance(data, (list, tuple)) else [data]


def _held(value: Any) -> Any:
    value = value.value if isinstance(value, WrappedValue) else value
    return type(value)(map(_held, value)) if type(value) in (list, tuple) else value


def _is_read_as_list(held: Any) -> bool:
    """Whether torch takes one number after the other out of an array."""
    return isinstance(held, (array.array, bytearray)) or (isinstance(held, memoryview) and held.ndim == 1)


def _leaves(held: Any) -> Iterator[Any]:
    if isinstance(held, list | tuple):
        for v in held:
            yield from _leaves(v)
    else:
        yield held


def _shape(held: Any) -> tuple[int, ...]:
    return (len(held), *(_shape(held[0]) if held else ())) if isinstance(held, list | tuple) else ()


def _dtype_of(leaf: Any) -> torch.dtype:
    if isinstance(leaf, TensorProxy):
        return dtypes.to_torch_dtype(leaf.dtype)
    with _disable_current_modes():
        return torch.tensor(leaf.value if isinstance(leaf, NumberProxy) else leaf).dtype


def _values_of_numpy(leaves: list[Any]) -> torch.dtype | None:
    """The dtype that torch finds for numbers of which one is NumPy's."""
    if not any(isinstance(v, np.generic) for v in leaves):
        return None
    return functools.reduce(torch.promote_types, map(_dtype_of, leaves))


_OF_SEQUENCES: dict[Any, Any] = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}


# -- classes ----------------------------------------------------------------------------------------------------------


def _of_class(cls: Any, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for a tensor class: with sizes, with numbers in lists, or with a tensor.

    What torch says of numbers, which it takes otherwise than ``torch.tensor`` does, is asked of the class itself.
    """
    return _made(cls, _like(cls), None if cls is torch.Tensor else cls.dtype, *args, **kwargs)


_of_any_class = functools.partial(_of_class, torch.Tensor)


def _new(x: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``x.new(...)``, which is its class with its dtype and device: of a ``torch.Size`` sizes, of a list numbers."""
    dtype, device = dtypes.to_torch_dtype(x.value.dtype), devices.to_torch_device(x.value.device)
    with _disable_current_modes():
        as_data = torch.empty(0, dtype=dtype).new
    return _made(as_data, wrap_const((dtype, str(device))), dtype, *args, **kwargs)


def _made(cls: Any, like: WrappedValue, dtype: torch.dtype | None, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    if len(args) > 1 or "size" in kwargs or (args and type(unwrap(args[0])) in (int, torch.Size)):
        return _interpret_call(_empty, like, *args, **kwargs)
    if not args and "data" not in kwargs:
        return _interpret_call(_empty, like, wrap_const(0), **kwargs)
    data = args[0] if args else kwargs["data"]
    if isinstance(data.value, TensorProxy):
        return _interpret_call(_alias, wrap_const(dtype), data)
    held = unwrap(data)
    if not any(isinstance(v, TensorProxy | NumberProxy | torch.Tensor) for v in tree_leaves(held)):
        try:
            with _disable_current_modes():
                held = cls(held)
        except Exception as e:  # noqa: BLE001 - the program's
            return do_raise(e)
        data = wrap_const(held.tolist()) if held.numel() else wrap_const(torch.Size(held.shape))
        if not held.numel():
            return _interpret_call(_empty, like, data)
    return _interpret_call(_of_numbers, like, data)


def _like(cls: Any) -> WrappedValue:
    """The dtype and device of what a class makes; of ``torch.Tensor`` they are the defaults at the call."""
    if cls is not torch.Tensor:
        return wrap_const((cls.dtype, "cuda" if cls.is_cuda else "cpu"))
    return wrap_const((torch.get_default_dtype(), str(torch._C._get_default_device())))


def _empty(like: tuple, *size: Any, **named: Any) -> torch.Tensor:
    dtype, device = like
    size = named.pop("size", size)
    if len(size) == 1 and not isinstance(size[0], int):
        size = size[0]
    return torch.empty(tuple(size), dtype=dtype, device=named.get("device", device))


def _of_numbers(like: tuple, data: Any) -> torch.Tensor:
    dtype, device = like
    return torch.tensor(data, dtype=dtype, device=device)


def _alias(dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"expected a tensor of {dtype}, got one of {tensor.dtype}")
    return tensor.view(tensor.shape)


@instead_of(torch.autograd.Variable)
def _variable(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``torch.autograd.Variable(x)``, which has been another name of x's memory, without its history, since there are no Variables."""
    return _interpret_call(_as_variable, *args, **kwargs)


def _as_variable(data: Any = None, requires_grad: bool = False, volatile: bool = False) -> torch.Tensor:
    if data is None:
        return torch.empty(0).requires_grad_(requires_grad)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(data).__name__}")
    if volatile and requires_grad:
        raise ValueError("Variable can't be volatile and require_grad at the same time!")
    return data.detach().requires_grad_() if requires_grad else data.detach()


def _classes() -> list[Callable]:
    return [torch.Tensor, *(c for c in torch._tensor_classes if c.layout is torch.strided)]


for _cls in _classes():
    instead_of(_cls)(functools.partial(_of_class, _cls))
