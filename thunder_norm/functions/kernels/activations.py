"""Activations: each is one kernel forward and one backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.functions.kernels.registry import Joint, are_floats, kernels, like, operations
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten


def _activation(symbol: Symbol, run: Callable, kernel: Callable[..., torch.Tensor], of_result: bool = False) -> None:
    """``run(x, *settings)`` is torch's function, ``kernel(g, x, *settings)`` its gradient; `of_result`, with the result in place of x."""
    forward = operations.register_operator(symbol.name, meta=lambda a, *settings: like(a), fn=run)
    gradient = operations.register_operator(f"{symbol.name}_gradient", meta=lambda g, a, *settings: like(a), fn=kernel)
    signature = inspect.signature(symbol.meta)
    has_place = "inplace" in signature.parameters

    @kernels(symbol, signature)
    def rule(wanted: Callable[[Any], bool], a: TensorProxy, *settings: Any) -> Joint | None:
        if not are_floats(a) or (has_place and settings[-1]):
            return None

        def joint(a: TensorProxy, *settings: Any) -> TensorProxy:
            settings = settings[:-1] if has_place else settings
            out = forward(a, *settings)
            prims.put_grad(a, gradient(prims.get_grad(out), out if of_result else a, *settings))
            return out

        return joint


_SELU = (1.6732632423543772, 1.0507009873554805, 1.0)
_activation(ltorch.hardswish, F.hardswish, aten.hardswish_backward)
_activation(ltorch.hardsigmoid, F.hardsigmoid, aten.hardsigmoid_backward)
_activation(ltorch.hardtanh, F.hardtanh, lambda g, a, low, high: aten.hardtanh_backward(g, a, low, high))
_activation(ltorch.relu6, F.relu6, lambda g, a: aten.hardtanh_backward(g, a, 0, 6))
_activation(ltorch.leaky_relu, F.leaky_relu, lambda g, a, slope: aten.leaky_relu_backward(g, a, slope, False))
_activation(ltorch.silu, F.silu, aten.silu_backward)
_activation(ltorch.mish, F.mish, aten.mish_backward)
_activation(ltorch.softplus, F.softplus, aten.softplus_backward)
_activation(ltorch.elu, F.elu, lambda g, a, alpha: aten.elu_backward(g, alpha, 1.0, 1.0, False, a))
_activation(ltorch.celu, F.celu, lambda g, a, alpha: aten.elu_backward(g, alpha, 1.0, 1.0 / alpha, False, a))
_activation(ltorch.selu, F.selu, lambda g, a: aten.elu_backward(g, *_SELU, False, a))
_activation(ltorch.tanh, torch.tanh, aten.tanh_backward, of_result=True)
_activation(ltorch.sigmoid, torch.sigmoid, aten.sigmoid_backward, of_result=True)
