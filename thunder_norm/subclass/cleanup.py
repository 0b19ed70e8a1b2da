"""What an execution trace can do without."""

from __future__ import annotations

from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.executors.passes import del_last_used

_NOT_COMPUTED = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)


def without_copies(trace: TraceCtx) -> TraceCtx:
    """Drop shallow copies, which say something to automatic differentiation and nothing to what runs afterwards.

    The copy of an input stays, and that of something else that is returned: those must not become one tensor.
    """
    bsyms = [b for b in trace.bound_symbols if b.sym.id != prims.PrimIDs.DEL and b.sym.name != "clear_mutable_collection"]
    returned = {p.name for p in tree_flatten(bsyms[-1].args[0])[0] if isinstance(p, TensorProxy)}
    inputs = {p.name for b in bsyms if b.sym.id in _NOT_COMPUTED for p in b.flat_proxy_outs}
    swaps: dict = {}
    kept = []
    for bsym in bsyms:
        bsym = bsym.from_bsym_swap_proxies(swaps, skip_output=True)
        original = bsym.args[0] if bsym.sym.name == "shallow_copy" else None
        if original is not None and original.name not in inputs | returned:
            swaps[variableify(bsym.output)] = original
            if bsym.output.name in returned:
                returned.add(original.name)
        else:
            kept.append(bsym)
    if not swaps:
        return trace
    new = from_trace(trace)
    new.bound_symbols = kept
    new.set_provenance(TraceProvenance("Shallow copies dropped"))
    return del_last_used(
        new, clear_mutable_collections=any(b.sym.name == "clear_mutable_collection" for b in trace.bound_symbols)
    )
