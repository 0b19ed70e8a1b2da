"""Inputs that have elements in common, inner tensors of wrappers among them: their fakes have, too, so that a write into one is one into all.

Which inputs these are is a part of the trace as soon as one of them is written into; see `write_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_norm.tracing.shared_memory.aliases import reach, share_elements, storage_address


class SharedMemory:
    """The memory that inputs of one acquisition share."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}  # without data, by where the memory begins in the call at hand

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """The tensors that a program is given, those inside of wrappers and plain ones, as often as they are given."""
        at: dict[int, list[torch.Tensor]] = {}
        for t in tensors:
            at.setdefault(storage_address(t), []).append(t)
        for address, several in at.items():
            if address and _meet(several):
                with self._mode:
                    size = several[0].untyped_storage().nbytes()
                    self._storages[address] = torch.empty(size, dtype=torch.uint8, device=several[0].device).untyped_storage()

    def holds(self, t: torch.Tensor) -> bool:
        """Whether an input lies in memory that several have elements of."""
        return bool(self._storages) and storage_address(t) in self._storages

    def has(self, storage: int) -> bool:
        """Whether this is, by identity, the storage of such fakes."""
        return any(storage == s._cdata for s in self._storages.values())

    def fake_of(self, t: torch.Tensor) -> FakeTensor:
        """A fake that lies in its memory where the input `t` does."""
        storage = self._storages[storage_address(t)]
        with self._mode:
            return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())


def _meet(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two tensors of one storage have elements in common: in order of their first ones, as a storage may hold a whole model."""
    open_ones: list[tuple[int, torch.Tensor]] = []
    for begin, end, t in sorted(((*reach(t), t) for t in tensors), key=lambda found: found[:2]):
        open_ones = [(e, u) for e, u in open_ones if e > begin]
        if any(share_elements(t, u) for _, u in open_ones):
            return True
        open_ones.append((end, t))
    return False
