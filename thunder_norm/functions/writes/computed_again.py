"""What Thunder's backward would compute again of memory that is written by then."""

from __future__ import annotations

from thunder_norm.functions.writes.aliasing import in_memory_of
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx


def keep_what_is_written(trace: TraceCtx) -> None:
    """Have the forward keep what is computed from arguments that the program writes into, in a part that is tagged to be computed again."""
    if not any(copies_in(b) for b in trace.bound_symbols):
        return
    root = {p.name: p.name for p in trace.args if isinstance(p, TensorProxy)}
    written = set()
    for bsym in trace.bound_symbols:
        root |= {out: root[base] for out, base in in_memory_of(bsym).items() if base in root}
        for copy in copies_in(bsym):
            if copy.args[1].name in root:
                root[copy.output.name] = root[copy.args[1].name]
                written.add(root[copy.output.name])
    for bsym in trace.bound_symbols:
        if any(root.get(p.name) in written for p in bsym.flat_proxy_args):
            for p in bsym.flat_proxy_outs:
                p.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
