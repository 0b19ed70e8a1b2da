"""How the results of a region come out of what its graph computes: which lie in memory of their own, and which are views."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.subclass.acquiring.aliasing import is_dense

Tensors = Sequence[torch.Tensor]


class NotCompilable(Exception):
    """The function is to run as it is: it draws numbers, writes into an argument, or its shapes depend on values."""


class Layout(enum.Enum):
    """How a result is to lie in memory."""

    AS_IN_TORCH = enum.auto()
    ANY = enum.auto()
    ANY_OF_A_COPY = enum.auto()  # where it is an input, it may be a copy of it


@dataclass(frozen=True)
class View:
    """A result that shares memory: with an input, or with what the graph computes."""

    of_input: bool
    index: int
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int | None = None  # None: it is the very tensor

    def made(self, inputs: Mapping[int, torch.Tensor], computed: Tensors) -> torch.Tensor:
        base = inputs[self.index] if self.of_input else computed[self.index]
        if self.offset is None:
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True)
class Plan:
    """How the results come out of the inputs and of what a graph computes."""

    views: tuple[View, ...]
    is_direct: bool  # what the graph computes is the results


def planned(inputs: Tensors, results: Tensors, layouts: Sequence[Layout]) -> tuple[list[torch.Tensor], Plan]:
    """The tensors that have to be computed, none of which shares memory with another or an input, and how the results come out of them.

    An input that may be copied is computed: the graph returns it as inductor likes it to lie in memory.
    """
    owners = {_memory(t): i for i, t in enumerate(inputs)}
    computed: list[torch.Tensor] = []
    views: list[View] = []
    computed_at: dict[int, int] = {}
    in_memory = Counter(map(_memory, results))
    for t in results:  # what is no view comes first: others may be views of it
        is_base = t._base is None or (in_memory[_memory(t)] == 1 and _has_all_of(t, t._base))
        if _memory(t) not in owners and is_base and _memory(t) not in computed_at:
            computed_at[_memory(t)] = len(computed)
            computed.append(t)
    for t, layout in zip(results, layouts, strict=True):
        memory = _memory(t)
        if memory in owners and layout is Layout.ANY_OF_A_COPY:
            views.append(View(False, len(computed)))
            computed.append(t)
            continue
        if memory in owners:
            views.append(_view_of(t, inputs[owners[memory]], True, owners[memory]))
            continue
        if memory not in computed_at:
            computed_at[memory] = len(computed)
            computed.append(t._base if t._base is not None else t)
        views.append(_view_of(t, computed[computed_at[memory]], False, computed_at[memory]))
    is_direct = [v.offset is None and not v.of_input and v.index == i for i, v in enumerate(views)]
    return computed, Plan(tuple(views), all(is_direct) and len(computed) == len(views))


def _has_all_of(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view has each entry of its base once: where nobody else has the base, it is as good as a tensor of its own."""
    return view.numel() == base.numel() and is_dense(view)


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _view_of(t: torch.Tensor, base: torch.Tensor, of_input: bool, index: int) -> View:
    if t is base:
        return View(of_input, index)
    if t.dtype is not base.dtype:
        raise NotCompilable  # bits read as another dtype
    return View(of_input, index, tuple(t.size()), tuple(t.stride()), int(t.storage_offset()) - int(base.storage_offset()))
