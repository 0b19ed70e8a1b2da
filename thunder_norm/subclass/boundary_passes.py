"""Rewrites of the three traces of a program once only plain tensors cross between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_norm.subclass.boundary_operators import bindable
from thunder_norm.subclass.trace import keep_only

Traces = tuple[TraceCtx, TraceCtx, TraceCtx | None]


def declare_arguments(trace: TraceCtx, name: str) -> None:
    """Make `trace.args` the signature of the function a trace prints."""
    info = SigInfo(name)
    info.args = [(p.name, None) for p in trace.args]
    trace._siginfo = info


def bind_arguments(trace: TraceCtx, name: str, added: list[Proxy]) -> None:
    """Declare `trace.args` in the signature, and unpack those that are new."""
    declare_arguments(trace, name)
    with tracectx(trace):
        unpacks = [prims.unpack_trivial.bind(p, output=p, name=p.name) for p in added]
    trace.bound_symbols[:0] = unpacks


def computing_only(trace: TraceCtx, outputs: Sequence[TensorProxy]) -> TraceCtx:
    """The computation of some of its outputs alone; its arguments are those they need."""
    *body, returned = trace.bound_symbols
    body = keep_only([b for b in body if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL], {p.name for p in outputs})
    made = {p.name for b in body for p in b.flat_proxy_outs}
    used = {p.name for b in body for p in b.flat_proxy_args} | {p.name for p in outputs} - made
    arguments = tuple({p.name: p for p in trace.args if p.name in used}.values())
    new = from_trace(trace)
    unpacks = [b for b in trace.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and b.output.name in used]
    kept = {**returned.args[0], "output": tuple(outputs), "flat_args": list(arguments)}
    new.bound_symbols = [*unpacks, *body, returned.from_bsym(args=(kept,))]
    new.args = arguments
    declare_arguments(new, "computation")
    new.set_provenance(TraceProvenance("Norms only"))
    return new


def pass_through_epilogue(
    traces: Traces,
    outputs: tuple[TensorProxy, ...],
    given: Sequence[Any],
    name: str,
    function: Callable[..., tuple[torch.Tensor, ...]],
) -> Traces:
    """Replace, in the epilogue, the computed `outputs` by ``function(*outputs, *given)``.

    `given` are inputs of the computation; they become further arguments of the epilogue.
    """
    prologue, computation, epilogue = traces
    new_prologue = from_trace(prologue)
    (to_computation, to_epilogue) = prologue.bound_symbols[-1].args[0]
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *given)),))
    new_prologue.bound_symbols = [*prologue.bound_symbols[:-1], returned]

    new = from_trace(epilogue)
    swaps, inputs = {}, []
    with tracectx(new):
        for p in given:
            inputs.append(TensorProxy(like=p) if isinstance(p, TensorProxy) else p)
        passed = tuple(TensorProxy(like=p) for p in outputs)
    swaps = {variableify(p): q for p, q in zip(outputs, passed, strict=True)}
    unpacks = [b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    call = bindable(name, function)(*outputs, *inputs, output=passed)
    new.bound_symbols = [*unpacks, call, *rest]
    # the epilogue takes what the prologue sends it first, then what the computation returns
    new.args = (*epilogue.args[: len(to_epilogue)], *inputs, *epilogue.args[len(to_epilogue) :])
    bind_arguments(new, "epilogue", inputs)
    return new_prologue, computation, new
