"""Operations on one device each: what runs an operation runs it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace


def apart_by_device(trace: TraceCtx) -> TraceCtx:
    """The same computation with what has results on several devices replaced by what it consists of.

    An operation on wrappers is one in the trace, whatever it computes on each inner tensor: on a GPU, and of a norm that is a number
    on the CPU.  nvFuser takes it whole, and returns the number on the GPU.
    """
    if not any(len(_devices(b.flat_proxy_outs)) > 1 for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = list(_apart(trace.bound_symbols))
    new.set_provenance(TraceProvenance("Operations on several devices taken apart"))
    return new


def _apart(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    for bsym in bsyms:
        if bsym.subsymbols and len(_devices(bsym.flat_proxy_outs)) > 1:
            yield from _apart(bsym.subsymbols)
        else:
            yield bsym


def _devices(proxies: Iterable[object]) -> set[object]:
    return {p.device for p in proxies if isinstance(p, TensorProxy)}
