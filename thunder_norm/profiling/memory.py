"""Which storages are alive: counted once however many tensors look at them, until the last one of those is gone.

A simulated program creates and drops tensors without data in the order in which the real one does it with data, so Python's own
reference counts say when a storage is freed.
"""

from __future__ import annotations

import typing
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

Kind = Literal["parameter", "buffer", "input", "result"]


def _whole(t: torch.Tensor) -> torch.Tensor:
    """What a tensor inside a transform of ``torch.func`` stands for: one sample has no memory of its own."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


class Block:
    """One storage.

    Attributes:
        nbytes: its size.
        kind: whose it is: a parameter's, a buffer's, an input's, or made by the program.
        is_alive: whether any tensor has it.
        is_saved: whether the backward needs it.
    """

    __slots__ = ("_reference", "is_alive", "is_saved", "kind", "nbytes")

    def __init__(self, nbytes: int, kind: Kind):
        self.nbytes, self.kind = nbytes, kind
        self.is_alive, self.is_saved = True, False
        self._reference: weakref.ref | None = None


class Memory:
    """The storages that a program has seen, how much is alive, and how much was at most."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def see(self, t: torch.Tensor, kind: Kind = "result") -> tuple[Block, bool]:
        """The block of a tensor, and whether it is new."""
        storage = _whole(t).untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is not None:
            return block, False
        block = self._blocks[key] = Block(storage.nbytes(), kind)
        block._reference = weakref.ref(storage, lambda _: self._freed(key))
        self.live_bytes += block.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block, True

    def find(self, t: torch.Tensor) -> Block | None:
        """The block of a tensor, if it was seen."""
        return self._blocks.get(_whole(t).untyped_storage()._cdata)

    def blocks(self, tree: Any) -> list[Block]:
        """The blocks of all tensors in a tree, each once."""
        found = {id(b): b for b in map(self.find, tensors_of(tree)) if b is not None}
        return list(found.values())

    def resident(self) -> dict[str, int]:
        """What is alive, by kind."""
        found = dict.fromkeys(typing.get_args(Kind), 0)
        for b in self._blocks.values():
            found[b.kind] += b.nbytes
        return found

    def start_step(self) -> None:
        """Measure the peak anew."""
        self.peak_bytes = self.live_bytes

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key)
        block.is_alive = False
        self.live_bytes -= block.nbytes


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree that have one storage."""
    for t in tree_leaves(tree):
        if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested:
            yield t


def nbytes(t: torch.Tensor) -> int:
    """What reading or writing a tensor moves: an expanded one is there once."""
    if 0 in t.stride() and t.numel():
        distinct = 1
        for size, stride in zip(t.shape, t.stride(), strict=True):
            distinct *= 1 if stride == 0 else size
        return distinct * t.element_size()
    return t.numel() * t.element_size()


def total(blocks: Iterable[Block]) -> int:
    """Bytes of blocks, each once."""
    return sum(b.nbytes for b in {id(b): b for b in blocks}.values())
