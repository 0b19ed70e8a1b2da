"""Which tensors of a trace depend differentiably on inputs that require grad."""

from __future__ import annotations

from thunder.core import dtypes
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


def propagate(bsym: BoundSymbol, active: set[str]) -> None:
    """Add to `active` the names of results of `bsym` that depend differentiably on a tensor in it."""
    for sub in bsym.subsymbols:
        propagate(sub, active)
    if bsym.subsymbols or bsym.sym.name == "detach" or active.isdisjoint(p.name for p in bsym.flat_proxy_args):
        return
    for p in bsym.flat_proxy_outs:
        if isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in p.tags:
            active.add(p.name)


def depending(trace: TraceCtx, names: set[str]) -> set[str]:
    """The names in a trace of what depends differentiably on these."""
    active = set(names)
    for bsym in trace.bound_symbols:
        propagate(bsym, active)
    return active
