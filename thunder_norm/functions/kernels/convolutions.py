"""Convolutions, all gradients of one in one call, and means of windows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.functions.kernels.registry import Joint, are_floats, given, kernels, like, like_wanted, operations, put
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

aten = torch.ops.aten


def _run_convolution_gradients(
    g: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, ...]:
    mask = settings[-1]
    sizes = None if bias is None else bias.shape
    return given(aten.convolution_backward(g, a, weight, sizes, *settings), mask)


_convolution_gradients = operations.register_operator(
    "convolution_gradients",
    meta=lambda g, a, weight, bias, *settings: like_wanted((a, weight, bias), settings[-1]),
    fn=_run_convolution_gradients,
)


def _convolution(symbol: Symbol, spatial: int, transposed: bool) -> None:
    """All gradients of a convolution in one call, as torch has them."""
    names = ["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("input", "weight")]
    defaults = {"bias": None, "stride": 1, "padding": 0, **{n: 0 if n == "output_padding" else 1 for n in names}}
    parameters += [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in defaults.items()]

    def each(value: Any) -> list[int]:
        values = list(value) if isinstance(value, Sequence) else [value]
        return [int(v) for v in (values if len(values) == spatial else values * spatial)]

    @kernels(symbol, inspect.Signature(parameters))
    def rule(
        wanted: Callable[[Any], bool], a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *settings: Any
    ) -> Joint | None:
        given = dict(zip(list(defaults)[1:], settings, strict=True))
        if isinstance(given["padding"], str) or a.ndim != spatial + 2 or not are_floats(a, weight, bias):
            return None
        mask = [wanted(a), wanted(weight), wanted(bias)]
        how = (each(given["stride"]), each(given["padding"]), each(given["dilation"]), transposed)
        how = (*how, each(given.get("output_padding", 0)), int(given["groups"]), mask)

        def joint(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *settings: Any) -> TensorProxy:
            out = symbol(a, weight, bias, *settings)
            put((a, weight, bias), mask, _convolution_gradients(prims.get_grad(out), a, weight, bias, *how))
            return out

        return joint


for _n, _transposed in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
    _convolution(getattr(ltorch, f"conv{_n}d"), _n, transposed=False)
    _convolution(ltorch._torch_to_thunder_function_map[_transposed], _n, transposed=True)


# -- means of windows ------------------------------------------------------------------------------------------------------


def _mean_of_windows(symbol: Symbol, run: Callable, kernel: Callable, spatial: int) -> None:
    """Thunder's own is a convolution with equal weights."""
    forward = operations.register_operator(symbol.name, like=symbol, fn=run)
    gradient = operations.register_operator(f"{symbol.name}_gradient", meta=lambda g, a, *settings: like(a), fn=kernel)

    def each(value: Any) -> list[int]:
        return [int(v) for v in value] if isinstance(value, Sequence) else [int(value)] * spatial

    @kernels(symbol)
    def rule(wanted: Callable[[Any], bool], a: TensorProxy, *settings: Any) -> Joint | None:
        if not are_floats(a):
            return None
        size, stride, padding, *how = settings
        window = each(size), each(size if stride is None else stride), each(padding), *how

        def joint(a: TensorProxy, *settings: Any) -> TensorProxy:
            out = forward(a, *settings)
            prims.put_grad(a, gradient(prims.get_grad(out), a, *window))
            return out

        return joint


_mean_of_windows(ltorch.avg_pool2d, F.avg_pool2d, aten.avg_pool2d_backward, 2)
_mean_of_windows(ltorch.avg_pool3d, F.avg_pool3d, aten.avg_pool3d_backward, 3)
