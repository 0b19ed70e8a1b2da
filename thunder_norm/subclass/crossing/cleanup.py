"""What an execution trace can do without."""

from __future__ import annotations

from thunder_norm.tracing.shared_memory.freed_inputs import deleting_again
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

_NOT_COMPUTED = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE)


def without_copies(trace: TraceCtx) -> TraceCtx:
    """Drop shallow copies, which say something to automatic differentiation and nothing to what runs afterwards.

    A copy that is returned stays if its original is an input, or returned too: those must not become one tensor.  A transpose of a
    transpose, of which torch's formula for the weight of a linear layer is full, is such a copy too; of an input it stays where it is
    returned, as what runs for a shallow copy returns the very tensor.
    """
    bsyms = [b for b in trace.bound_symbols if b.sym.id != prims.PrimIDs.DEL and b.sym.name != "clear_mutable_collection"]
    returned = {p.name for p in tree_flatten(bsyms[-1].args[0])[0] if isinstance(p, TensorProxy)}
    inputs = {p.name for b in bsyms if b.sym.id in _NOT_COMPUTED for p in b.flat_proxy_outs}
    handed_on = set(returned)  # under other names
    for bsym in reversed(bsyms):
        if bsym.sym.name == "shallow_copy" and bsym.output.name in handed_on:
            handed_on.add(bsym.args[0].name)
    swaps: dict = {}
    kept = []
    permuted: dict[str, tuple[TensorProxy, tuple[int, ...]]] = {}
    for bsym in bsyms:
        bsym = bsym.from_bsym_swap_proxies(swaps, skip_output=True)
        original = bsym.args[0] if bsym.sym.name == "shallow_copy" else None
        if bsym.sym.name == "permute":
            source, order = permuted.get(bsym.args[0].name, (None, ()))
            is_undone = source is not None and [order[i] for i in bsym.args[1]] == list(range(len(order)))
            if is_undone and not (source.name in inputs and bsym.output.name in handed_on):
                original = source
            permuted[bsym.output.name] = bsym.args[0], tuple(bsym.args[1])
        is_returned = any(p.name in returned for p in bsym.flat_proxy_outs)
        if original is not None and (not is_returned or original.name not in inputs | returned):
            swaps[variableify(bsym.output)] = original
            if is_returned:
                returned.add(original.name)
        else:
            kept.append(bsym)
    if not swaps:
        return trace
    new = from_trace(trace)
    new.bound_symbols = _without_unused(kept, set(permuted))
    new.set_provenance(TraceProvenance("Shallow copies dropped"))
    return deleting_again(new, trace)


def _without_unused(bsyms: list[BoundSymbol], candidates: set[str]) -> list[BoundSymbol]:
    """The operations without those that make a proxy named in `candidates` which no later one uses."""
    used: set[str] = set()
    kept = []
    for bsym in reversed(bsyms):
        outs = {p.name for p in bsym.flat_proxy_outs}
        if not outs or not outs <= candidates or outs & used:
            used.update(p.name for p in bsym.flat_proxy_args)
            kept.append(bsym)
    return kept[::-1]
