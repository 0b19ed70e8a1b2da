"""What Thunder's backward would compute again of memory that is written by then."""

from __future__ import annotations

from thunder_norm.functions.writes.aliasing import roots_of, writes_into
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder.core.proxies import ProxyTag
from thunder.core.trace import TraceCtx


def keep_what_is_written(trace: TraceCtx) -> None:
    """Have the forward keep what is computed from arguments that the program writes into, in a part that is tagged to be computed again."""
    tagged = [b for b in trace.bound_symbols if any(ProxyTag.RECOMPUTE_IN_BACKWARD in p.tags for p in b.flat_proxy_outs)]
    if not tagged or not any(copies_in(b) for b in trace.bound_symbols):
        return
    root = roots_of(trace)
    written = {name for name, _ in writes_into(trace.bound_symbols, root)}
    for bsym in tagged:
        if any(root.get(p.name) in written for p in bsym.flat_proxy_args):
            for p in bsym.flat_proxy_outs:
                p.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
