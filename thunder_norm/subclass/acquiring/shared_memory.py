"""Inputs that have elements in common, inner tensors of wrappers among them: their fakes have, too, so that a write into one is one into all.

Which inputs these are is a part of the trace as soon as one of them is written into; see `write_back`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_norm.tracing.shared_memory.aliases import share_elements, storage_address


class SharedMemory:
    """The memory that inputs of one acquisition share."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}  # without data, by where the memory begins in the call at hand

    def note(self, inner: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
        """The tensors that a program is given: those inside of wrappers, as often as they are given, and plain ones."""
        others = list({id(t): t for t in plain}.values())
        for i, t in enumerate(inner):
            address = storage_address(t)
            if not address or address in self._storages:
                continue
            if any(storage_address(u) == address and share_elements(t, u) for u in itertools.chain(inner[i + 1 :], others)):
                with self._mode:
                    size = t.untyped_storage().nbytes()
                    self._storages[address] = torch.empty(size, dtype=torch.uint8, device=t.device).untyped_storage()

    def holds(self, t: torch.Tensor) -> bool:
        """Whether an input lies in memory that a wrapper's inner tensor shares with another one."""
        return bool(self._storages) and storage_address(t) in self._storages

    def has(self, storage: int) -> bool:
        """Whether this is, by identity, the storage of such fakes."""
        return any(storage == s._cdata for s in self._storages.values())

    def fake_of(self, t: torch.Tensor) -> FakeTensor:
        """A fake that lies in its memory where the input `t` does."""
        storage = self._storages[storage_address(t)]
        with self._mode:
            return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())
