"""Derivatives of norms beyond the first, through jitted functions.

Thunder's connection to torch.autograd is differentiable once; asked for more it gives detached gradients without a word.  The
scalars of a normed program pass through `Twice`, whose backward is Thunder's own, except when a graph of the backward is
asked for (``create_graph=True``): then the program is run again by torch, under autograd, and differentiated by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce
from thunder.executors.passes import transform_for_execution
from thunder.executors.pythonex import ex as pythonex
from thunder.executors.torchex import ex as torchex


class Replay:
    """A computation trace, restricted to some of its outputs, as a differentiable function run by torch."""

    def __init__(self, trace: TraceCtx, outputs: Sequence[TensorProxy]):
        self._trace = trace
        self._outputs = tuple(outputs)
        self._function: Callable | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run on the computation's inputs, in order."""
        if self._function is None:
            self._function = self._compile()
        with torch.enable_grad():
            return self._function(*inputs)

    def gradients(self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Vector-Jacobian products with a graph, one for each input (None where there is none)."""
        outputs = self(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        differentiable = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in differentiable],
            wanted,
            [g for _, g in differentiable],
            create_graph=True,
            allow_unused=True,
        )
        by_input = iter(found)
        return [next(by_input) if t.requires_grad else None for t in inputs]

    def _compile(self) -> Callable:
        new = from_trace(self._trace)
        *body, returned = self._trace.bound_symbols
        new.bound_symbols = [*body, returned.from_bsym(args=(self._outputs,), output=self._outputs)]
        executable = transform_for_execution(dce(new), executors_list=(torchex, pythonex))
        return executable.python_callable(include_decorators=False)


class Twice(torch.autograd.Function):
    """The identity on scalars, whose backward can itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`tensors` are `count` scalars and then the inputs of the computation they came from."""
        ctx.replay, ctx.count = replay, count
        ctx.save_for_backward(*tensors[count:])
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """Thunder's gradients, or torch's own with a graph if one is asked for."""
        inputs = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, None, *grads, *(None for _ in inputs))
        return (None, None, *(None for _ in grads), *ctx.replay.gradients(inputs, grads))


class RunCompiled(torch.autograd.Function):
    """A compiled computation of scalars, whose backward is the compiled one and can itself be differentiated."""

    @staticmethod
    def forward(ctx: Any, entry: Any, replay: Replay, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`entry` is Thunder's cache entry for the computation of `inputs`."""
        for_autograd, (saved_tensors, saved_other) = entry.computation_fn(*inputs)
        ctx.entry, ctx.replay, ctx.saved_other, ctx.num_saved = entry, replay, saved_other, len(saved_tensors)
        ctx.save_for_backward(*saved_tensors, *inputs)
        return tuple(for_autograd["output"])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The compiled gradients, or torch's own with a graph if one is asked for."""
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, None, *ctx.replay.gradients(tensors[ctx.num_saved :], grads))
        return (None, None, *ctx.entry.backward_fn([list(tensors[: ctx.num_saved]), ctx.saved_other], list(grads)))


def differentiable_twice(replay: Replay, scalars: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`scalars` with derivatives of any order with respect to `inputs`."""
    if not any(s.requires_grad for s in scalars):
        return tuple(scalars)
    with torch.enable_grad():
        return Twice.apply(replay, len(scalars), *scalars, *inputs)
