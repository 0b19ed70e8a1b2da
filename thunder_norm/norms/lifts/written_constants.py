"""Constants that a program writes normed tensors into: ``out = torch.zeros(n, d)``, then ``out[i] = f(x)``.

The program goes on with the plain tensor it holds.  From the first such write on, a normed tensor stands for it in every operation; and for
a tensor made from parameters that is written into (`written_parameters`) what it became.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.tensors import has_norm
from thunder_norm.trees import flat_tensors


def _uses(t: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


_ALONE = _uses(
    torch.empty(0, device="cpu")
)  # of a storage that one tensor has: some releases of torch count the object that asks


class WrittenConstants:
    """The plain tensors that an eager program made, and what stands for those of them that were written into."""

    def __init__(self) -> None:
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._became: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, func: Callable, result: Any, given: Sequence[torch.Tensor]) -> None:
        """Remember what an operation made of what it was given; what has no values yet gets zeros, as one must do with anything."""
        is_empty = getattr(func, "__name__", "").startswith("empty")
        before = set(map(id, given))
        for t in flat_tensors(result):
            if id(t) in before:  # a buffer changed in place, say
                continue
            self._made[t] = True
            if is_empty:
                with torch.no_grad():  # torch.empty(..., requires_grad=True)
                    t.zero_()

    def made(self) -> list[torch.Tensor]:
        """The tensors that it made, and that are still there."""
        return list(self._made)

    def has_known_views(self, t: Any) -> bool:
        """Whether the program made it, and all that share its memory, of which there are some: each can have another stand for it."""
        if type(t) is not torch.Tensor or t not in self._made or not has_norm(t) or t.layout is not torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(t) or _uses(t) == _ALONE:
            return False
        storage = t.untyped_storage()._cdata
        known = [v for v in self.made() if v.layout is torch.strided and v.untyped_storage()._cdata == storage]
        return _uses(t) - _ALONE == len(known) - 1

    def may_be_written(self, t: Any) -> bool:
        """Whether a normed tensor can stand for it: the program made it, and has no view of it, which would stay what it was."""
        if type(t) is not torch.Tensor or t not in self._made or not has_norm(t) or t.layout is not torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(t):  # torch's function transforms write into it, not the program
            return False
        return t._base is None and _uses(t) == _ALONE

    def replace(self, t: torch.Tensor, new: torch.Tensor) -> None:
        """From now on another tensor stands for it."""
        if new is not t:
            self._became[id(t)] = t, new

    def current(self, t: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor."""
        while (found := self._became.get(id(t))) is not None:
            t = found[1]
        return t
