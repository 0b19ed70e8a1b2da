"""Gradients as torch computes them, where Thunder's are slower: of convolutions, batch norms, attention on CPU, and added products.

Thunder writes the gradients of a convolution as convolutions of permuted, padded tensors, those of a batch norm operation by operation,
each with what it needs of the forward, and those of attention on CPU with the whole matrix of scores, which it keeps.  Those of ``addmm``
are our rule's; the operation is not to be tried out without data again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.functions.kernels.attention import attention, is_fast_attention
from thunder_norm.functions.rules.contractions import added_product_backward
import thunder.torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import get_computation_dtype
from thunder.extend import FusionExecutor, OperatorExecutor

aten = torch.ops.aten
# In no executor list: what is written here carries it.
operations = OperatorExecutor("thunder_norm_gradients", version="1")

RELU = "torch.relu"
BATCH_NORM = "torch.batch_norm"  # so it calls torch.nn.functional.batch_norm
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
ADDED_PRODUCT = "torch.addmm"


def register(executor: FusionExecutor) -> None:
    """Have programs with this executor use the gradients of this file."""
    executor.register_supported(prims.PrimIDs.CONVOLUTION, grad_transform=_convolution)
    executor.register_supported(RELU, checker=_is_out_of_place, grad_transform=_relu)
    executor.register_supported(BATCH_NORM, checker=_is_plain_batch_norm, grad_transform=_batch_norm)
    executor.register_supported(ATTENTION, checker=is_fast_attention, grad_transform=attention)
    executor.register_supported(ADDED_PRODUCT, checker=_is_real_product, grad_transform=_added_product)


# -- convolutions ----------------------------------------------------------------------------------------------------------


def _run_convolution_gradient(which: int) -> Callable[..., torch.Tensor]:
    mask = [which == 0, which == 1, False]

    def run(g: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
        return aten.convolution_backward(g, a, weight, None, *how, mask)[which]

    return run


def _like(which: int) -> Callable[..., TensorProxy]:
    return lambda g, *rest: TensorProxy(like=rest[which], requires_grad=False)


_input_gradient = operations.register_operator("convolution_input_gradient", meta=_like(0), fn=_run_convolution_gradient(0))
_weight_gradient = operations.register_operator("convolution_weight_gradient", meta=_like(1), fn=_run_convolution_gradient(1))


def _run_convolution_gradients(
    g: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.convolution_backward(g, a, weight, None, *how, [True, True, False])[:2]


_both_gradients = operations.register_operator(
    "convolution_gradients",
    meta=lambda *args: (_like(0)(*args), _like(1)(*args)),
    fn=_run_convolution_gradients,
)


# -- convolutions that keep their weight -----------------------------------------------------------------------------------


def _keeping_meta(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *how: Any) -> tuple[TensorProxy, TensorProxy]:
    out = prims.convolution.meta(a, weight, bias, *how)  # type: ignore[misc]
    return TensorProxy(like=out, requires_grad=False), TensorProxy(like=weight, requires_grad=False)


def _run_keeping(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.convolution(a, weight, bias, *how), weight


# Its second result is the weight as the backward reads it.  Inductor lays weights out as its kernels like them, which takes as long as
# reading and writing all of them: what the forward has laid out is kept for the backward.
_convolution_keeping_weight = operations.register_operator("convolution_keeping_weight", meta=_keeping_meta, fn=_run_keeping)


def kept_weights(bsyms: Sequence[BoundSymbol]) -> set[str]:
    """The names of the results that stand for weights, which a region may lay out in memory otherwise, and copy to do so."""
    return {bsym.output[1].name for bsym in bsyms if bsym.sym is _convolution_keeping_weight}


def together(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations, with both gradients of a convolution computed by one where both are wanted: they read the same tensors."""
    found: dict[tuple, dict[str, int]] = {}
    for i, bsym in enumerate(bsyms):
        if bsym.sym is _input_gradient or bsym.sym is _weight_gradient:
            tensors, how = bsym.args[:3], bsym.args[3:]
            found.setdefault((*(t.name for t in tensors), str(how)), {})[bsym.sym.name] = i
    pairs = [of_one for of_one in found.values() if len(of_one) == 2]
    second = {max(of_one.values()) for of_one in pairs}
    made = {
        min(of_one.values()): _both(*(bsyms[of_one[s.name]] for s in (_input_gradient, _weight_gradient))) for of_one in pairs
    }
    return [made.get(i, bsym) for i, bsym in enumerate(bsyms) if i not in second]


def _both(of_input: BoundSymbol, of_weight: BoundSymbol) -> BoundSymbol:
    return of_input.from_bsym(sym=_both_gradients, output=(of_input.output, of_weight.output), subsymbols=())


