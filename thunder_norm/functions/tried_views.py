"""Which results of a call of torch lie in the memory of an argument: asked of torch without data, once for calls that are alike.

A program that writes into tensors asks it of each of its operations, and a model of equal blocks asks the same again and again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from thunder_norm.functions.torch_calls import try_out, views_in_cpp
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

Views = tuple[tuple[int, int], ...]

_MOST = 4096  # calls that are remembered
_found: dict[Hashable, Views | Exception] = {}

_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)
_PLAIN = (int, float, bool, complex, str, type(None), type(...))
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout, dtypes.dtype, devices.Device)


def views(function: Callable, args: tuple, kwargs: dict) -> Views:
    """The results of a call that share memory with an argument, by the positions of both among the tensors.

    Args:
        function: torch's, or one that torch runs.
        args: proxies may stand in them.
        kwargs: likewise.

    Raises:
        whatever torch raises for these arguments.
    """
    if computes_entries(function):
        return ()
    key = _key(function, args, kwargs)
    if key is None:
        return _tried(function, args, kwargs)
    if (known := _found.get(key)) is None:
        if len(_found) >= _MOST:
            _found.clear()
        try:
            known = _tried(function, args, kwargs)
        except Exception as e:  # noqa: BLE001 - torch's answer, as any other
            known = _alike(e)
        _found[key] = known
    if isinstance(known, Exception):
        raise _alike(known)
    return known


def _alike(error: Exception) -> Exception:
    """Another exception that says the same: one that is raised holds the frames that it comes through, and what they hold."""
    made = type(error).__new__(type(error), *error.args)
    vars(made).update(vars(error))
    return made


def _tried(function: Callable, args: tuple, kwargs: dict) -> Views:
    found = views_in_cpp(function, args, kwargs) if isinstance(function, _BUILT_IN) else None
    return try_out(function, args, kwargs).views if found is None else found


@functools.cache
def computes_entries(function: Callable) -> bool:
    """Whether torch's function computes its result entry by entry, in memory of its own, whatever it is given.

    What torch composes of other operations may hand on an argument, and its schema does not say so: ``dropout`` outside of training.
    """
    if not isinstance(function, _BUILT_IN):
        return False
    packet = getattr(torch.ops.aten, function.__name__, None)
    if packet is None:
        return False
    overloads = [o for name in packet.overloads() if (o := _overload(packet, name)) is not None]
    return bool(overloads) and all(map(_is_new_of_each_entry, overloads))


def _overload(packet: Any, name: str) -> Any:
    """An overload that the dispatcher knows; TorchScript has others, of numbers and of lists, under the same names."""
    try:
        overload = getattr(packet, name)
        torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    except RuntimeError:
        return None
    return None if any(a.is_out for a in overload._schema.arguments) else overload


def _is_new_of_each_entry(overload: Any) -> bool:
    return (
        torch.Tag.pointwise in overload.tags
        and not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        and all(r.alias_info is None for r in overload._schema.returns)
    )


def _key(function: Callable, args: tuple, kwargs: dict) -> Hashable | None:
    """What the answer depends on; None where it cannot be told: a function that is not torch's may know more than its arguments."""
    if not isinstance(function, _BUILT_IN) and (getattr(function, "__module__", None) or "").partition(".")[0] != "torch":
        return None
    told = _told((args, kwargs))
    return None if told is None else (function, told)


def _told(value: Any) -> Hashable | None:
    """What is known of an argument, or of what is in a tuple, list or dict."""
    kind = type(value)
    if kind is tuple or kind is list:
        inside = [_told(v) for v in value]
        return None if None in inside else (kind, *inside)
    if kind is dict:
        inside = [_told(v) for v in value.values()]
        return None if None in inside else (kind, *value, *inside)
    if isinstance(value, TensorProxy) and all([type(size) is int for size in value.shape]):
        return tuple(value.shape), value.dtype, value.device
    return (kind, value) if kind in _PLAIN or isinstance(value, _NAMED) else None
