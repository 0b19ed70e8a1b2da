"""The names that tensors have after something was written into their memory.

Thunder's pass names all views of a memory anew at each use of one, dead ones too, and finds each name by walking from the first one on: the
time of a program that writes into n views grows with the third power of n.  Here what nothing reads any more has no further names, and the
last name is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable

from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.tags import has_any_tag
from thunder.core import prims
from thunder.core.proxies import TensorProxy, Variable
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.update_aliases import _is_inplace_op, replace_args_with_alias_map


def insert_alias_updates(trace: TraceCtx, alias_indices: list[list[int]]) -> TraceCtx:
    """The trace in which what is used after a write into its memory depends on that write.

    Args:
        trace: of a computation; itself where nothing is written.
        alias_indices: positions of arguments that stand for each other.
    """
    if not any(map(_is_inplace_op, trace.bound_symbols)):
        return trace
    trace, _ = replace_args_with_alias_map(trace, alias_indices)
    updates = _Updates(trace)
    bsyms = [new for i, bsym in enumerate(trace.bound_symbols) for new in updates.of(i, bsym)]
    updated = from_trace(trace)
    updated.set_provenance(TraceProvenance("Update aliases for in-place ops"))
    updated.bound_symbols = bsyms
    return updated


class _Updates:
    """The names of now, as the trace is gone through."""

    def __init__(self, trace: TraceCtx):
        self.trace = trace
        self.written_memories = _written_memories(trace.bound_symbols)
        self.last_use = {p.name: i for i, bsym in enumerate(trace.bound_symbols) for p in bsym.flat_proxy_args}
        self.now: dict[Variable, TensorProxy] = {}
        self.met: dict[int, dict[str, TensorProxy]] = {}  # of each memory, by its id: the tensors that may be used again
        self.results: dict[str, list[TensorProxy]] = {}  # what writes into a tensor returned, which are that tensor
        self.unseen: set[str] = set()  # the tensors whose last write no name depends on

    def of(self, i: int, bsym: BoundSymbol) -> Iterable[BoundSymbol]:
        """What stands for the i-th symbol."""
        writes = _is_inplace_op(bsym)
        used = _tensors(bsym.flat_proxy_args)[: 1 if writes else None]
        memories = dict.fromkeys(id(self.written_memories[p.name]) for p in used if p.name in self.written_memories)
        if not memories or bsym.sym.id is prims.PrimIDs.RETURN:
            return (bsym.from_bsym_swap_proxies(self.now, skip_output=writes or makes_view(bsym)),)
        self._meet(used)
        update = self._update(i, memories)
        if has_any_tag(bsym, {BoundSymbolTag.BACKWARD}):
            update.tags.add(BoundSymbolTag.BACKWARD)
        new = bsym.from_bsym_swap_proxies(self.now)
        made = _tensors(bsym.flat_proxy_outs)
        self._meet(made)
        if writes and len({p.name for p in made} - {used[0].name}) == 1:
            self._wrote(used[0], made[0])
        return update, new

    def _meet(self, tensors: Iterable[TensorProxy]) -> None:
        for p in tensors:
            if (memory := self.written_memories.get(p.name)) is not None:
                self.met.setdefault(id(memory), {}).setdefault(p.name, p)

    def _update(self, i: int, memories: Iterable[int]) -> BoundSymbol:
        renamed: list[TensorProxy] = []
        for key in memories:
            met = self.met[key]
            alive = {name: p for name, p in met.items() if self._is_alive(i, name)}
            self.met[key] = alive
            renamed += alive.values()
        with tracectx(self.trace):
            new = tuple(TensorProxy(like=p, requires_grad=p.requires_grad) for p in renamed)
        before = tuple(self.now.get(Variable(p), p) for p in renamed)
        for p, q in zip(renamed, new, strict=True):
            self.now[Variable(p)] = q
            self.unseen.discard(p.name)
            results = self.results[p.name] = [r for r in self.results.get(p.name, ()) if self.last_use.get(r.name, -1) >= i]
            self.now.update((Variable(r), q) for r in results)
        return prims.update_aliases.bind(before, output=new)

    def _is_alive(self, i: int, name: str) -> bool:
        if name in self.unseen or self.last_use.get(name, -1) >= i:
            return True
        return any(self.last_use.get(r.name, -1) >= i for r in self.results.get(name, ()))

    def _wrote(self, target: TensorProxy, result: TensorProxy) -> None:
        self.now[Variable(target)] = result
        self.results.setdefault(target.name, []).append(result)
        self.unseen.add(target.name)


def _written_memories(bsyms: Iterable[BoundSymbol]) -> dict[str, set[str]]:
    """The names of those that lie in the memory of each tensor, for memories that are written into."""
    memories: dict[str, set[str]] = {}
    written = set()
    for bsym in bsyms:
        writes, given = _is_inplace_op(bsym), _tensors(bsym.flat_proxy_args)
        if not given or not (writes or makes_view(bsym)):
            continue
        target = given[0].name
        memory = memories.setdefault(target, {target})
        if writes:
            written.add(target)
            continue
        for p in _tensors(bsym.flat_proxy_outs):
            other = memories.get(p.name, {p.name})
            if other is not memory:
                memory |= other
                memories.update(dict.fromkeys(other, memory))
    kept = {id(memories[name]) for name in written}
    return {name: memory for name, memory in memories.items() if id(memory) in kept}


def _tensors(proxies: Iterable[object]) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]