def _convolution(
    a: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> TensorProxy:
    spatial = weight.ndim - 2

    def each(values: Sequence[int]) -> list[int]:
        return [int(v) for v in (values if len(values) == spatial else tuple(values) * spatial)]

    how = (each(stride), each(padding), each(dilation), bool(transposed), each(output_padding), int(groups))
    if weight.ndim == 4 and weight.device == devices.cpu:
        out, kept = _convolution_keeping_weight(a, weight, bias, *how)
    else:
        out, kept = prims.convolution(a, weight, bias, *how), weight
    g = prims.get_grad(out)
    prims.put_grad(a, _input_gradient(g, a, kept, *how))
    prims.put_grad(weight, _weight_gradient(g, a, kept, *how))
    if bias is not None:
        over = [d for d in range(g.ndim) if d != 1] if g.ndim == weight.ndim else list(range(1, g.ndim))
        prims.put_grad(bias, ltorch.sum(g, over))
    return out


# -- relu ------------------------------------------------------------------------------------------------------------------


def _is_out_of_place(a: TensorProxy, inplace: bool = False) -> bool:
    return not inplace


def _like_first(a: TensorProxy, *rest: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a, requires_grad=False)


def _run_relu_gradient(g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return aten.threshold_backward(g, out, 0)


_relu_forward = operations.register_operator("relu", meta=_like_first, fn=torch.relu)
_relu_gradient = operations.register_operator("relu_gradient", meta=_like_first, fn=_run_relu_gradient)


def _relu(a: TensorProxy, inplace: bool = False) -> TensorProxy:
    """``da = g where out > 0``: as torch, from the result, which the next operation keeps in any case, not from a mask besides."""
    out = _relu_forward(a)
    prims.put_grad(a, _relu_gradient(prims.get_grad(out), out))
    return out


# -- batch norms -----------------------------------------------------------------------------------------------------------


def _is_plain_batch_norm(
    a: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    training: bool = False,
    *rest: Any,
    **others: Any,
) -> bool:
    """Whether the formulas below are all there is to it: nobody differentiates the running statistics."""
    statistics = (running_mean, running_var)
    is_given = all(isinstance(t, TensorProxy) for t in statistics)
    return (bool(training) or is_given) and not any(isinstance(t, TensorProxy) and t.requires_grad for t in statistics)


def _follow(running: TensorProxy | None, found: TensorProxy, momentum: float) -> None:
    """Move a running statistic towards what was found in a batch."""
    if running is not None:
        ltorch._copy_(running, ltorch.to((1 - momentum) * running + momentum * found, running.dtype))


def _batch_norm(
    a: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    """For ``y = (a - m) r weight + bias``, with mean m and ``r = (v + eps)^-1/2`` over all dimensions but the second, of n numbers each.

    ``da = r weight (g - sum g / n - (a - m) r^2 sum(g (a - m)) / n)``, without the sums if m and v are given;
    ``dweight = r sum(g (a - m))``; ``dbias = sum g``.  Source: Ioffe and Szegedy, 2015; ``aten.native_batch_norm_backward``.
    """
    precise = get_computation_dtype(a.dtype)
    dims, shape = (0, *range(2, a.ndim)), (1, -1, *(1,) * (a.ndim - 2))
    wide = ltorch.to(a, precise)
    if training:
        variance, mean = ltorch.var_mean(wide, dim=dims, correction=0, keepdim=False)
        n = math.prod(a.shape) / a.shape[1]
        _follow(running_mean, mean, momentum)
        if running_var is not None:
            _follow(running_var, variance * (n / (n - 1)), momentum)
    else:
        variance, mean = ltorch.to(running_var, precise), ltorch.to(running_mean, precise)
    r = ltorch.rsqrt(variance + eps)
    centred = wide - ltorch.reshape(mean, shape)
    # operations that a region takes; the symbol of the whole would be claimed as one of torch's
    out = centred * ltorch.reshape(r, shape)
    if weight is not None:
        out = out * ltorch.reshape(weight, shape)
    if bias is not None:
        out = out + ltorch.reshape(bias, shape)
    out = ltorch.to(out, a.dtype)
    g = ltorch.to(prims.get_grad(out), precise)
    of_g, of_product = ltorch.sum(g, dims), ltorch.sum(g * centred, dims)
    scale = r if weight is None else r * ltorch.to(weight, precise)
    inner = g
    if training:
        inner = g - ltorch.reshape(of_g / n, shape) - centred * ltorch.reshape(r * r * of_product / n, shape)
    prims.put_grad(a, ltorch.to(inner * ltorch.reshape(scale, shape), a.dtype))
    if weight is not None:
        prims.put_grad(weight, ltorch.to(r * of_product, weight.dtype))
    if bias is not None:
        prims.put_grad(bias, ltorch.to(of_g, bias.dtype))
    return out


# -- addmm -----------------------------------------------------------------------------------------------------------------


def _is_real_product(
    input: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1, **others: Any
) -> bool:
    """Whether the shape below is all there is to find out."""
    tensors = (input, a, b)
    are_floats = all(isinstance(t, TensorProxy) and t.dtype in dtypes.float_math_dtypes for t in tensors)
    are_numbers = all(type(n) in (int, float) for n in (beta, alpha))
    is_plain = all(given is None for given in others.values())
    return are_floats and are_numbers and is_plain and len({t.dtype for t in tensors}) == 1


def _product_meta(input: TensorProxy, a: TensorProxy, b: TensorProxy, *rest: float) -> TensorProxy:
    return TensorProxy(like=a, shape=(a.shape[0], b.shape[1]), requires_grad=False)


def _run_product(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    return torch.addmm(input, a, b, beta=beta, alpha=alpha)


# Thunder finds out the shape of each by running it without data: not again for the one that stands in its place.
_product_forward = operations.register_operator("addmm", meta=_product_meta, fn=_run_product)


def _added_product(
    input: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1, **others: None
) -> TensorProxy:
    out = _product_forward(input, a, b, beta, alpha)
    gradients = added_product_backward((input, a, b, beta, alpha), prims.get_grad(out))
    for t, gradient in zip((input, a, b), gradients, strict=True):
        prims.put_grad(t, gradient)
    return out
