"""Writes into tensors that the program has made itself, as operations that make another tensor.

``x = self.relu(self.bn(x))`` with ``nn.ReLU(inplace=True)`` writes into what the batch norm has made, and nobody can tell whether it does:
under the names that the memory had, the program goes on with the new tensor.  A region may have such an operation, a write it may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.executors.gradients import operations
from thunder_norm.executors.members import changes_memory, may_be_in_region, may_share_memory, target_of
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol


def _run_written(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What `target` is after ``target.copy_(source)``, with its strides, in memory of its own."""
    value = source.to(target.dtype).expand_as(target)
    if value.stride() == target.stride():
        return value.clone()
    order = sorted(range(target.ndim), key=lambda d: (-target.stride(d), d))
    inverse = sorted(range(target.ndim), key=order.__getitem__)
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


written = operations.register_operator(
    "written", meta=lambda source, target: TensorProxy(like=target, requires_grad=False), fn=_run_written
)


@dataclass(eq=False)
class _Memory:
    """What one operation has made, under all names that it has.

    Attributes:
        is_own: whether the program made it, with an operation that never gives a part of another tensor.
        now: the name of its value at the moment, while the program is rewritten.
    """

    is_own: bool
    now: Any = None
    writes: list[int] = field(default_factory=list)
    views: dict[str, int] = field(default_factory=dict)  # parts of it, and where they were made


class _Memories:
    """Which memory each tensor of a program is in."""

    def __init__(self, bsyms: Sequence[BoundSymbol]):
        self.of: dict[str, _Memory] = {}
        self._last_use: dict[str, int] = {}
        for i, bsym in enumerate(bsyms):
            self._last_use.update((p.name, i) for p in bsym.flat_proxy_args)
            self._follow(i, bsym)
        for memory in {id(m): m for m in self.of.values()}.values():
            memory.is_own = memory.is_own and bool(memory.writes) and not self._a_view_sees_a_write(memory)

    def _follow(self, i: int, bsym: BoundSymbol) -> None:
        if bsym.sym.id is PrimIDs.RETURN:
            return
        if _passes_on(bsym):
            for given, p in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True):
                self._is_whole(given.name, p.name, i)
        elif _is_write(bsym):
            target = target_of(bsym)
            memory = self._of(target.name)
            memory.writes.append(i)
            memory.is_own &= target.name not in memory.views
            for p in bsym.flat_proxy_outs:
                self._is_whole(target.name, p.name, i)
        elif _makes_its_own(bsym):
            self.of.update((p.name, _Memory(True)) for p in bsym.flat_proxy_outs)
        else:
            self._may_share(i, bsym)

    def _of(self, name: str) -> _Memory:
        return self.of.setdefault(name, _Memory(False))

    def _is_whole(self, before: str, name: str, i: int) -> None:
        memory = self.of[name] = self._of(before)
        if before in memory.views:
            memory.views[name] = i

    def _may_share(self, i: int, bsym: BoundSymbol) -> None:
        found = {id(m): m for m in map(self._of, [p.name for p in bsym.flat_proxy_args])}
        if len(found) == 1 and not changes_memory(bsym):
            (memory,) = found.values()
        else:
            memory = _Memory(False)
            for other in found.values():
                other.is_own &= len(bsym.flat_proxy_outs) == 0 and not changes_memory(bsym)
        for p in bsym.flat_proxy_outs:
            self.of[p.name] = memory
            memory.views[p.name] = i

    def _a_view_sees_a_write(self, memory: _Memory) -> bool:
        return any(made < w <= self._last_use.get(name, made) for name, made in memory.views.items() for w in memory.writes)


def _passes_on(bsym: BoundSymbol) -> bool:
    return bsym.sym.name == "update_aliases" and len(bsym.flat_proxy_args) == len(bsym.flat_proxy_outs)


def _is_write(bsym: BoundSymbol) -> bool:
    return bsym.sym.name == "copy_" and isinstance(target_of(bsym), TensorProxy)


def _makes_its_own(bsym: BoundSymbol) -> bool:
    return may_be_in_region(bsym) and not may_share_memory(bsym)


def without(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations, with no write into a tensor of the program's own that has but one name at a time."""
    if not any(map(_is_write, bsyms)):
        return list(bsyms)
    memories = _Memories(bsyms).of

    def own(p: Proxy) -> _Memory | None:
        """The memory of a whole tensor whose writes are written otherwise."""
        memory = memories.get(p.name)
        return memory if memory is not None and memory.is_own and p.name not in memory.views else None

    found = []
    for bsym in bsyms:
        if _passes_on(bsym):
            others = [(g, p) for g, p in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True) if own(g) is None]
            if others:
                found.append(bsym.from_bsym(args=(tuple(g for g, _ in others),), output=tuple(p for _, p in others)))
            continue
        now = {p.name: memory.now for p in bsym.flat_proxy_args if (memory := own(p)) is not None}
        swap = {variableify(p): now[p.name] for p in bsym.flat_proxy_args if p.name in now and now[p.name].name != p.name}
        swapped = bsym.from_bsym_swap_proxies(swap, skip_output=True) if swap else bsym
        if _is_write(bsym) and own(target_of(bsym)) is not None:
            swapped = bsym.from_bsym(sym=written, args=swapped.args[:2], kwargs={}, subsymbols=())
        for p in bsym.flat_proxy_outs:
            if (memory := own(p)) is not None:
                memory.now = p
        found.append(swapped)
    return found
