"""Choosing what to compute again so that a program keeps to a memory budget.

The program is cut into segments where little is alive.  A segment that becomes a region frees what its backward would have kept, costs
what it reads (that is kept now) and its FLOPs; which segments to take is a knapsack, the least FLOPs that free enough.  What the program
then needs is measured, by replaying the execution traces that Thunder would make without data, and the choice is repeated with more to
free until the measured peak keeps to the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.checkpointing.regions import Region, as_trace, is_region, noting_changes, with_body
from thunder_norm.checkpointing.replays import replayable
from thunder_norm.errors import CheckpointError, UnsupportedOpError, with_details
from thunder_norm.profiling import trace as replay
from thunder_norm.profiling.flops import Count
from thunder_norm.profiling.memory import Kind
from thunder_norm.profiling.recorder import Recorder
from thunder_norm.profiling.report import Profile
from thunder_norm.profiling.stand_ins import StandIns
from thunder_norm.tracing.locations import location_of
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

_STEPS = 1000  # of what is freed, in the knapsack
_TRIES = 6


@dataclass(frozen=True)
class CheckpointReport:
    """What a memory budget led to.

    Attributes:
        memory_budget: bytes, as asked for.
        peak_bytes: the most that is alive at any time, parameters and inputs included, with the regions.
        saved_bytes: what the forward keeps for the backward, without parameters.
        plain_peak_bytes: as `peak_bytes`, without the regions.
        plain_saved_bytes: as `saved_bytes`, without the regions.
        extra_flops: what the regions add, counted as `profile` does by default.
        plain_flops: forward and backward without them.
        regions: the name of each region and the lines of the program that it begins and ends with.
    """

    memory_budget: int
    peak_bytes: int
    saved_bytes: int
    plain_peak_bytes: int
    plain_saved_bytes: int
    extra_flops: int
    plain_flops: int
    regions: tuple[tuple[str, str | None, str | None], ...]


@dataclass(frozen=True)
class _Segment:
    start: int
    stop: int
    freed: int
    flops: int


class Budget:
    """The choice for one program."""

    def __init__(self, trace: TraceCtx, memory_budget: int, executors: Sequence[Any], kinds: Mapping[str, Kind]):
        self.trace, self.memory_budget, self.executors, self.kinds = trace, memory_budget, executors, kinds
        self._known: dict[Any, tuple[int, int] | None] = {}

    def keep(self) -> tuple[TraceCtx, CheckpointReport]:
        """The program with the cheapest regions found that keep to the budget, and what it needs.

        Raises:
            CheckpointError: none do.
        """
        plain = self.measure(self.trace)
        if plain.peak_bytes <= self.memory_budget:
            return self.trace, self._report(plain, plain, self.trace, [])
        least = plain.peak_bytes
        segments = self._segments()
        together = 1
        while together <= max(len(segments), 1):
            items = self._merged(segments, together)
            needed = plain.peak_bytes - self.memory_budget
            for _ in range(_TRIES):
                chosen = cheapest(items, needed)
                candidate = self._with_regions(chosen)
                profile = self.measure(candidate)
                least = min(least, profile.peak_bytes)
                if profile.peak_bytes <= self.memory_budget:
                    return candidate, self._report(plain, profile, candidate, chosen)
                if len(chosen) == len(items):
                    break
                needed = sum(s.freed for s in chosen) + profile.peak_bytes - self.memory_budget
            together *= 2
        raise CheckpointError(
            with_details(
                f"no choice of regions keeps the program to {self.memory_budget} bytes",
                why=f"the least found is {least}, of which {plain.resident_bytes} are parameters, buffers and inputs; "
                f"without regions it is {plain.peak_bytes}",
            )
        )

    def measure(self, trace: TraceCtx, count: Count = "matmul") -> Profile:
        """What the program that Thunder would make of a trace needs, forward and backward."""
        joint = grad_transform_on_trace(dce(_copy(trace)))
        forward, backward = split_into_forward_and_backward(transform_for_execution(joint, self.executors))
        backward = None if backward is None else del_last_used(backward, clear_mutable_collections=True)
        return self._replayed(del_last_used(forward), backward, count)

    def _replayed(self, forward: TraceCtx, backward: TraceCtx | None, count: Count) -> Profile:
        stand_ins, recorder = StandIns(), Recorder(count)
        inputs = [(_like(p, stand_ins), self.kinds.get(getattr(p, "name", ""), "input")) for p in forward.args]
        resident = replay.record(forward, backward, inputs, stand_ins=stand_ins, recorder=recorder, tick=lambda: None)
        return Profile.of(recorder, "trace", resident)

    def _report(self, plain: Profile, profile: Profile, trace: TraceCtx, chosen: Sequence[_Segment]) -> CheckpointReport:
        ops = self.trace.bound_symbols
        names = [b.sym.name for b in trace.bound_symbols if is_region(b)][-len(chosen) :] if chosen else []
        lines = [(location_of(ops[s.start]), location_of(ops[s.stop - 1])) for s in chosen]
        return CheckpointReport(
            self.memory_budget,
            profile.peak_bytes,
            profile.saved_bytes,
            plain.peak_bytes,
            plain.saved_bytes,
            profile.flops - plain.flops,
            plain.flops,
            tuple((name, *ends) for name, ends in zip(names, lines, strict=True)),
        )

    # -- segments -----------------------------------------------------------------------------------------------------

    def _segments(self) -> list[_Segment]:
        """The program between two places where fewer bytes are alive than just before and just after."""
        ops = self.trace.bound_symbols
        alive = _alive(ops)
        found: list[_Segment] = []
        start = 0
        for i in range(len(ops)):
            if _is_fixed(ops[i]):
                start = i + 1
                continue
            ends = i + 1 == len(ops) or _is_fixed(ops[i + 1])
            if ends or (alive[i + 1] <= alive[i] and (i + 2 >= len(alive) or alive[i + 1] <= alive[i + 2])):
                segment = self._segment(start, i + 1)
                if segment is not None:
                    found.append(segment)
                start = i + 1
        return found

    def _merged(self, segments: Sequence[_Segment], together: int) -> list[_Segment]:
        """`together` neighbours each as one segment; those that free nothing are left out."""
        found: list[_Segment] = []
        for group in (segments[i : i + together] for i in range(0, len(segments), together)):
            runs: list[list[_Segment]] = []
            for s in group:
                if runs and runs[-1][-1].stop == s.start:
                    runs[-1].append(s)
                else:
                    runs.append([s])
            for run in runs:
                merged = run[0] if len(run) == 1 else self._segment(run[0].start, run[-1].stop)
                if merged is not None and merged.freed > 0:
                    found.append(merged)
        return found

    def _segment(self, start: int, stop: int) -> _Segment | None:
        region = self._region("checkpoint", start, stop)
        if not region.outs or not any(isinstance(p, TensorProxy) for p in region.args):
            return None
        key = tuple(_key(b) for b in region.bsyms)
        if key not in self._known:
            self._known[key] = self._cost(region)
        cost = self._known[key]
        if cost is None:
            return None
        given = {p.name for p in self.trace.args if isinstance(p, Proxy)}
        kept = sum(_nbytes(p) for p in region.args if isinstance(p, TensorProxy) and p.name not in given)
        return _Segment(start, stop, cost[0] - kept, cost[1])

    def _region(self, name: str, start: int, stop: int) -> Region:
        ops = self.trace.bound_symbols
        later = {p.name for b in ops[stop:] for p in b.flat_proxy_args}
        outs = {p.name: p for b in ops[start:stop] for p in b.flat_proxy_outs if p.name in later}
        return Region(name, ops[start:stop], outs.values())

    def _cost(self, region: Region) -> tuple[int, int] | None:
        """The bytes that a backward would keep of what a region makes, and the FLOPs of the region; None if it cannot be one."""
        try:
            with tracectx(as_trace(region)):
                replayable(region.bsyms, region.outs, with_body)
        except UnsupportedOpError:
            return None
        forward, _ = split_into_forward_and_backward(grad_transform_on_trace(as_trace(region)))
        given = {p.name for p in region.args}
        saved = {p.name: _nbytes(p) for p in forward.bound_symbols[-1].args[1][0] if p.name not in given}
        run = del_last_used(transform_for_execution(as_trace(region), self.executors))
        return sum(saved.values()), self._replayed(run, None, "all").flops

    def _with_regions(self, chosen: Sequence[_Segment]) -> TraceCtx:
        starts = {s.start: s for s in chosen}
        ops = self.trace.bound_symbols
        number = sum(is_region(b) for b in ops)
        new = from_trace(self.trace)
        i = 0
        with tracectx(new):
            while i < len(ops):
                segment = starts.get(i)
                if segment is None:
                    new.bound_symbols.append(ops[i])
                    i += 1
                    continue
                region = self._region(f"checkpoint_{number}", segment.start, segment.stop).symbol()
                first = ops[segment.start]
                new.bound_symbols.append(
                    region.from_bsym(source_filename=first.source_filename, source_positions=first.source_positions)
                )
                number += 1
                i = segment.stop
        new.set_provenance(TraceProvenance("Checkpointed to a memory budget"))
        return noting_changes(new)


def cheapest(items: Sequence[_Segment], needed: int) -> list[_Segment]:
    """The items with the least FLOPs that free at least `needed` bytes, up to rounding of what each frees; all if there are none."""
    total = sum(s.freed for s in items)
    if total <= needed:
        return list(items)
    unit = max(total // _STEPS, 1)
    goal = -(-needed // unit)
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, ()), *[None] * goal]
    for i, s in enumerate(items):
        freed = s.freed // unit
        for k in range(goal, 0, -1):
            before = best[max(k - freed, 0)]
            if before is not None and freed and (best[k] is None or before[0] + s.flops < best[k][0]):
                best[k] = (before[0] + s.flops, (*before[1], i))
    return list(items) if best[goal] is None else [items[i] for i in best[goal][1]]


def _is_fixed(bsym: BoundSymbol) -> bool:
    return is_region(bsym) or bsym.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN) or (has_tags(bsym, {OpTags.DONT_DCE}))


def _alive(ops: Sequence[BoundSymbol]) -> list[int]:
    """Bytes of what is made before each place of the program and used after it."""
    last: dict[str, int] = {}
    for i, b in enumerate(ops):
        for p in b.flat_proxy_args:
            last[p.name] = i
    change = [0] * (len(ops) + 1)
    for i, b in enumerate(ops):
        if b.sym.id is PrimIDs.UNPACK_TRIVIAL:
            continue
        for p in b.flat_proxy_outs:
            if isinstance(p, TensorProxy) and last.get(p.name, i) > i:
                change[i + 1] += _nbytes(p)
                change[last[p.name] + 1] -= _nbytes(p)
    alive = [0]
    for c in change[1:]:
        alive.append(alive[-1] + c)
    return alive


def _nbytes(p: Any) -> int:
    return p.numel * p.dtype.bytes if isinstance(p, TensorProxy) else 0


def _key(bsym: BoundSymbol) -> Any:
    described = tuple(
        (tuple(v.shape), str(v.dtype)) if isinstance(v, TensorProxy) else str(v) for v in (*bsym.flat_args, *bsym.flat_outs)
    )
    return str(bsym.sym.id), described


def _copy(trace: TraceCtx) -> TraceCtx:
    """What is tried out must not take names in the program."""
    new = from_trace(trace)
    new.names = set(trace.names)
    new.bound_symbols = [b.from_bsym() for b in trace.bound_symbols]
    return new


def _like(p: Any, stand_ins: StandIns) -> Any:
    if not isinstance(p, TensorProxy):
        return getattr(p, "value", p)
    with torch.device("meta"):
        t = torch.empty(tuple(p.shape), dtype=to_torch_dtype(p.dtype))
    return StandIns(to_torch_device(p.device), stand_ins.mode).of(t)
