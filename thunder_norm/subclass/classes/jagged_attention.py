"""Attention between jagged nested tensors where torch has no kernel for them: on a CPU.

There torch takes the sequences apart and makes nested tensors of the strided layout, for which it has an implementation.  A trace has one
operation for all of that, on the values and the offsets: it does not depend on what the offsets are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user


def attention(
    fn: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of nested tensors; `fn` is torch's, which runs wherever it has a kernel.

    Raises:
        UnsupportedOpError: on a CPU, with dropout or a causal mask.
    """
    from torch.nested._internal import sdpa
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths as view

    math = torch.nn.attention.SDPBackend.MATH
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    query, key, value, attn_mask = sdpa._autocast(query, key, value, attn_mask)
    sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
    is_dense = min(query.dim(), key.dim(), value.dim()) > 3 and query._ragged_idx == 1
    is_on_cpu = (
        query.device.type == "cpu" and torch.backends.cuda.math_sdp_enabled()
    )  # torch asks for CUDA, which may not be there
    chosen = math if is_on_cpu else sdpa._select_sdp_backend(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if is_dense or chosen != math:
        return fn(query, key, value, attn_mask=attn_mask, **options)
    if is_causal or dropout_p:
        raise UnsupportedOpError(
            with_details(
                f"scaled_dot_product_attention of nested tensors on a CPU {'that is causal' if is_causal else 'with dropout'}",
                at=location_of_user(),
                why="torch has none there" if is_causal else "it draws its numbers in the order of the sequences",
            )
        )
    operation = _operation()
    values = [x.transpose(1, 2).values() for x in (query, key, value)]
    offsets = [x.offsets() for x in (query, key, value)]
    result = operation(*values, *offsets, scale)
    extremes = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return view(result, query.offsets(), query.lengths(), **extremes).transpose(1, 2)


def _computed(values: list[torch.Tensor], offsets: list[torch.Tensor], scale: float | None) -> torch.Tensor:
    """What torch does: ``[length, heads, features]`` of each sequence, one behind the other."""
    sequences = [v.split(o.diff().tolist(), dim=0) for v, o in zip(values, offsets, strict=True)]
    strided = [torch.nested.as_nested_tensor(list(parts)).transpose(1, 2).contiguous() for parts in sequences]
    result = torch._scaled_dot_product_attention_math(*strided, None, 0.0, False, scale=scale)[0]
    return result.transpose(1, 2).contiguous().values().view(-1, *_outer(values))


def _outer(values: list[torch.Tensor]) -> tuple[int, int]:
    query, _, value = values
    return query.shape[1], value.shape[2]


def _gradients(grad: torch.Tensor, values: list[torch.Tensor], scale: float | None) -> tuple[torch.Tensor, ...]:
    """The gradients of one sequence's attention, ``softmax(q k^T scale) v``, to q, k and v, all ``[length, heads, features]``."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    g, q, k, v = (t.to(dtype).transpose(0, 1) for t in (grad, *values))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    p = ((q @ k.mT) * factor).softmax(-1)
    dp = g @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
    return tuple([t.transpose(0, 1).to(grad.dtype) for t in (ds @ k, ds.mT @ q, p.mT @ g)])


@functools.cache
def _operation() -> Any:
    """The operation, with its gradient: torch runs it, so that fakes need to know no more than its shapes."""

    @torch.library.custom_op("thunder_norm::jagged_attention", mutates_args=())
    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_at: torch.Tensor,
        k_at: torch.Tensor,
        v_at: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        return _computed([q, k, v], [q_at, k_at, v_at], scale).clone()

    @torch.library.custom_op("thunder_norm::jagged_attention_backward", mutates_args=())
    def run_backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_at: torch.Tensor,
        k_at: torch.Tensor,
        v_at: torch.Tensor,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = [o.diff().tolist() for o in (q_at, q_at, k_at, v_at)]
        parts = zip(*(t.split(n, dim=0) for t, n in zip((grad, q, k, v), lengths, strict=True)), strict=True)
        found = [_gradients(g, list(values), scale) for g, *values in parts]
        return tuple([torch.cat(of_all) for of_all in zip(*found, strict=True)])

    run.register_fake(lambda q, k, v, *_: q.new_empty(q.shape[0], *_outer([q, k, v])))
    run_backward.register_fake(lambda grad, q, k, v, *_: tuple([t.new_empty(t.shape) for t in (q, k, v)]))

    def keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *run_backward(grad, *ctx.saved_tensors, ctx.scale), *(None,) * 4

    run.register_autograd(backward, setup_context=keep)
    return torch.ops.thunder_norm.jagged_attention.default
