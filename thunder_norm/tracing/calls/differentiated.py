"""A program with a backward part as one node of torch's autograd.

``thunder.executors.torch_autograd`` makes two nodes, so that the gradients of large results can be freed while the backward part runs, with
a random tensor between them in each direction.  One node is enough where the results are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

_MOST_BYTES = 2**24  # of results whose gradients may stay while the backward part runs


class _Program(torch.autograd.Function):
    """Results that were computed already, with the backward part of their program."""

    @staticmethod
    def forward(ctx: Any, backward: Callable, saved: tuple, other: Any, results: tuple, *inputs: Any) -> tuple:
        ctx.program, ctx.other = backward, other
        # a view of a result that is saved would keep the result, and with it this node, for good: github.com/pytorch/pytorch/issues/94990
        ctx.save_for_backward(*(t.detach() if isinstance(t, torch.Tensor) and t._base is not None else t for t in saved))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # the backward part frees each when it has used it
        return (None, None, None, None, *ctx.program([saved, ctx.other], list(cotangents)))


class InOneNode:
    """The backward part of an entry whose results are to be connected by `connect`."""

    def __init__(self, backward: Callable):
        self.backward = backward

    def __call__(self, saved: Any, cotangents: Any) -> Any:
        return self.backward(saved, cotangents)


def has_small_results(trace: TraceCtx) -> bool:
    """Whether the gradients of what a computation with a backward part returns are small."""
    returned = trace.bound_symbols[-1].args[0]
    if not isinstance(returned, dict) or "flat_output" not in returned:
        return False
    sizes = [p.numel * p.dtype.bytes for p in returned["flat_output"] if isinstance(p, TensorProxy)]
    return sum(sizes) <= _MOST_BYTES


def connect(backward: InOneNode, inputs: Sequence[Any], results: tuple, saved: tuple, other: Any) -> None:
    """Have torch's autograd differentiate results that were computed already.

    Args:
        backward: of what was saved and the cotangents of the results; it empties both lists.
        inputs: of the program, flat.
        results: of the program, flat; they get the history.
        saved: tensors that the backward part needs.
        other: what else it needs.
    """
    _Program.apply(backward.backward, saved, other, results, *inputs)
