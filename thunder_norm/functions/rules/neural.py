"""Operations of neural networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.errors import TransformError, with_details
from thunder_norm.functions.batching import with_batch, with_sample_ndim
from thunder_norm.functions.registry import batching_rules, decompositions, drawing_kernels, register_jvp, register_vjp
from thunder_norm.functions.rules.elementwise import elementwise
from thunder_norm.functions.rules.reductions import of_two
from thunder_norm.tracing.recording import print_without_module
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes
from thunder.core.langctxs import Languages, langctx
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.utils import get_computation_dtype
from thunder.executors import torchex

# -- backwards that torch has kernels for: one call where their formulas are five to fifteen ----------------------------
#
# Each is a symbol that consists of its formula, and is carried out by torch's kernel where no executor looks inside.


def with_kernel(kernel: Callable, *, draws: bool = False) -> Callable[[Callable], Symbol]:
    """Make a symbol of a formula, carried out by `kernel`; what draws numbers has no gradient, whatever its formula's parts have."""

    def make(formula: Callable) -> Symbol:
        name = formula.__name__
        meta = langctx(Languages.TORCH)(formula)
        symbol = Symbol(name=name, meta=meta, id=f"thunder_norm.{name}", _bind_postprocess=print_without_module)
        tags = [OpTags.RANDOM_OP] if draws else None
        operation = torchex.ex.register_operator(f"torch_{name}", like=symbol, fn=kernel, tags=tags)
        torchex.ex.register_implementation(
            symbol, operation, checker=torchex._always_executable, grad_transform=symbol if draws else None
        )
        if draws:
            drawing_kernels[symbol] = kernel
        return symbol

    return make


def _softmax_kernel(g: torch.Tensor, out: torch.Tensor, dim: int) -> torch.Tensor:
    return torch._softmax_backward_data(g, out, dim, out.dtype)


@with_kernel(_softmax_kernel)
def softmax_backward(g: TensorProxy, out: TensorProxy, dim: int) -> TensorProxy:
    """``y (g - sum(g y))`` for ``y = softmax(x, dim)``; g and y have one shape and dtype."""
    return ltorch.mul(out, ltorch.sub(g, ltorch.sum(ltorch.mul(out, g), dim, True)))


def _gelu_kernel(g: torch.Tensor, a: torch.Tensor, approximate: str) -> torch.Tensor:
    g, a = torch.broadcast_tensors(g, a)  # oneDNN, which runs it in single precision, broadcasts nothing
    return torch.ops.aten.gelu_backward(g, a, approximate=approximate)


@with_kernel(_gelu_kernel)
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


@with_kernel(_standardized_kernel)
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


