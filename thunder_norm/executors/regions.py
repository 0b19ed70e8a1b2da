"""Which operations of an execution trace are compiled together: as many as their dependences allow, never across forward and backward.

Views belong to no region.  Each region that needs one makes it of its base, where it costs nothing, and what leaves a region is no view;
what else needs one makes it as before, so that it shares memory with what it shared memory with before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thunder_norm.executors.members import changes_memory, is_constant, is_view, may_be_in_region, region_device, target_of
from thunder_norm.tracing.shared_memory.memory import Memory
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol

# Of operations that compute something.  Measured on CPU, on matrices of 4 rows: one multiplication takes 1.4 us as a region and 1.2 us in
# torch, three operations 1.4 us and 3.1 us; two are as fast either way, and on 128 rows four times as fast in a region.
FEWEST = 2

_SAME_MEMORY = ("update_aliases", "to", "history", "current")  # results may lie in the memory of arguments


@dataclass
class Region:
    """Operations that become one, in their order in the trace."""

    bsyms: list[BoundSymbol]
    inputs: list[Proxy] = field(default_factory=list)
    outputs: list[Proxy] = field(default_factory=list)
    is_backward: bool = False


Item = BoundSymbol | Region


def partitioned(bsyms: Sequence[BoundSymbol]) -> list[Item]:
    """The operations of an execution trace, some of them in regions; those that are not keep their order among each other."""
    program = _Program(bsyms)
    items: list[Item] = []
    made: set[str] = set()  # views that stand outside of regions
    for is_backward, side in enumerate(sides(bsyms)):
        for group in program.groups(side):
            for item in program.items(group):
                if isinstance(item, Region):
                    item.is_backward = bool(is_backward)
                    items.append(item)
                else:
                    items.extend(program.with_views(item, made))
    _set_outputs(items)
    return [item for item in items if not isinstance(item, Region) or item.outputs]


def sides(bsyms: Sequence[BoundSymbol]) -> tuple[list[int], ...]:
    """The positions of the forward and of the backward; of all in a program without gradients.

    As ``thunder.transforms.autodiff.split_into_forward_and_backward`` takes them apart afterwards: forward is what its results need.
    """
    returned = bsyms[-1].args[0] if bsyms and bsyms[-1].sym.id is PrimIDs.RETURN and bsyms[-1].args else None
    if not isinstance(returned, dict) or "fw_flat_out" not in returned:
        return (list(range(len(bsyms))),)
    needed = {p.name for key in ("fw_flat_out", "flat_args") for p in tree_flatten(returned[key])[0] if isinstance(p, Proxy)}
    forward, backward = [], [len(bsyms) - 1]
    for i in reversed(range(len(bsyms) - 1)):
        bsym = bsyms[i]
        target = target_of(bsym)
        is_needed = any(p.name in needed for p in bsym.flat_proxy_outs) and bsym.sym.id is not PrimIDs.GET_GRAD
        if is_needed or bsym.sym.id is PrimIDs.UNPACK_TRIVIAL or (target is not None and target.name in needed):
            forward.append(i)
            needed.update(p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
        else:
            backward.append(i)
    return forward[::-1], sorted(backward)


def memory_of(bsyms: Sequence[BoundSymbol]) -> Memory:
    """Which tensors of some operations may share memory."""
    memory = Memory()
    for bsym in bsyms:
        if bsym.sym.name in _SAME_MEMORY or (may_be_in_region(bsym) and is_view(bsym)):
            memory.join(p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
        elif (target := target_of(bsym)) is not None:
            memory.join([target.name, *(p.name for p in bsym.flat_proxy_outs)])
    return memory


class _Program:
    """Operations, what they depend on, and where they may be."""

    def __init__(self, bsyms: Sequence[BoundSymbol]):
        self.bsyms = bsyms
        self.producer: dict[str, int] = {}
        for i, bsym in enumerate(bsyms):
            given = {p.name for p in bsym.flat_proxy_args}
            for p in bsym.flat_proxy_outs:
                if p.name not in given:
                    self.producer.setdefault(p.name, i)
        self.members = {i for i, b in enumerate(bsyms) if may_be_in_region(b)}
        self.views = {i for i in self.members if is_view(bsyms[i])}
        self.members -= self.views
        self._order_by_memory()

    def _order_by_memory(self) -> None:
        """What else than a name ties operations together: one writes what the other reads."""
        self.effects = [i for i, b in enumerate(self.bsyms) if changes_memory(b)]
        self.after: dict[int, list[int]] = {}  # operations, and the writing ones that come before them
        writes = [i for i in self.effects if self.bsyms[i].sym.id is not PrimIDs.RETURN]
        if not writes:
            return
        memory = memory_of(self.bsyms)
        written = {i: memory.root(t.name) if (t := target_of(self.bsyms[i])) is not None else None for i in writes}
        last_use: dict[str, int] = {}
        for i, bsym in enumerate(self.bsyms):
            last_use.update((p.name, i) for p in bsym.flat_proxy_args)
        for i in sorted(self.views | self.members):
            roots = {memory.root(p.name) for p in self.bsyms[i].flat_proxy_args}
            touching = [e for e in writes if written[e] is None or written[e] in roots]
            self.after[i] = [e for e in touching if e < i]
            used_until = max((last_use.get(p.name, i) for p in self.bsyms[i].flat_proxy_outs), default=i)
            if i in self.views and any(i < e < used_until for e in touching):
                self.views.discard(i)  # it may be a copy, of what was there before

    def _needs(self, i: int) -> set[int]:
        """What has to be done before operation `i`, seen through views."""
        found: set[int] = set(self.after.get(i, ()))
        for p in self.bsyms[i].flat_proxy_args:
            k = self.producer.get(p.name)
            if k is not None and k != i:
                found |= self._needs(k) if k in self.views else {k}
        return found

    def groups(self, side: Sequence[int]) -> Iterator[list[int]]:
        """The operations of a side without its views, in the order in which they run; those of a region stand together."""
        units = [i for i in side if i not in self.views]
        inside = set(units)
        missing = {i: self._needs(i) & inside for i in units}
        waiting: dict[int, list[int]] = {}
        for i, needed in missing.items():
            for k in needed:
                waiting.setdefault(k, []).append(i)
        others = [i for i in units if i not in self.members]
        members = [i for i in units if i in self.members]
        effects, done = set(self.effects), set()
        ready = [i for i in members if not missing[i]]
        position = first_undone = 0

        def finish(i: int) -> None:
            done.add(i)
            for k in waiting.get(i, ()):
                missing[k].discard(i)
                if not missing[k] and k in self.members:
                    ready.append(k)

        while position < len(others) or ready:
            before = len(done)
            while position < len(others) and not missing[i := others[position]]:
                while first_undone < len(members) and members[first_undone] in done:
                    first_undone += 1
                if i in effects and first_undone < len(members) and members[first_undone] < i:
                    break
                position += 1
                finish(i)
                yield [i]
            group = []
            while ready:
                group.append(ready.pop())
                finish(group[-1])
            if group:
                yield sorted(group)
            if len(done) == before:
                raise AssertionError(f"no order found for {self.bsyms[others[position]].sym.name}")

    def items(self, group: list[int]) -> Iterator[Item]:
        """The regions of a group, one a device, or its operations as they are where a region is not worth it."""
        if group[0] not in self.members:
            yield self.bsyms[group[0]]
            return
        by_device: dict[str, list[int]] = {}
        for i in group:
            by_device.setdefault(region_device(self.bsyms[i]), []).append(i)
        for _, members in sorted(by_device.items(), key=lambda pair: not pair[0].startswith("cpu")):
            if sum(not is_constant(self.bsyms[i]) for i in members) < FEWEST:
                yield from (self.bsyms[i] for i in members)
            else:
                yield self._region(members)

    def _region(self, members: list[int]) -> Region:
        inside = set(members)
        for i in members:
            inside |= self._views_of(i)
        region = Region([self.bsyms[i] for i in sorted(inside)])
        made = {p.name for b in region.bsyms for p in b.flat_proxy_outs}
        region.inputs = list({p.name: p for b in region.bsyms for p in b.flat_proxy_args if p.name not in made}.values())
        return region

    def _views_of(self, i: int) -> set[int]:
        """The views that an operation uses, and those that they are views of."""
        used = {k for p in self.bsyms[i].flat_proxy_args if (k := self.producer.get(p.name)) in self.views and k is not None}
        return used.union(*(self._views_of(k) for k in used))

    def with_views(self, bsym: BoundSymbol, made: set[str]) -> Iterator[BoundSymbol]:
        """An operation outside of regions, after the views that it needs and nothing has made yet."""
        for p in bsym.flat_proxy_args:
            k = self.producer.get(p.name)
            if k in self.views and k is not None and p.name not in made and self.bsyms[k] is not bsym:
                yield from self.with_views(self.bsyms[k], made)
        made.update(p.name for p in bsym.flat_proxy_outs)
        yield bsym


def _set_outputs(items: Sequence[Item]) -> None:
    """What of each region is used outside of it; from the end, because a region that nobody needs needs nothing."""
    used: set[str] = set()
    for item in reversed(items):
        if isinstance(item, Region):
            made = {p.name: p for b in item.bsyms if not is_view(b) for p in b.flat_proxy_outs}
            item.outputs = [p for name, p in made.items() if name in used]
            if item.outputs:
                used.update(p.name for p in item.inputs)
        else:
            used.update(p.name for p in item.flat_proxy_args)
