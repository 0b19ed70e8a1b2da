"""Aten operations that Thunder's symbols of the same name do not cover, written in Thunder's symbols on proxies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.tracing.recording import print_without_module
from thunder_norm.tracing.torch_functions.torch_neural import max_pool3d
from thunder_norm.tracing.torch_functions.torch_semantics import clamp, unfold
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx

aten = torch.ops.aten


def _to_copy(a: TensorProxy, *, dtype: Any = None, device: Any = None, non_blocking: bool = False) -> TensorProxy:
    if device is None and dtype is not None and dtypes.to_dtype(dtype) != dtypes.to_strong_dtype(a.dtype):
        return ltorch.to(a, dtype)  # which is a copy
    return ltorch.to(a, device, dtype, copy=True) if device is not None else ltorch.to(a, dtype, copy=True)


def _addmm(bias: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1) -> TensorProxy:
    weight = _transposed_from(b)
    if weight is not None and bias.ndim == 1 and alpha == beta == 1:
        return ltorch.linear(a, weight, bias)  # what it came from, which executors know
    product = ltorch.matmul(a, b)
    product = product if alpha == 1 else ltorch.mul(product, alpha)
    return ltorch.add(product, bias if beta == 1 else ltorch.mul(bias, beta))


def _transposed_from(p: TensorProxy) -> TensorProxy | None:
    """The matrix whose transpose `p` is, if it was transposed in the operation being written."""
    for scope in get_tracectx().scopes[:0:-1]:
        for bsym in reversed(scope):
            if bsym.output is p:
                return bsym.args[0] if bsym.sym is ltorch.permute and tuple(bsym.args[1]) == (1, 0) else None
    return None


def _slice(a: TensorProxy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorProxy:
    length = a.shape[dim]
    start, end, step = slice(start, end).indices(length)[0], slice(start, end).indices(length)[1], step
    index = [slice(None)] * a.ndim
    index[dim] = slice(start, max(start, end), step)
    return ltorch.getitem(a, tuple(index))


def _softmax(a: TensorProxy, dim: int, half_to_float: bool) -> TensorProxy:
    return ltorch.softmax(a, dim, dtype=dtypes.float32 if half_to_float else None)


def _log_softmax(a: TensorProxy, dim: int, half_to_float: bool) -> TensorProxy:
    return ltorch.log_softmax(a, dim, dtype=dtypes.float32 if half_to_float else None)


def _clone(a: TensorProxy, memory_format: Any = torch.preserve_format) -> TensorProxy:
    cloned = ltorch.clone(a)
    return cloned if memory_format is torch.preserve_format else ltorch.contiguous(cloned, memory_format=memory_format)


def _full_like(a: TensorProxy, value: Any, *, dtype: Any = None, device: Any = None) -> TensorProxy:
    return ltorch.full_like(a, value, dtype=dtype, device=device)


def _convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> TensorProxy:
    return ltorch.convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _minimum(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    floating = [t.dtype for t in (a, b) if dtypes.is_float_dtype(t.dtype)]
    if not torch.is_grad_enabled() or not floating:
        return ltorch.minimum(a, b)
    # bools have no negative ones, and bytes wrong ones
    a, b = (t if dtypes.is_float_dtype(t.dtype) else ltorch.to(t, floating[0]) for t in (a, b))
    return ltorch.neg(ltorch.maximum(ltorch.neg(a), ltorch.neg(b)))  # which has a gradient


def _copy(a: TensorProxy, value: TensorProxy, non_blocking: bool = False) -> TensorProxy:
    copied = ltorch.expand(ltorch.to(value, a.device, a.dtype, copy=True), tuple(a.shape))
    return ltorch.contiguous(copied)  # neither expanded nor laid out as the value is


def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False) -> TensorProxy:
    return ltorch.embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)


def _clamp(a: TensorProxy, min: float | None = None, max: float | None = None) -> TensorProxy:
    if any(bound != bound for bound in (min, max)):
        raise UnsupportedOpError("clamp to NaN")  # the opaque operation knows
    return clamp(a, min, max)


def _var(a: TensorProxy, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> TensorProxy:
    return ltorch.var(a, tuple(dim or ()) or None, keepdim=keepdim, correction=int(unbiased))


def _var_correction(a: TensorProxy, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False) -> TensorProxy:
    return ltorch.var(a, tuple(dim or ()) or None, keepdim=keepdim, correction=correction)


def _rsub(a: TensorProxy, b: Any, alpha: float = 1) -> TensorProxy:
    return ltorch.sub(b, a if alpha == 1 else ltorch.mul(a, alpha))


# A copy that is none, as it is lowered, by whose id forward mode knows that nothing moves.
_DETACH = Symbol(name="detach", meta=prims.shallow_copy, id="thunder_norm.detach", _bind_postprocess=print_without_module)


def _detach(a: TensorProxy) -> TensorProxy:
    detached = _DETACH(a)
    detached.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return detached


SPECIAL: dict[Any, Callable] = {
    torch.Tensor.unfold: unfold,
    aten.t.default: lambda a: ltorch.permute(a, tuple(reversed(range(a.ndim)))),
    aten.mm.default: ltorch.matmul,
    aten.bmm.default: ltorch.matmul,
    aten.addmm.default: _addmm,
    aten._to_copy.default: _to_copy,
    aten.clone.default: _clone,
    aten.detach.default: _detach,
    aten.alias.default: prims.shallow_copy,
    aten._unsafe_view.default: ltorch.reshape,
    aten.view.default: ltorch.reshape,
    aten.expand.default: lambda a, size: ltorch.expand(a, tuple(size)),
    aten.slice.Tensor: _slice,
    aten.select.int: ltorch.select,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.convolution.default: _convolution,
    aten.ones_like.default: lambda a, *, dtype=None, device=None: _full_like(a, 1, dtype=dtype, device=device),
    aten.zeros_like.default: lambda a, *, dtype=None, device=None: _full_like(a, 0, dtype=dtype, device=device),
    aten.full_like.default: _full_like,
    aten.minimum.default: lambda a, b: _minimum(a, b),
    torch.minimum: lambda a, b: _minimum(a, b),
    torch.max_pool3d: max_pool3d,
    F.max_pool3d: max_pool3d,
    aten.copy.default: _copy,
    aten.var.dim: _var,  # Thunder's gradient takes no dimensions for none of them, torch for all
    aten.var.correction: _var_correction,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: lambda a, b, *, alpha=1: _rsub(a, b, alpha),
    aten.clamp.default: _clamp,
    aten.scalar_tensor.default: lambda v, *, dtype=None, device=None: ltorch.full((), v, dtype=dtype, device=device),
    aten.embedding.default: _embedding,
    aten.amax.default: lambda a, dim=(), keepdim=False: ltorch.amax(a, tuple(dim) or None, keepdim),
    aten.amin.default: lambda a, dim=(), keepdim=False: ltorch.amin(a, tuple(dim) or None, keepdim),
    aten.mean.dim: lambda a, dim, keepdim=False, *, dtype=None: ltorch.mean(a, tuple(dim or ()) or None, keepdim, dtype=dtype),
    aten.sum.dim_IntList: lambda a, dim, keepdim=False, *, dtype=None: ltorch.sum(
        a, tuple(dim or ()) or None, keepdim, dtype=dtype
    ),
}

# Of numbers that are all of one kind Thunder's symbols do nothing but call these, and norms are made of them.
ON_NUMBERS: dict[Any, Callable] = {
    aten.add.Tensor: prims.add,
    aten.sub.Tensor: prims.sub,
    aten.mul.Tensor: prims.mul,
    aten.div.Tensor: prims.div,
    aten.pow.Tensor_Scalar: prims.pow,
    aten.maximum.default: prims.maximum,
    aten.gt.Scalar: prims.gt,
    aten.lt.Scalar: prims.lt,
    aten.gt.Tensor: prims.gt,
    aten.lt.Tensor: prims.lt,
    aten.neg.default: prims.neg,
    aten.abs.default: prims.abs,
    aten.sqrt.default: prims.sqrt,
    aten.exp.default: prims.exp,
    aten.log.default: prims.log,
}
