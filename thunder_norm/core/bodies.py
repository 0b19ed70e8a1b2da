"""What torch does inside of its functions: those written in Python, and those that its C++ code takes apart."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch

from thunder_norm.core.registry import key_of
from thunder_norm.higher_order_operators import written_out

# What torch's functions ask that decides only which kernel runs: one of theirs for all, or the operations that there are rules for.
_CHOOSE_KERNELS = ("_linear_cross_entropy_chunked_applies",)

_COMPOSITE = "CompositeImplicitAutograd"


@functools.cache
def python_body(func: Callable) -> Callable | None:
    """What a torch function written in Python does after it has asked for ``__torch_function__``, or an operator that takes functions; or None.

    The torch functions it calls ask again and find their rules, which ATen's decomposition of them would not: `F.linear` has a
    tighter one than the in-place operations it may become.
    """
    if not isinstance(func, types.FunctionType):
        return written_out(func)
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    if not any(name in func.__code__.co_names for name in asks):
        return None
    names = {**func.__globals__, **dict.fromkeys([*asks, *_CHOOSE_KERNELS], lambda *args, **kwargs: False)}
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def is_composite(func: Callable) -> bool:
    """Whether torch's C++ code takes a function apart into operations, of which there may be rules."""
    key = key_of(func)
    is_function = isinstance(key, str) and not isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_function and _is_taken_apart(key)


@functools.cache
def _is_taken_apart(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    names = [f"aten::{name}" if o == "default" else f"aten::{name}.{o}" for o in overloads]
    # some overloads are TorchScript's alone
    return any(torch._C._dispatch_has_kernel(n) and torch._C._dispatch_has_kernel_for_dispatch_key(n, _COMPOSITE) for n in names)
