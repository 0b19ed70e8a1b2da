"""What was measured of tensors, remembered for as long as their data is there and has not changed.

An entry belongs to a storage, which parameters share with their detached copies and with views: an eager run and a compiled program
that hold one parameter as different tensors find the same entry.  A storage is known weakly; entries of those that are gone are dropped
when the table has doubled.

Whether data changed: every write that autograd knows of moves the version counter, but ``p.data.clamp_()`` and writes from outside of
torch (numpy) do not.  So an entry has a fingerprint too, one pass over memory: the sums of 1024 numbers each, weighted with fixed random
numbers of magnitudes 1 to 2, compared bit by bit.  A change D that keeps them all is either made for it, or so small that each
``sum D r`` is below the rounding of the sum: the entries of D, weighted at random, are then as small as float32's resolution beside
those of the tensor, and so is what they do to a norm.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

M = TypeVar("M")

_SEGMENT = 1024
_AT_ONCE = 1 << 20  # numbers of a half dtype that are made float32 at once
_MOST = 4096  # entries, of tensors that are alive: programs that cut views of ever other shapes


@dataclass(frozen=True)
class _Entry(Generic[M]):
    storage: StorageWeakRef
    version: int | None
    address: int
    fingerprint: torch.Tensor
    value: M


class Remembered(Generic[M]):
    """A table of what was measured, by tensor and by what was asked of it."""

    def __init__(self) -> None:
        self._entries: dict[tuple, _Entry[M]] = {}
        self._limit = 64
        self._lock = threading.Lock()  # autograd runs backwards in threads of its own

    def __len__(self) -> int:
        """How many entries there are of storages that are alive."""
        self._drop_expired()
        return len(self._entries)

    def get(self, t: torch.Tensor, question: Hashable, measure: Callable[[M | None], M]) -> M | None:
        """What is remembered of `t`, or else measured of it now; None if a number in it is not finite.

        Args:
            t: a plain tensor, strided, with data.
            question: what is asked of it; it tells entries of one tensor apart.
            measure: called with what was measured last of the same memory, before it changed, if anything was.
        """
        fingerprint = fingerprint_of(t)
        if not fingerprint.isfinite().all():  # of numbers beyond 1e35 the sums may overflow too
            return None
        storage = t.untyped_storage()
        key = (storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, question)
        found = self._entries.get(key)
        if found is not None and _is_of(found, t) and torch.equal(found.fingerprint, fingerprint):
            return found.value
        value = measure(None if found is None else found.value)
        entry = _Entry(StorageWeakRef(storage), _version(t), t.data_ptr(), fingerprint, value)
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = entry  # the last one
        if len(self._entries) > self._limit:
            self._drop_expired()
        return value

    def _drop_expired(self) -> None:
        with self._lock:
            alive = {key: entry for key, entry in self._entries.items() if not entry.storage.expired()}
            excess = max(0, len(alive) - _MOST)
            self._entries = dict(itertools.islice(alive.items(), excess, None))
            self._limit = max(64, 2 * len(self._entries))


def _is_of(entry: _Entry, t: torch.Tensor) -> bool:
    return entry.version == _version(t) and entry.address == t.data_ptr() and entry.fingerprint.device == t.device


def _version(t: torch.Tensor) -> int | None:
    """How many writes autograd has seen; it does not count those of tensors made under `torch.inference_mode`."""
    return None if t.is_inference() else t._version


def fingerprint_of(t: torch.Tensor) -> torch.Tensor:
    """Sums of the numbers of `t`, in the order of its memory, weighted at random: float32, or float64 of float64.

    A sum with an infinite number, or with NaN, is not finite.
    """
    flat = _in_memory(t.detach())
    whole = flat.numel() - flat.numel() % _SEGMENT
    dtype = torch.float64 if t.dtype is torch.float64 else torch.float32
    weights = _weights(dtype, t.device)
    sums = [part.to(dtype).view(-1, _SEGMENT) @ weights for part in _parts(flat[:whole], t.dtype is dtype)]
    rest = flat[whole:].to(dtype)
    return torch.cat([*sums, torch.dot(rest, weights[: len(rest)])[None]])


def _parts(flat: torch.Tensor, is_wide: bool) -> tuple[torch.Tensor, ...]:
    return (flat,) if is_wide or not len(flat) else flat.split(_AT_ONCE)


def _in_memory(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, of one dimension: a view if there are no gaps between them."""
    order = sorted(range(t.ndim), key=lambda d: (t.stride(d), t.shape[d]), reverse=True)
    return t.permute(order).reshape(-1)


@functools.cache
def _weights(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers from 1 to 2 with random signs, always the same, drawn without the user's generator; no two weigh the same."""
    generator = torch.Generator().manual_seed(0xF1A6)
    size, sign = torch.rand(2, _SEGMENT, generator=generator, dtype=torch.float64, device="cpu")
    return torch.where(sign < 0.5, -1 - size, 1 + size).to(device, dtype)
