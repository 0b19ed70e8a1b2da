"""``torch.nn.attention.bias``: the one class of tensors of torch's that attention takes for what it says, and not for what is in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.lookasides import instead_of_named
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call


class _Made:
    """A bias that the program makes."""

    def __init__(self, variant: Any, seq_len_q: int, seq_len_kv: int) -> None:
        self.variant, self.seq_len_q, self.seq_len_kv = variant, seq_len_q, seq_len_kv


@instead_of_named("torch.nn.attention.bias", "CausalBias")
def _made(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _interpret_call(_Made, *args, **kwargs)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is attention with such a bias; None for all others."""
    if fn is not F.scaled_dot_product_attention:
        return None
    mask = kwargs.get("attn_mask") or (args[3] if len(args) > 3 else None)
    if mask is None or not _is_bias(mask):
        return None

    def call(query: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        written = _interpret_call(_written, mask, query)
        if written is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return written
        if "attn_mask" in kwargs:
            return _interpret_call(fn, query, *args, **{**kwargs, "attn_mask": written})
        return _interpret_call(fn, query, *args[:2], written, *args[3:], **kwargs)

    return call


def _is_bias(mask: WrappedValue) -> bool:
    module = sys.modules.get("torch.nn.attention.bias")
    if module is not None and type(mask.original_value) is module.CausalBias:
        guards.note(mask, "type", None, module.CausalBias)
        return True
    return type(mask.value) is _Made


def _written(bias: Any, query: torch.Tensor) -> torch.Tensor:
    """The mask that it stands for: lower right ones end with the last key, upper left ones begin with the first."""
    rows, columns = bias.seq_len_q, bias.seq_len_kv
    offset = columns - rows if bias.variant.name == "LOWER_RIGHT" else 0
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(offset)
