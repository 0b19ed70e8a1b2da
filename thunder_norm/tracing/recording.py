"""What is written to a trace: recorded apart, and joint gradient rules taken apart once they are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx


def declare_arguments(trace: TraceCtx, name: str) -> None:
    """Make `trace.args` the signature of the function a trace prints."""
    info = SigInfo(name)
    info.args = [(p.name, None) for p in trace.args]
    trace._siginfo = info


@contextlib.contextmanager
def scope(trace: TraceCtx) -> Iterator[list[BoundSymbol]]:
    """Record what is written to `trace` in a list of its own; whatever happens inside, the trace is as before afterwards.

    A symbol whose meta function raises leaves its own scope behind.
    """
    saved = list(trace.scopes)
    bsyms: list[BoundSymbol] = []
    trace.push_scope(bsyms)
    try:
        yield bsyms
    finally:
        trace.scopes[:] = saved


@contextlib.contextmanager
def gradients_recorded(is_recorded: bool) -> Iterator[None]:
    """What is written into the trace inside the block has derivatives, or has none, whatever the program says there."""
    cd = get_compile_data()
    if cd is None:
        yield
        return
    was_enabled, cd.is_grad_enabled = cd.is_grad_enabled, is_recorded
    try:
        yield
    finally:
        cd.is_grad_enabled = was_enabled


def backward_of_joint(
    recorded: Sequence[BoundSymbol], cotangent_of: Mapping[str, TensorProxy]
) -> Iterator[tuple[Proxy, TensorProxy]]:
    """Write what a joint rule recorded, with cotangents in place of ``get_grad``; the pairs given to ``put_grad`` as they come.

    Args:
        recorded: what the rule wrote, or the part of it that is to be written.
        cotangent_of: of the results, by name.
    """
    swaps: dict[Variable, Proxy] = {}
    for bsym in recorded:
        if bsym.sym.id is PrimIDs.GET_GRAD:
            swaps[variableify(bsym.output)] = cotangent_of[bsym.args[0].name]
        elif bsym.sym.id is PrimIDs.PUT_GRAD:
            target, gradient = bsym.args
            yield target, swaps.get(variableify(gradient), gradient)
        else:
            get_tracectx().peek_scope().append(bsym.from_bsym_swap_proxies(swaps, skip_output=True))


def print_without_module(bsym: BoundSymbol) -> None:
    """Have a symbol of ours printed by its name alone: its ``_bind_postprocess``."""
    bsym._call_ctx = {}
