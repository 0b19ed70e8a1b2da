"""Attention that torch's own function runs, which is 0 by itself for a query that may see no key.

`torch_neural` writes what makes it so around Thunder's operation, whatever runs that: four operations more for each call with a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from thunder_norm.tracing.shared_memory.freed_inputs import deleting_again
from thunder_norm.tracing.tags import LETS_SEE
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import dce
from thunder.executors import torchex

_ATTENTION = torchex.scaled_dot_product_attention


def with_torchs_masks(trace: TraceCtx) -> TraceCtx:
    """A program that runs, whose calls of torch's attention have the masks of the user's; what guarded their rows is left out."""
    if not any(b.sym is _ATTENTION and isinstance(_mask_of(b), TensorProxy) for b in trace.bound_symbols):
        return trace
    bsyms = [b for b in trace.bound_symbols if b.sym.id is not prims.PrimIDs.DEL]
    made = {p.name: b for b in bsyms for p in b.flat_proxy_outs}
    uses = Counter(name for b in bsyms for name in {p.name for p in b.flat_proxy_args})
    replaced: dict[int, BoundSymbol | None] = {}
    for result in bsyms:
        attention = made.get(result.args[1].name) if _is_where(result, 0.0) else None
        if attention is None or attention.sym is not _ATTENTION or uses[attention.output.name] != 1:
            continue
        mask = _own_mask(attention, result.args[0], made)
        if mask is not None:
            query, key, value, _, *rest = attention.args
            replaced[id(attention)] = attention.from_bsym(args=(query, key, value, mask, *rest), output=result.output)
            replaced[id(result)] = None
    if not replaced:
        return trace
    new = from_trace(trace)
    new.bound_symbols = [b for b in (replaced.get(id(b), b) for b in bsyms) if b is not None]
    new = dce(new)
    new.set_provenance(TraceProvenance("Masks of attention as they were given"))
    return deleting_again(new, trace)


def _mask_of(attention: BoundSymbol) -> Any:
    return attention.args[3] if len(attention.args) > 3 else None


def _is_where(bsym: BoundSymbol, otherwise: Any) -> bool:
    """Whether an operation is ``where(condition, tensor, otherwise)``."""
    if bsym.sym is not torchex.where or len(bsym.args) != 3 or isinstance(bsym.args[2], TensorProxy):
        return False
    return bsym.args[2] == otherwise and all(isinstance(a, TensorProxy) for a in bsym.args[:2])


def _own_mask(attention: BoundSymbol, sees: TensorProxy, made: Mapping[str, BoundSymbol]) -> TensorProxy | None:
    """The mask that `torch_neural` has guarded, with what says of each row whether it lets anything be seen; None if it is not so."""
    guarded = made.get(getattr(_mask_of(attention), "name", ""))
    if guarded is None or LETS_SEE not in sees.tags or not (_is_where(guarded, True) or _is_where(guarded, 0.0)):
        return None
    return guarded.args[1] if guarded.args[0].name == sees.name else None
