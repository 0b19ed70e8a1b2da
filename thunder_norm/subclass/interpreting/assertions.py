"""What a program asserts of values: eager PyTorch looks at them, and a trace looks at them in every call."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from thunder_norm.subclass.interpreting.interception import Interpreting, Watching
from thunder_norm.tracing import hooks
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.python.assertions import asserted
from thunder_norm.tracing.torch_functions import known_values
from thunder.core.interpreter import WrappedValue, _interpret_call
from thunder.core.proxies import TensorProxy


@torch.library.custom_op("thunder_norm::check", mutates_args=())
def _check(value: torch.Tensor, holds: bool, error: str, message: str) -> None:
    if bool(value) is not holds:
        raise getattr(builtins, error)(*(message,) if message else ())


@_check.register_fake
def _(value: torch.Tensor, holds: bool, error: str, message: str) -> None:
    """There is nothing to look at."""


def _checked(value: torch.Tensor, holds: bool, error: str, message: str) -> bool:
    torch.ops.thunder_norm.check(value if value.dtype is torch.bool else value != 0, holds, error, message)
    return holds


def is_checked_in_calls() -> bool:
    """Whether the compilation at hand has traces look at values."""
    leader = hooks.leader()
    return not isinstance(leader, Watching) or isinstance(leader, Interpreting)


@instead_of(asserted)
def _asserted(value: WrappedValue, holds: WrappedValue, error: WrappedValue, message: WrappedValue) -> Any:
    """The condition is taken for what it has to be while the program is traced; a call in which it is not raises as eager mode does."""
    p = value.value
    if not isinstance(p, TensorProxy) or p.numel != 1 or known_values.value_of(p) is not None or not is_checked_in_calls():
        return _interpret_call(bool, value)
    return _interpret_call(_checked, value, holds, error, message)


def _by_torch(value: torch.Tensor, message: str) -> None:
    if not asserted(value, True, "AssertionError", message):
        raise AssertionError(message)


def _by_kernel(value: torch.Tensor, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    if not asserted(value, True, "RuntimeError", message):
        raise RuntimeError(message)


@instead_of(torch._assert)
def _assert(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _interpret_call(_by_torch, *args, **_named(kwargs))


@instead_of(torch._assert_async)
def _assert_async(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Thunder has no operation for it; on CPU it looks at once."""
    return _interpret_call(_by_kernel, *args, **_named(kwargs))


def _named(kwargs: dict[str, WrappedValue]) -> dict[str, WrappedValue]:
    names = {"condition": "value", "input": "value", "assert_msg": "message"}
    return {names.get(name, name): value for name, value in kwargs.items()}
