"""Operations of backwards that torch has kernels for: one call where their formulas are five to fifteen.

Each is a symbol that consists of its formula, so that any transform or executor may look inside, and is carried out by torch's kernel
where none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import thunder.torch as ltorch
import torch
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import get_computation_dtype
from thunder.executors import torchex

from thunder_norm.tracing.recording import print_without_module


def _with_kernel(kernel: Callable) -> Callable[[Callable], Symbol]:
    """Make a symbol of a formula, carried out by `kernel`."""

    def make(formula: Callable) -> Symbol:
        name = formula.__name__
        meta = langctx(Languages.TORCH)(formula)
        symbol = Symbol(name=name, meta=meta, id=f"thunder_norm.{name}", _bind_postprocess=print_without_module)
        operation = torchex.ex.register_operator(f"torch_{name}", like=symbol, fn=kernel)
        torchex.ex.register_implementation(symbol, operation, checker=torchex._always_executable)
        return symbol

    return make


def _softmax_kernel(g: torch.Tensor, out: torch.Tensor, dim: int) -> torch.Tensor:
    return torch._softmax_backward_data(g, out, dim, out.dtype)


@_with_kernel(_softmax_kernel)
def softmax_backward(g: TensorProxy, out: TensorProxy, dim: int) -> TensorProxy:
    """``y (g - sum(g y))`` for ``y = softmax(x, dim)``; g and y have one shape and dtype."""
    return ltorch.mul(out, ltorch.sub(g, ltorch.sum(ltorch.mul(out, g), dim, True)))


def _gelu_kernel(g: torch.Tensor, a: torch.Tensor, approximate: str) -> torch.Tensor:
    g, a = torch.broadcast_tensors(g, a)  # oneDNN, which runs it in single precision, broadcasts nothing
    return torch.ops.aten.gelu_backward(g, a, approximate=approximate)


@_with_kernel(_gelu_kernel)
def gelu_backward(g: TensorProxy, a: TensorProxy, approximate: str) -> TensorProxy:
    """``g (P(x) + x p(x))`` with the normal distribution's P and density p, or what the tanh approximation makes of it."""
    if approximate == "tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        square = ltorch.mul(a, a)
        t = ltorch.tanh(ltorch.mul(ltorch.mul(a, ltorch.add(ltorch.mul(square, cubic), 1.0)), scale))
        inner = ltorch.mul(ltorch.add(ltorch.mul(square, 3 * cubic), 1.0), scale)
        slope = ltorch.mul(ltorch.mul(a, ltorch.sub(1.0, ltorch.mul(t, t))), inner)
        return ltorch.mul(g, ltorch.mul(ltorch.add(ltorch.add(t, 1.0), slope), 0.5))
    probability = ltorch.add(ltorch.mul(ltorch.erf(ltorch.mul(a, math.sqrt(0.5))), 0.5), 0.5)
    density = ltorch.mul(ltorch.exp(ltorch.mul(ltorch.mul(a, a), -0.5)), 1 / math.sqrt(2 * math.pi))
    return ltorch.mul(g, ltorch.add(probability, ltorch.mul(a, density)))


def _standardized_kernel(
    g: torch.Tensor, a: torch.Tensor, normalized_shape: Sequence[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, mean, rstd = torch.native_layer_norm(a, normalized_shape, None, None, eps)
    wanted = [True, False, False]
    to_a, _, _ = torch.ops.aten.native_layer_norm_backward(g, a, normalized_shape, mean, rstd, None, None, wanted)
    return to_a, out


@_with_kernel(_standardized_kernel)
def standardize_backward(
    g: TensorProxy, a: TensorProxy, normalized_shape: Sequence[int], eps: float
) -> tuple[TensorProxy, TensorProxy]:
    """Of ``y = (x - mean(x)) r`` with ``r = 1 / sqrt(var(x) + eps)``: ``r (g - mean(g) - y mean(g y))``, and y.

    Means are over the last dimensions, those of `normalized_shape`.
    """
    dims = tuple(range(a.ndim - len(normalized_shape), a.ndim))
    dtype, precise = a.dtype, get_computation_dtype(a.dtype)
    g, a = ltorch.to(g, precise), ltorch.to(a, precise)
    variance, mean = ltorch.var_mean(a, dims, correction=0, keepdim=True)
    r = ltorch.rsqrt(ltorch.add(variance, eps))
    out = ltorch.mul(ltorch.sub(a, mean), r)
    along = ltorch.mul(out, ltorch.mean(ltorch.mul(g, out), dims, True))
    to_a = ltorch.mul(ltorch.sub(ltorch.sub(g, ltorch.mean(g, dims, True)), along), r)
    return ltorch.to(to_a, dtype), ltorch.to(out, dtype)
