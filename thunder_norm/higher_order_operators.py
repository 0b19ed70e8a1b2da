"""Torch's operators that take functions (``torch.cond``, scan, map, flex_attention), as what they do in eager mode, written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator


def written_out(op: Any) -> Callable | None:
    """The Python that does what `op` does, if it is such an operator and has any: it takes the same arguments."""
    if not isinstance(op, HigherOrderOperator):
        return None
    return _WRITTEN.get(op.name()) or op.py_kernels.get(DispatchKey.CompositeExplicitAutograd)


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence[Any]) -> Any:
    """As the kernel of torch's, which may run under no mode."""
    return true_fn(*operands) if pred else false_fn(*operands)


def _scan(
    combine_fn: Callable,
    init: Sequence[Any],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[Any] = (),
    mutated_arg_indices: str = "",
) -> tuple[Any, ...]:
    """As the kernel of torch's, which scatters rows into tensors that nothing has filled: of those no norm is known."""
    carry, rows = tuple(init), []
    for i in range(xs[0].shape[0]):
        results = combine_fn(*carry, *[x.select(0, i) for x in xs], *additional_inputs)
        carry, row = results[: len(init)], results[len(init) :]
        rows.append(row)
    return (*carry, *[None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)])


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple = (),
    mask_mod_other_buffers: tuple = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the kernel of torch's (`math_attention`), but for the strides; what changes nothing is left out, so that norms need not pass it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _identity, _vmap_for_bhqkv, noop_mask

    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.size(1) // key.size(1)
    key, value = (torch.repeat_interleave(x, groups, dim=1) if groups > 1 else x for x in (key, value))
    scores = (query.to(precision) @ key.to(precision).transpose(-2, -1)) * scale
    places = [torch.arange(0, n, device=scores.device) for n in scores.shape]
    mask_mod, is_masked = block_mask[-1], score_mod is not _identity or block_mask[-1] is not noop_mask
    with TransformGetItemToIndex():
        if score_mod is not _identity:
            batched = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_mod_other_buffers))
            scores = batched(scores, *places, *score_mod_other_buffers).to(precision)
        if mask_mod is not noop_mask:
            batched = _vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(mask_mod_other_buffers))
            scores = torch.where(batched(*places, *mask_mod_other_buffers), scores, -float("inf"))
    weights = torch._safe_softmax(scores, dim=-1) if is_masked else scores.softmax(-1)  # a row may see nothing
    out = weights.to(query.dtype) @ value.to(query.dtype)
    return out, scores.logsumexp(dim=-1) / math.log(2), scores.amax(dim=-1) / math.log(2)


_WRITTEN = {"cond": _cond, "scan": _scan, "flex_attention": _flex_attention}