def _layer_norm_kernel(
    g: torch.Tensor,
    a: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    mean, rstd = torch.native_layer_norm(a, normalized_shape, weight, bias, eps)[1:]  # the result itself is let go
    wanted = [True, True, bias is not None]
    found = torch.ops.aten.native_layer_norm_backward(g, a, normalized_shape, mean, rstd, weight, bias, wanted)
    return found if bias is not None else found[:2]


def _of_affine(
    g: TensorProxy,
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    eps: float,
) -> tuple[TensorProxy, ...]:
    rows = tuple(range(a.ndim - len(normalized_shape)))

    def summed(t: TensorProxy, like: TensorProxy) -> TensorProxy:
        return ltorch.to(ltorch.sum(t, rows) if rows else t, like.dtype)

    to_standardized = g if weight is None else ltorch.to(ltorch.mul(g, weight), a.dtype)
    to_a, standardized = standardize_backward(to_standardized, a, normalized_shape, eps)
    to_weight = () if weight is None else (summed(ltorch.mul(g, standardized), weight),)
    return to_a, *to_weight, *(() if bias is None else (summed(g, bias),))


@with_kernel(_layer_norm_kernel)
def layer_norm_backward(
    g: TensorProxy, a: TensorProxy, normalized_shape: Sequence[int], weight: TensorProxy, bias: TensorProxy | None, eps: float
) -> tuple[TensorProxy, ...]:
    """Of ``y = w z + b`` with the standardized z: w g pulled back through z; the sums of g z and, if there is a bias, of g."""
    return _of_affine(g, a, normalized_shape, weight, bias, eps)


# -- in other operations ----------------------------------------------------------------------------------------------


def _log_softmax_backward(g: TensorProxy, output: TensorProxy, dim: int, dtype: dtypes.dtype) -> TensorProxy:
    """g - softmax(x) sum(g), of the result of log_softmax."""
    return ltorch.to(ltorch.sub(g, ltorch.mul(ltorch.exp(output), ltorch.sum(g, dim, True))), dtype)


decompositions.add(ltorch.log_softmax_backward, _log_softmax_backward)


# -- tangents ---------------------------------------------------------------------------------------------------------


@register_jvp("torch.softmax")
def softmax(primals, tangents, *, dtype=None):
    """dy = y (dx - sum y dx)."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch._softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.mul(out, clang.sub(dx, ltorch.sum(clang.mul(out, dx), dim, True)))


@register_jvp("torch.log_softmax")
def log_softmax(primals, tangents, *, dtype=None):
    """dy = dx - sum exp(y) dx."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch.log_softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.sub(dx, ltorch.sum(clang.mul(clang.exp(out), dx), dim, True))


@register_jvp("torch.polygamma")
def polygamma(primals, tangents):
    """Its derivative is the next one; the parts it consists of are only right for positive arguments."""
    (n, x), dx = primals, tangents[1]
    return ltorch.polygamma(n, x), clang.mul(dx, ltorch.polygamma(n + 1, x))


# -- cotangents -------------------------------------------------------------------------------------------------------


def _gelu(a: TensorProxy, *, approximate: str = "none") -> tuple[TensorProxy, tuple]:
    return ltorch.gelu(a, approximate=approximate), (a, approximate)


register_vjp(ltorch.gelu)(_gelu, lambda saved, g: gelu_backward(g, *saved))


def _softmax(a: TensorProxy, dim: int, dtype: Any = None, **kwargs: Any) -> tuple[TensorProxy, tuple]:
    out = ltorch._softmax(a, dim, dtype=dtype)
    return out, (out, dim % max(a.ndim, 1), a.dtype)


def _softmax_backward(saved: tuple, g: TensorProxy) -> tuple:
    out, dim, dtype = saved
    return ltorch.to(softmax_backward(g, out, dim), dtype), None


register_vjp(ltorch._softmax)(_softmax, _softmax_backward)


def _layer_norm(
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> tuple[TensorProxy, tuple]:
    return ltorch.layer_norm(a, normalized_shape, weight, bias, eps), (a, tuple(normalized_shape), weight, bias, eps)


def _layer_norm_backward(saved: tuple, g: TensorProxy) -> tuple:
    """By torch's kernel where it takes these dtypes: of a bias alone only that of the input."""
    a, shape, weight, bias, eps = saved
    is_taken = weight is not None and (bias is None or bias.dtype == weight.dtype)
    found = iter((layer_norm_backward if is_taken else _of_affine)(g, a, shape, weight, bias, eps))
    return next(found), None, *(None if p is None else next(found) for p in (weight, bias)), None


register_vjp(ltorch.layer_norm)(_layer_norm, _layer_norm_backward)


# -- batches ----------------------------------------------------------------------------------------------------------


def layer_norm(
    axis_size: int,
    in_dims: tuple,
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Any:
    """The last dimensions are normalised, whatever is before them; scales and shifts of each sample's own come after."""
    a_dim, _, weight_dim, bias_dim, *_ = in_dims
    a = with_batch(axis_size, a, a_dim)
    if weight_dim is None and bias_dim is None:
        return ltorch.layer_norm(a, normalized_shape, weight, bias, eps), 0
    out = ltorch.layer_norm(a, normalized_shape, None, None, eps)
    if weight is not None:
        out = ltorch.mul(out, with_sample_ndim(weight, weight_dim, a.ndim - 1))
    return (out if bias is None else ltorch.add(out, with_sample_ndim(bias, bias_dim, a.ndim - 1))), 0


def standardized(
    axis_size: int, in_dims: tuple, g: TensorProxy, a: TensorProxy, normalized_shape: Sequence[int], eps: float
) -> Any:
    """As `layer_norm`: only the last dimensions mean anything."""
    g, a = with_batch(axis_size, g, in_dims[0]), with_batch(axis_size, a, in_dims[1])
    return standardize_backward(g, a, normalized_shape, eps), 0


def native_batch_norm(
    axis_size: int,
    in_dims: tuple,
    a: TensorProxy,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    training: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Torch's own batching; running statistics that all samples share could not hold what each of them adds."""
    statistics = zip((running_mean, running_var), in_dims[3:5], strict=True)
    if training and in_dims[0] is not None and any(t is not None and d is None for t, d in statistics):
        raise TransformError(
            with_details(
                "batch norm in training updates running statistics that all samples of vmap share",
                instead="running statistics with a batch dimension, track_running_stats=False, or model.eval()",
            )
        )
    return NotImplemented


batching_rules.add(torch.native_batch_norm, native_batch_norm)
batching_rules.add(ltorch.layer_norm, layer_norm)
batching_rules.add(standardize_backward, standardized)
batching_rules.add(gelu_backward, elementwise(gelu_backward))
for _operation in (ltorch.log_softmax_backward, softmax_backward):
    batching_rules.add(_operation, of_two(_operation))
