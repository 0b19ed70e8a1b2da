"""Constants that a program writes normed tensors into: ``out = torch.zeros(n, d)``, then ``out[i] = f(x)``.

The program goes on with the plain tensor it holds.  From the first such write on, a normed tensor stands for it in every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.trees import flat_tensors

_ALONE = 2  # uses of a storage by one tensor, and by the object of Python that asks


class WrittenConstants:
    """The plain tensors that an eager program made, and the normed ones that stand for some of them by now."""

    def __init__(self) -> None:
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._normed: dict[int, tuple[torch.Tensor, NormedTensor]] = {}

    def note(self, func: Callable, result: Any, given: Sequence[torch.Tensor]) -> None:
        """Remember what an operation made of what it was given; what has no values yet gets zeros, as one must do with anything."""
        is_empty = getattr(func, "__name__", "").startswith("empty")
        before = set(map(id, given))
        for t in flat_tensors(result):
            if id(t) in before:  # a buffer changed in place, say
                continue
            self._made[t] = True
            if is_empty:
                t.zero_()

    def may_be_written(self, t: Any) -> bool:
        """Whether a normed tensor can stand for it: the program made it, and has no view of it, which would stay what it was."""
        if type(t) is not torch.Tensor or t not in self._made or not has_norm(t) or t.layout is not torch.strided:
            return False
        return t._base is None and torch._C._storage_Use_Count(t.untyped_storage()._cdata) == _ALONE

    def replace(self, t: torch.Tensor, normed: NormedTensor) -> None:
        """From now on a normed tensor stands for it."""
        self._normed[id(t)] = t, normed

    def current(self, t: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor."""
        found = self._normed.get(id(t))
        return t if found is None else found[1]
