"""Buffers that a program writes normed tensors into: running means, codebooks, queues.

A buffer outlives the call, and has plain values afterwards as before.  In the call a normed tensor stands for it from such a write on, and the
same part of that one for each tensor that shares its memory.  This is of eager runs; `buffer_proxies` has the same of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.norms.lifting import Lifting
from thunder_norm.norms.written_parameters import Write, has_memory, sharing_memory, values_after, write_of
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
        """Whether a plain tensor is a buffer, or has the memory of one."""
        return type(t) in (torch.Tensor, torch.nn.Parameter) and has_memory(t) and t.untyped_storage()._cdata in self._storages

    def write(self, func: Callable, args: tuple, kwargs: dict, by_now: Callable[[Any], Any], run: Callable) -> torch.Tensor:
        """Write into the memory of a buffer: its values, and what stands for it.

        Args:
            func: what writes.
            args: what is written into, and the others.
            kwargs: the arguments by name.
            by_now: arguments with what stands for them by now.
            run: runs an operation of the program.

        Raises:
            ThunderNormError: a normed tensor stands for the buffer already, and no rule says what it becomes.
        """
        target, *others = args
        stands, others, by_name = by_now(target), by_now(others), by_now(kwargs)
        if isinstance(stands, NormedTensor):
            run(func, stands, *others, **by_name)
            after = [(target, stands)]
        else:
            after = self._after(write_of(func, (target, *others), by_name), target, run)

        def value(t: torch.Tensor) -> torch.Tensor:
            now = by_now(t)
            return now.backing if isinstance(now, NormedTensor) else t

        others, by_name = map_tensors(value, (args[1:], kwargs))
        func(target, *others, **by_name)
        for t, new in after:
            self._lifting.written.replace(t, new)
        if not after:  # it may be that nobody asks for its norm
            self._lifting.unknown.change(func, target)
        return target

    def _after(self, write: Write | None, target: torch.Tensor, run: Callable) -> list[tuple[torch.Tensor, Any]]:
        if write is None:
            return []
        lifting = self._lifting
        tensors = [target, *sharing_memory(target, [*lifting.plain_tensors(), *lifting.written.made()])]
        try:
            after = values_after(write, tensors, tensors, run, _backing, None)
        except ThunderNormError:
            return []
        return list(zip(tensors, after, strict=True))


def _backing(t: torch.Tensor) -> torch.Tensor:
    return t.backing if isinstance(t, NormedTensor) else t
