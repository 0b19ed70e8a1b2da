"""What the backward computes again in place of reading what the forward kept: chains of entrywise operations.

The derivative of ``tanh(a x + b x^3)``, written out, asks for five tensors of the forward, each of which has to be written to memory, kept
and read.  All come of `x` in one pass over memory, the one in which they are used.  Which are kept is a minimum cut of the forward's graph,
in bytes (Chen et al. 2016, "Training deep nets with sublinear memory cost"; torch's ``min_cut_rematerialization_partition``), with less
freedom than torch's: nothing is kept of the program's inputs and results that its own backward does not ask for, so that what may be
written into between a forward and its backward is what might be without this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx

from thunder_norm.executors.members import changes_memory, is_constant, is_entrywise, is_view, may_be_in_region, target_of
from thunder_norm.executors.regions import memory_of, sides
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

_NO_OPERATIONS = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN, PrimIDs.GET_GRAD)


def recomputing(bsyms: Sequence[BoundSymbol], trace: TraceCtx) -> list[BoundSymbol]:
    """The operations of an execution trace, with those once more in its backward that it had better compute again.

    Args:
        bsyms: the operations.
        trace: new tensors have names that it does not have.
    """
    both = sides(bsyms)
    if len(both) == 1:
        return list(bsyms)
    backward = {i for i in both[1] if bsyms[i].sym.id not in _NO_OPERATIONS}
    program = _Forward([bsyms[i] for i in both[0]], [bsyms[i] for i in sorted(backward)], bsyms[-1])
    again = _Again(program, _kept(program), trace)
    found: list[BoundSymbol] = []
    for i, bsym in enumerate(bsyms):
        if i in backward:
            found += again.before(bsym)
            bsym = again.reading_new(bsym)
        found.append(bsym)
    return found


class _Forward:
    """The forward's tensors, and what its backward can compute again of them.

    Attributes:
        producer: of each tensor that is no input.
        asked: the tensors that the backward reads, or reads a view of.
        recomputable: the tensors that the backward can compute again, and of what.
    """

    def __init__(self, forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol], returning: BoundSymbol):
        self._bsyms = [b for b in forward if b.sym.id not in _NO_OPERATIONS]
        self.producer = {p.name: b for b in reversed(self._bsyms) for p in b.flat_proxy_outs}
        self.proxies = {p.name: p for b in forward for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
        self._views = {p.name for b in self._bsyms if may_be_in_region(b) and is_view(b) for p in b.flat_proxy_outs}
        self.asked = list(dict.fromkeys(base for b in backward for p in b.flat_proxy_args for base in self.bases_of(p.name)))
        program = [*self._bsyms, *backward]
        self._memory = memory_of(program)
        targets = [target_of(b) for b in program if changes_memory(b)]
        self._is_all_written = any(t is None for t in targets)
        self._written = {self._memory.root(t.name) for t in targets if t is not None}
        inputs = self.proxies.keys() - self.producer.keys()
        returned = {p.name for p in returning.flat_proxy_args} & self.proxies.keys()
        self._seen = {self._memory.root(name) for name in inputs | returned}
        self.recomputable: dict[str, tuple[str, ...]] = {}
        self._find_recomputable()

    def bases_of(self, name: str) -> tuple[str, ...]:
        """The tensor of the forward that this is, or is a view of; none if the forward has no such tensor."""
        if name not in self.proxies:
            return ()
        while name in self._views:
            name = self.producer[name].flat_proxy_args[0].name
        return (name,)

    def _find_recomputable(self) -> None:
        far = self._used_far_away()
        for b in self._bsyms:
            name = b.flat_proxy_outs[0].name if b.flat_proxy_outs else None
            if name is None or name in far or not self._can_be_repeated(b):
                continue
            sources = tuple(dict.fromkeys(base for p in b.flat_proxy_args for base in self.bases_of(p.name)))
            if all(self._may_be_kept(source) or source in self.recomputable for source in sources):
                self.recomputable[name] = sources

    def _can_be_repeated(self, b: BoundSymbol) -> bool:
        if self._is_all_written or not may_be_in_region(b) or not (is_entrywise(b) or is_constant(b)):
            return False
        return not any(self._memory.root(p.name) in self._written for p in (*b.flat_proxy_args, *b.flat_proxy_outs))

    def _may_be_kept(self, name: str) -> bool:
        """Whether this may be kept for the backward: it is in any case, or nobody else sees it."""
        return name in self.asked or self._memory.root(name) not in self._seen

    def _used_far_away(self) -> set[str]:
        """The names of what is used again after an operation that is not entrywise: that is in memory, and is read from there.

        Of a sum that goes through all layers the last would else be computed again from the first.
        """
        depths: dict[str, int] = {}
        far: set[str] = set()
        for b in self._bsyms:
            given = [base for p in b.flat_proxy_args for base in self.bases_of(p.name)]
            depth = max((depths.get(base, 0) for base in given), default=0)
            far.update(base for base in given if depths.get(base, 0) < depth and not self._is_constant(base))
            is_cheap = may_be_in_region(b) and (is_view(b) or is_entrywise(b) or is_constant(b))
            for p in b.flat_proxy_outs:
                depths.setdefault(p.name, depth + (not is_cheap))
        return far

    def _is_constant(self, name: str) -> bool:
        return name in self.producer and is_constant(self.producer[name])

    def size(self, name: str) -> float:
        """What it costs to keep a tensor: its bytes; without bound for what may not be kept, or is not one tensor."""
        p = self.proxies[name]
        if not isinstance(p, TensorProxy) or not all(type(n) is int for n in p.shape) or not self._may_be_kept(name):
            return math.inf
        return math.prod(p.shape) * p.dtype.bytes


def _kept(program: _Forward) -> set[str]:
    """The names of the tensors of least size that the backward can compute all that it asks for from: of such cuts the one next to it."""
    graph = networkx.DiGraph()
    graph.add_nodes_from((_FORWARD, _BACKWARD))
    pending = [name for name in program.asked if not math.isinf(program.size(name))]
    graph.add_edges_from(((name, _USED), _BACKWARD) for name in pending)
    while pending:
        name = pending.pop()
        if (name, _MADE) in graph:
            continue
        size = program.size(name)
        bound = {} if math.isinf(size) else {"capacity": size}
        graph.add_edge((name, _MADE), (name, _USED), **bound)
        sources = program.recomputable.get(name)
        if sources is None:
            graph.add_edge(_FORWARD, (name, _MADE))
        else:
            graph.add_edges_from(((source, _USED), (name, _MADE)) for source in sources)
            pending += sources
    _, (_, after) = networkx.minimum_cut(graph, _FORWARD, _BACKWARD)
    return {name for name, stage in after - {_BACKWARD} if stage is _USED and (name, _MADE) not in after}


# Where a cut is between: what is not recomputed, and the backward; a tensor as it is made, and as it is used, which keeps it.
_FORWARD, _BACKWARD = "forward", "backward"
_MADE, _USED = "made", "used"


class _Again:
    """The operations that a backward repeats, each once, before the first that uses it."""

    def __init__(self, program: _Forward, kept: set[str], trace: TraceCtx):
        self._program, self._kept, self._trace = program, kept, trace
        self._new: dict[Variable, Proxy] = {}
        self._is_new: dict[str, bool] = {}

    def before(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """What has to be computed again before this operation of the backward, and was not yet."""
        found: list[BoundSymbol] = []
        for p in bsym.flat_proxy_args:
            self._make(p.name, found)
        return found

    def _make(self, name: str, found: list[BoundSymbol]) -> bool:
        """Whether the backward has a tensor of its own in place of this one; `found` takes what makes it."""
        if name in self._is_new:
            return self._is_new[name]
        producer = self._program.producer.get(name)
        (base,) = self._program.bases_of(name) or (None,)
        is_new = producer is not None and base not in self._kept and base in self._program.recomputable
        self._is_new[name] = is_new
        if is_new and producer is not None:
            for p in producer.flat_proxy_args:
                self._make(p.name, found)
            for p in producer.flat_proxy_outs:
                self._is_new[p.name] = True
                with tracectx(self._trace):
                    self._new[variableify(p)] = p.replace_name(f"again_{p.name}", disambiguate=True)
            found.append(producer.from_bsym_swap_proxies(self._new))
        return is_new

    def reading_new(self, bsym: BoundSymbol) -> BoundSymbol:
        """The operation, of the backward's own tensors where it has such."""
        if not any(self._is_new.get(p.name, False) for p in bsym.flat_proxy_args):
            return bsym
        return bsym.from_bsym_swap_proxies(self._new, skip_output=True)
