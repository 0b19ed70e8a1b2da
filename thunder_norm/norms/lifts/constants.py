"""Constants of programs without data: what a program on the meta device makes of numbers alone has values all the same.

``torch.zeros(n, device=x.device)`` and ``torch.arange(n, device=x.device).cos()`` are constants of the program, whose norms it needs,
and on meta they are empty.  So the same operations run once more, on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.core.registry import is_mutation
from thunder_norm.op_names import op_key
from thunder_norm.trees import flat_tensors

# Beyond, the values of a model without data would be more than anybody asked for.
MAX_NUMEL = 1 << 24

_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "empty", "new_empty", "poisson", "exponential", "uniform")


class Constants:
    """The values of tensors on meta that were made of numbers alone."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def know(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Say what a tensor on meta stands for: a copy, as the program may write into it."""
        self._values[id(t)] = t, value.detach().clone()

    def value(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor with the values of `t`: itself, if it has some or none are known."""
        return self._values.get(id(t), (t, t))[1]

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Remember the values of what `func` made or wrote, if those of all it took are known; else forget what it may have written."""
        made, given = flat_tensors(result), flat_tensors((args, kwargs))
        if not any(t.device.type == "meta" for t in (*made, *given)):
            return
        if self._follows(func, made, given):
            args, kwargs = tree_map(self._on_cpu, (args, kwargs))
            with (
                contextlib.suppress(Exception),
                torch.device("cpu"),
            ):  # on meta it ran: what is wrong is said where values are needed
                self._values |= {id(t): (t, v) for t, v in zip(made, flat_tensors(func(*args, **kwargs)), strict=True)}
                return
        self._forget([*made, *(given if _writes(func, kwargs) else ())])

    def _follows(self, func: Callable, made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
        key = op_key(func)
        is_random = (
            isinstance(key, str) and key.startswith(_RANDOM) or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        )
        is_known = all(t.device.type != "meta" or id(t) in self._values for t in given)
        is_small = any(t.numel() <= MAX_NUMEL for t in made or given)
        return is_known and is_small and not is_random

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        """Values in the memory of those of `written`: other views of it are written too."""
        memory = {self._values[id(t)][1].untyped_storage()._cdata for t in written if id(t) in self._values}
        self._values = {k: (t, v) for k, (t, v) in self._values.items() if v.untyped_storage()._cdata not in memory}

    def _on_cpu(self, v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return self.value(v)
        return "cpu" if isinstance(v, str | torch.device) and str(v) == "meta" else v


def _writes(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write into a tensor it is given: in place, by ``x[...] = v``, into ``out=``."""
    return func is torch.Tensor.__setitem__ or "out" in kwargs or is_mutation(func, kwargs)
