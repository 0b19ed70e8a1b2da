"""Inputs without gradients that a differentiated program writes into, a cache or a buffer, and what the backward needs of them.

What is kept for the backward lies in the memory that a later write changes.  Inputs that get a history are no such: see `recorded_inputs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.writes.aliasing import end_of, parts_of_copies
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.version_counters import VersionCounters
from thunder_norm.tracing.shared_memory.writes import copies_in, recorded_copies, stays_without_history
from thunder.core import prims
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

# Their gradients are not computed of what they write into: it need not be kept.
_KEEP_NOTHING = frozenset(
    "add_ sub_ copy_ setitem_ fill_ zero_ index_copy_ index_add_ index_fill_ masked_fill_ scatter_ scatter_add_".split()
)
# In eager mode the backward of these computes with nothing they took or made, and of those with arguments alone.
_NEED_NOTHING = frozenset("add sub neg cat stack sum mean".split())
_NEED_ARGUMENTS = frozenset(
    "linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d mul div true_divide embedding layer_norm".split()
)


class PlainInputs:
    """What is differentiated so far, what a backward may need of it, and which inputs are written later; asked operation by operation."""

    def __init__(self, trace: TraceCtx, views: Sequence[dict[str, str]], moved: Set[str], inputs: Set[str]) -> None:
        """Of a program.

        Args:
            trace: the program.
            views: by operation, which of its results are views of what.
            moved: the names of its inputs that require grad.
            inputs: the names of those that are written where they lie.
        """
        self._inputs = inputs
        self._same: dict[str, str] = {}  # results of copies, and what was copied into
        self._views: set[str] = set()
        self._bases: dict[str, str] = {}  # of views and results of copies
        self._detached: set[str] = set()  # what autograd does not know to be of the memory of another
        self._active = set(moved)
        self._changed: set[str] = set()  # what has got a history by a write
        self._counters = VersionCounters()
        self._writes_to_come: Counter[str] = Counter()  # by version counter
        self._needed: dict[str, set[str]] = {}  # by memory, the version counters of what a backward may need
        for bsym, found in zip(trace.bound_symbols, views, strict=True):
            given = {p.name for p in bsym.flat_proxy_args}  # a softmax ends with a view of what is inside of it
            self._views |= {out for out in found if end_of(out, found) in given}
            self._bases |= found
            self._detached |= {out for out, of in found.items() if bsym.sym.name == "detach" or of in self._detached}
            self._counters.note_views(found, bsym.flat_proxy_outs)
            for copy in copies_in(bsym):
                self._same[copy.output.name] = self._bases[copy.output.name] = copy.args[1].name
                self._counters.note_views({copy.output.name: copy.args[1].name}, ())
                self._writes_to_come[self._counters.of(copy.args[1].name)] += 1

    def _root(self, name: str) -> str:
        return end_of(name, self._bases)

    def has_history(self, name: str) -> bool:
        """Whether a tensor got a history, or is one that had one when it was written into without autograd."""
        return self._root(name) in self._changed or end_of(name, self._same) in self._active

    def counter(self, p: TensorProxy) -> str:
        """The name of the version counter of a tensor."""
        return self._counters.of(p.name)

    def enter(self, bsym: BoundSymbol) -> None:
        """Come to an operation."""
        if bsym.sym.id is prims.PrimIDs.UNPACK_TRIVIAL:
            return
        self._active |= {p.name for p in bsym.flat_proxy_args if self.has_history(p.name)} - self._detached
        propagate(bsym, self._active)
        outs = {p.name for p in bsym.flat_proxy_outs}
        name = bsym.sym.name.removesuffix("_")  # of one in place torch keeps a clone of what is written, if it needs that
        if not outs.isdisjoint(self._active) and outs.isdisjoint(self._views) and name not in _NEED_NOTHING:
            for p in (*bsym.flat_proxy_args, *(() if name in _NEED_ARGUMENTS else bsym.flat_proxy_outs)):
                self._needed.setdefault(self._root(p.name), set()).add(self._counters.of(p.name))

    def written(self, bsym: BoundSymbol, copy: BoundSymbol) -> None:
        """Note that the program has come to a copy, which an operation consists of."""
        source, target = copy.args[0].name, copy.args[1].name
        self._writes_to_come[self._counters.of(target)] -= 1
        is_recorded = any(recorded is copy for recorded in recorded_copies(bsym))
        if is_recorded and source in self._active and target not in self._detached:
            self._changed.add(self._root(target))

    def check_seen(self, bsym: BoundSymbol, copy: BoundSymbol) -> None:
        """Refuse a copy into what the program made, where in eager mode a backward computes with what was written behind its back."""
        name = copy.args[1].name
        if self._needed.get(self._root(name), set()) - {self._counters.of(name)}:
            raise UnsupportedOpError(
                with_details(
                    f"in-place {bsym.sym.name} on the .data of what the program has computed",
                    at=location_of(bsym),
                    why="a backward that needs it would compute with what is written, of which autograd knows nothing",
                    instead="write into x.detach() or under torch.no_grad(), or into a clone",
                )
            )

    def is_kept(self, p: TensorProxy, bsym: BoundSymbol) -> bool:
        """Whether the backward may ask for an argument as it is now, which is written by then.

        Not where autograd does not notice the writing: then eager mode's backward computes with what was written.
        """
        if not self._writes_to_come[self._counters.of(p.name)] or self._root(p.name) not in self._inputs:
            return False
        outs = {q.name for q in bsym.flat_proxy_outs}
        return not outs.isdisjoint(self._active) and outs.isdisjoint(self._views)

    def written_of_copies(self, bsym: BoundSymbol) -> BoundSymbol:
        """An operation that writes into inputs; what it keeps of them is a copy."""
        targets = {c.args[1].name: c.args[1] for c in copies_in(bsym)}
        kept = [p for p in targets.values() if self.is_kept(p, bsym)]
        if stays_without_history(bsym) or bsym.sym.name in _KEEP_NOTHING or not kept:
            return bsym
        parts: list[BoundSymbol] = []
        swaps: dict[Variable, TensorProxy] = {}
        for part in parts_of_copies(bsym):
            written = [variableify(c.args[1]) for c in copies_in(part)]
            if written:  # what reads it after this, in a region of several operations, has another copy
                swaps = {v: p for v, p in swaps.items() if v not in written}
                parts.append(part)
                continue
            read = {p.name for p in part.flat_proxy_args}
            with scope(get_tracectx()) as made:
                swaps |= {variableify(p): prims.clone(p) for p in kept if p.name in read and variableify(p) not in swaps}
            parts += [*made, part.from_bsym_swap_proxies(swaps, skip_output=True)]
        return bsym.from_bsym(subsymbols=parts)
