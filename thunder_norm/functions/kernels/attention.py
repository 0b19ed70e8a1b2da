"""Attention on the CPU, which keeps no scores, and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.functions.kernels.registry import Joint, are_floats, kernels, like, operations, put
import thunder.torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy

aten = torch.ops.aten

_ATTENTION_DTYPES = (dtypes.float64, dtypes.float32, dtypes.bfloat16, dtypes.float16)


def is_fast_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> bool:
    """Whether torch's CPU kernel takes this; a mask that may want a gradient of its own it does not."""
    tensors = (query, key, value)
    return (
        not any(others.values())
        and all(isinstance(t, TensorProxy) and t.ndim == 4 and t.device == devices.cpu and 0 not in t.shape for t in tensors)
        and query.dtype in _ATTENTION_DTYPES
        and query.dtype == key.dtype == value.dtype
        and len({t.shape[3] for t in tensors}) == len({t.shape[1] for t in tensors}) == len({t.shape[0] for t in tensors}) == 1
        and dropout_p == 0
        and torch.backends.cuda.flash_sdp_enabled()
        and (attn_mask is None or (attn_mask.dtype == dtypes.bool8 and not is_causal and attn_mask.ndim in (2, 4)))
    )


def _attention_meta(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, mask: TensorProxy | None, is_causal: bool, scale: float | None
) -> tuple[TensorProxy, TensorProxy]:
    precise = dtypes.float64 if query.dtype == dtypes.float64 else dtypes.float32
    return like(query), TensorProxy(like=query, shape=tuple(query.shape[:3]), dtype=precise, requires_grad=False)


def _in_rows(t: torch.Tensor) -> torch.Tensor:
    """The kernels go through the last dimension by themselves, whatever its stride is: torch gives them no others."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _run_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = _in_rows(query), _in_rows(key), _in_rows(value)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)


def _run_attention_gradient(
    g: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    g, query, key, value = _in_rows(g), _in_rows(query), _in_rows(key), _in_rows(value)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )


_attention_forward = operations.register_operator("attention", meta=_attention_meta, fn=_run_attention)
_attention_gradient = operations.register_operator(
    "attention_gradient", meta=lambda g, *rest: tuple(map(like, rest[:3])), fn=_run_attention_gradient
)


def attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> TensorProxy:
    """Attention and its gradients by torch's CPU kernels, which keep no scores."""
    mask = attn_mask
    if mask is not None and mask.dtype == dtypes.bool8:  # the kernel adds it
        zeros = ltorch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = ltorch.where(mask, zeros, float("-inf"))
    out, logsumexp = _attention_forward(query, key, value, mask, bool(is_causal), scale)
    g = prims.get_grad(out)
    gradients = _attention_gradient(g, query, key, value, out, logsumexp, mask, bool(is_causal), scale)
    put((query, key, value), (True,) * 3, gradients)
    return out


@kernels(ltorch.scaled_dot_product_attention)
def _attention_rule(wanted: Callable[[Any], bool], *args: Any) -> Joint | None:
    query, key, value, mask, *others, scale = args
    is_added = isinstance(mask, TensorProxy) and mask.dtype == query.dtype and mask.ndim in (2, 4) and not wanted(mask)
    choice = None if is_added else mask
    if not is_fast_attention(query, key, value, choice, *others, scale=scale) or (is_added and others[1]):
        return None
    return lambda *args: attention(*args[:-1], scale=args[-1])


@kernels(ltorch._softmax)
def _softmax_rule(wanted: Callable[[Any], bool], a: TensorProxy, dim: int, dtype: Any) -> Joint | None:
    if not are_floats(a) or a.ndim == 0 or dtype is not None:
        return None

    def joint(a: TensorProxy, dim: int, dtype: Any) -> TensorProxy:
        out = ltorch._softmax(a, dim)
        prims.put_grad(a, _softmax_gradient(prims.get_grad(out), out, dim))
        return out

    return joint


_softmax_gradient = operations.register_operator(
    "softmax_gradient",
    meta=lambda g, out, dim: like(out),
    fn=lambda g, out, dim: torch._softmax_backward_data(g, out, dim, out.dtype),
)
