"""Derivatives of norm maps beyond the first.

A norm map runs compiled programs itself, with a node of torch's autograd around each.  Its backward is the compiled one, except when a
graph of the backward is asked for (``create_graph=True``): then the program is run again by torch, under autograd, and differentiated
by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from thunder_norm.subclass.recording.trace import OperationId
from thunder_norm.tracing import native
from thunder_norm.tracing.guarding.bindable import bindable
import thunder
from thunder.core import transform_common
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors import passes
from thunder.executors.pythonex import ex as pythonex
from thunder.executors.torchex import ex as torchex


class Replay:
    """A computation trace, restricted to some of its outputs, as a differentiable function run by torch."""

    def __init__(self, trace: TraceCtx, outputs: Sequence[TensorProxy]):
        self.trace = trace
        self.outputs = tuple(outputs)
        self._function: Callable | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run on the computation's inputs, in order."""
        if self._function is None:
            self._function = self._compile()
        with torch.enable_grad():
            return self._function(*inputs)

    def gradients(
        self,
        given: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        inputs_of: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
    ) -> list[torch.Tensor | None]:
        """Vector-Jacobian products with a graph, one for each tensor given (None where there is none).

        Args:
            given: the inputs, or the tensors that they are entries of.
            grads: those of the outputs.
            inputs_of: the inputs, from what is given.
        """
        with torch.enable_grad():  # one tensor may be given as several inputs: each gets its own share
            given = [t.view_as(t) if t.requires_grad else t for t in given]
            outputs = self(*inputs_of(given))
        wanted = [t for t in given if t.requires_grad]
        differentiable = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in differentiable],
            wanted,
            [g for _, g in differentiable],
            create_graph=True,
            allow_unused=True,
        )
        by_tensor = iter(found)
        return [next(by_tensor) if t.requires_grad else None for t in given]

    def _compile(self) -> Callable:
        new = from_trace(self.trace)
        *body, returned = self.trace.bound_symbols
        body, outputs = _detaching(new, body, self.outputs)
        new.bound_symbols = [*body, returned.from_bsym(args=(outputs,), output=outputs)]
        with native.compiler():
            return _executable(transform_common.dce(new)).python_callable(include_decorators=False)


def _detaching(trace: TraceCtx, bsyms: Sequence[BoundSymbol], outputs: tuple) -> tuple[list[BoundSymbol], tuple]:
    """A program that detaches what it makes under `torch.no_grad`, where Thunder only has tags; torch runs it."""
    found: list[BoundSymbol] = []
    detached: dict[Any, TensorProxy] = {}
    for bsym in opened(bsyms):
        found.append(bsym.from_bsym_swap_proxies(detached))
        made = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy) and ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags]
        if made:
            with tracectx(trace):
                copies = tuple(TensorProxy(like=p) for p in made)
            found.append(bindable("detach", lambda *tensors: tuple(t.detach() for t in tensors))(*made, output=copies))
            detached |= {variableify(p): copy for p, copy in zip(made, copies, strict=True)}
    return found, tuple(detached.get(variableify(p), p) for p in outputs)


def opened(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Operations with our composites replaced by what they are made of."""
    for bsym in bsyms:
        if isinstance(bsym.sym.id, OperationId):
            yield from opened(bsym.subsymbols)
        else:
            yield bsym


@thunder._with_cache_info_ctx
def _executable(trace: TraceCtx) -> TraceCtx:
    """The trace with every operation run by torch; factories ask the surrounding call for the defaults."""
    defaults = {"default_dtype": torch.get_default_dtype(), "default_device": torch.get_default_device()}
    thunder._get_cache_info().update(defaults, is_autocast_enabled=False)
    return passes.transform_for_execution(trace, executors_list=(torchex, pythonex))


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
