"""Torch's inductor as an executor of Thunder's: regions of forward and backward are compiled from what torch would run in them.

``thunder.jit(model, executors=[thunder_norm.executors.inductor])``.  Thunder's own executor ``torchcompile`` calls Dynamo, which guards
again what the prologue has checked.  Here the operations of a region run once on fake tensors, and what they do goes to inductor.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.executors import gradients, own_writes, recomputed, stored
from thunder_norm.executors.calls import RegionCall, Traits
from thunder_norm.executors.plans import Layout
from thunder_norm.executors.regions import Item, Region, partitioned
from thunder_norm.functions.jitted import Watching
from thunder_norm.tracing import hooks
from thunder_norm.tracing.recording import declare_arguments
from thunder.core import prims
from thunder.core.proxies import Proxy, Variable, unvariableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.executors import passes
from thunder.executors.passes import del_last_used
from thunder.extend import FusionExecutor, get_always_executors, register_executor


class InductorExecutor(FusionExecutor):
    """Compiles what torch would run.

    It claims no operation by itself: what stands before it in ``executors=[...]`` has taken its operations when its turn comes, and
    those that wait for a fusing executor behind it are taken here.
    """

    compiles_writes = True  # in place, where they are written as operations that make new tensors

    def __init__(self) -> None:
        super().__init__("thunder_norm_inductor", version=torch.__version__)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The trace with regions in it."""
        started = time.perf_counter_ns()
        # looked up here: while a program is compiled it is ours
        trace = passes._transform_for_operator_executor_execution(trace, get_always_executors())
        fused = from_trace(trace)
        bsyms = recomputed.recomputing(own_writes.without(gradients.together(trace.bound_symbols)), fused)
        items = partitioned(bsyms)
        regions = [item for item in items if isinstance(item, Region)]
        used, returned = _used_outside(items)
        kept = gradients.kept_weights(trace.bound_symbols)
        has_backward = any(r.is_backward for r in regions)
        fused.bound_symbols = []
        count = 0
        for item in items:
            if isinstance(item, Region):
                # gradients may lie in memory as they come: torch's autograd gives those of leaves the strides of the leaves
                seen = used if item.is_backward else used | returned
                layouts = tuple(_layout(p.name, seen, kept) for p in item.outputs)
                traits = Traits(f"region {count + 1} of {len(regions)}", layouts, has_backward)
                fused.bound_symbols.append(self._bound(f"inductor{count}", item, traits))
                count += 1
            else:
                fused.bound_symbols.append(item)
        took = (time.perf_counter_ns() - started) // 1000000
        fused.set_provenance(TraceProvenance(f"Fusion for inductor (took {took} milliseconds)"))
        return fused

    def fuse(self, region: Any, fusion_counter: int) -> BoundSymbol:
        """A region made anew, which another executor's pass asks for: its inputs, outputs and operations may be others now."""
        inputs, outputs = (
            [unvariableify(v) for v in found if isinstance(v, Variable)] for found in (region.inputs, region.outputs)
        )
        renewed = Region(list(region.bound_symbols), inputs, outputs)
        renewed.is_backward = any(BoundSymbolTag.BACKWARD in b.tags for b in renewed.bsyms)
        traits = Traits(f"region {fusion_counter + 1}", (Layout.AS_IN_TORCH,) * len(outputs), renewed.is_backward)
        return self._bound(f"inductor{fusion_counter}", renewed, traits)

    def _bound(self, name: str, region: Region, traits: Traits) -> BoundSymbol:
        described = functools.partial(stored.described, region.bsyms, region.inputs, region.outputs)
        call = RegionCall(_function_of(name, region), dataclasses.replace(traits, described=described)).call
        symbol = Symbol(name=name, id=name, meta=None, is_fusion=True, executor=self)
        tags = {BoundSymbolTag.BACKWARD} if region.is_backward else set()
        return BoundSymbol(
            symbol,
            tuple(region.inputs),
            {},
            list(region.outputs),
            subsymbols=list(region.bsyms),
            _call_ctx={name: call},
            tags=tags,
        )


def _layout(name: str, seen: set[str], kept: set[str]) -> Layout:
    if name in seen:
        return Layout.AS_IN_TORCH
    return Layout.ANY_OF_A_COPY if name in kept else Layout.ANY


def _used_outside(items: Sequence[Item]) -> tuple[set[str], set[str]]:
    """The names that something else than a region uses, which may ask for strides: operations, and what returns the results."""
    used: set[str] = set()
    returned: set[str] = set()
    for item in items:
        if isinstance(item, BoundSymbol):
            (returned if item.sym.id is prims.PrimIDs.RETURN else used).update(p.name for p in item.flat_proxy_args)
    return used, returned


def _function_of(name: str, region: Region) -> Callable:
    """A region as a Python function that has torch run one operation after the other; written when it is first called."""
    made: Callable | None = None

    def function(*inputs: torch.Tensor) -> Any:
        nonlocal made
        if made is None:
            made = _written(name, region)
        return made(*inputs)

    return function


def _written(name: str, region: Region) -> Callable:
    trace = TraceCtx(None)
    trace.args = list(region.inputs)
    trace.kwargs = {}
    trace.names = {p.name for b in region.bsyms for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    with tracectx(trace):
        for p in region.inputs:
            prims.unpack_trivial(p, name=p.name)
        trace.bound_symbols += region.bsyms
        trace.bound_symbols.append(prims.python_return.bind(_outputs(region.outputs), output=None))
    declare_arguments(trace, name)
    return del_last_used(trace).python_callable(include_decorators=False)


def _outputs(outputs: Sequence[Proxy]) -> tuple[Proxy, ...]:
    return tuple(outputs)


hooks.joins_tied_parameters(InductorExecutor)
hooks.brings(InductorExecutor, Watching)  # values that the program asks for, and what it writes, are not Thunder's guess
hooks.install()
executor = InductorExecutor()
gradients.register(executor)
register_executor(executor)
