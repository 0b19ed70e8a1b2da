"""What a tensor is worth apart from its history: values from one tensor, gradients to another."""

from __future__ import annotations

import functools
from typing import Any

import torch

from thunder_norm.tracing.activity import differentiated_in_first
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import register_grad
from thunder.extend import OperatorExecutor

# Never in an executor list: what is written here carries it.
_executor = OperatorExecutor("thunder_norm_histories", version="1")


def _history_meta(tensor: TensorProxy) -> TensorProxy:
    return TensorProxy(like=tensor, requires_grad=False)


def _current_meta(history: TensorProxy, value: TensorProxy) -> TensorProxy:
    return TensorProxy(like=value, requires_grad=False)


HISTORY = _executor.register_operator("history", meta=_history_meta, fn=lambda tensor: tensor.view_as(tensor))
CURRENT = _executor.register_operator("current", meta=_current_meta, fn=lambda history, value: value.detach())
differentiated_in_first(CURRENT.id)


def history_of(tensor: TensorProxy) -> TensorProxy:
    """Write what leads gradients to where those of a tensor go."""
    _register()
    return HISTORY(tensor)


def current(history: TensorProxy, value: TensorProxy) -> TensorProxy:
    """Write a tensor with the gradients of the first, in the memory of the second, whatever is written there."""
    _register()
    return CURRENT(history, value)


def _history_gradient(tensor: TensorProxy) -> TensorProxy:
    history = HISTORY(tensor)
    put_grad(tensor, get_grad(history))
    return history


def _current_gradient(history: TensorProxy, value: TensorProxy) -> TensorProxy:
    found = CURRENT(history, value)
    put_grad(history, get_grad(found))
    return found


@functools.cache
def _register() -> None:
    """Tell Thunder their gradients, once there is one: importing us changes nothing of Thunder."""
    register_grad(HISTORY.id, _history_gradient)
    register_grad(CURRENT.id, _current_gradient)


def with_history(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Give a tensor, in which there is what was written, the history of another one."""
    with torch.enable_grad():
        return _Rewritten.apply(x, made)


class _Rewritten(torch.autograd.Function):
    """A tensor in which there is what was written, with its history."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, grads[0]
