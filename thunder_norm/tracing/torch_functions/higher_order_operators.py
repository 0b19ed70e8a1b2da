"""Torch's operators that take functions: in a trace they are the operations of those functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.higher_order_operators import written_out
from thunder_norm.tracing.lookasides import instead_of_named, under_another_name
from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const


def lookaside(fn: Any) -> Callable | None:
    """What to call instead of `fn`, if it is such an operator, or torch's function around one; None for all others.

    Given wrappers ``torch.cond`` would count as an operation, which torch runs on them.
    """
    function = under_another_name(torch.cond) if fn is torch.cond else written_out(fn)
    return None if function is None else functools.partial(_interpret_call, function)


@instead_of_named("torch.fx.experimental.symbolic_shapes", "has_free_unbacked_symbols")
def _has_symbols(value: WrappedValue) -> WrappedValue:
    """Of a tensor, and of strides that a trace does not have: its sizes are numbers."""
    return wrap_const(False)


@instead_of_named("torch.nn.attention.flex_attention", "_validate_device")
def _is_differentiable(*tensors: WrappedValue) -> WrappedValue:
    """Torch's kernels of `flex_attention` have no gradient on a CPU: in a trace it is written out."""
    return wrap_const(None)
