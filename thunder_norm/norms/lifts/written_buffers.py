"""Buffers that a program writes normed tensors into: running means, codebooks, queues.

A buffer outlives the call, and has plain values afterwards as before.  In the call a normed tensor stands for it from such a write on, and the
same part of that one for each tensor that shares its memory.  This is of eager runs; `buffer_proxies` has the same of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder_norm.core.in_place import refused
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.norms.lifts.lifting import Lifting
from thunder_norm.norms.lifts.written_parameters import sharing_memory, values_after, write_of
from thunder_norm.subclass.acquiring.writes import has_memory
from thunder_norm.trees import map_tensors


class WrittenBuffers:
    """The buffers of an eager run, which may be written into, and what stands for them then.

    Args:
        lifting: that of the run.
        buffers: those of the model.
    """

    def __init__(self, lifting: Lifting, buffers: Iterable[torch.Tensor]):
        self._lifting = lifting
        self._storages = {t.untyped_storage()._cdata for t in buffers if has_memory(t)}

    def has(self, t: Any) -> bool:
        """Whether a plain tensor is a buffer, or has the memory of one; a constant and its views are written like one."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or not has_memory(t):
            return False
        return self._is_buffer(t) or self._lifting.written.has_known_views(t)

    def _is_buffer(self, t: torch.Tensor) -> bool:
        return t.untyped_storage()._cdata in self._storages

    def write(self, func: Callable, args: tuple, kwargs: dict, by_now: Callable[[Any], Any], run: Callable) -> torch.Tensor:
        """Write into the memory of a buffer: its values, and what stands for it.

        Args:
            func: what writes.
            args: what is written into, and the others.
            kwargs: the arguments by name.
            by_now: arguments with what stands for them by now.
            run: runs an operation of the program.

        Raises:
            ThunderNormError: no rule says what it becomes, and it is no buffer, or a normed tensor stands for it already.
        """
        target, *others = args
        stands, others, by_name = by_now(target), by_now(others), by_now(kwargs)
        if isinstance(stands, NormedTensor):
            run(func, stands, *others, **by_name)
            after = [(target, stands)]
        else:
            after = self._after(func, (target, *others), by_name, run)
        if self._is_buffer(target):
            others, by_name = map_tensors(lambda t: _value(t, by_now(t)), (args[1:], kwargs))
            with torch.no_grad():
                func(target, *others, **by_name)
        for t, new in after:
            self._lifting.written.replace(t, new)
        if not after:  # it may be that nobody asks for its norm
            self._lifting.unknown.change(func, target)
        return target

    def _after(self, func: Callable, args: tuple, kwargs: dict, run: Callable) -> list[tuple[torch.Tensor, Any]]:
        """What stands for a plain tensor, and for those that share its memory, after a write; nothing where no rule says it of a buffer."""
        target, lifting, write = args[0], self._lifting, write_of(func, args, kwargs)
        tensors = [target, *sharing_memory(target, [*lifting.plain_tensors(), *lifting.written.made()])]
        try:
            if write is None:
                raise refused(func, args, kwargs)
            after = values_after(write, tensors, tensors, run, _backing, None)
        except ThunderNormError:
            if not self._is_buffer(target):
                raise
            return []
        return list(zip(tensors, after, strict=True))


def _value(t: torch.Tensor, by_now: torch.Tensor) -> torch.Tensor:
    return by_now.backing if isinstance(by_now, NormedTensor) else t


def _backing(t: torch.Tensor) -> torch.Tensor:
    return t.backing if isinstance(t, NormedTensor) else t
