"""Constants of programs without data: what a program on the meta device makes of numbers alone has values all the same.

``torch.zeros(n, device=x.device)`` and ``torch.arange(n, device=x.device).cos()`` are constants of the program, whose norms it needs,
and on meta they are empty.  So the same operations run once more, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.op_names import op_key
from thunder_norm.trees import flat_tensors

# Beyond, the values of a model without data would be more than anybody asked for.
MAX_NUMEL = 1 << 24

_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "empty", "new_empty", "poisson", "exponential", "uniform")


class Constants:
    """The values of tensors on meta that were made of numbers alone."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor with the values of `t`: itself, if it has some or none are known."""
        return self._values.get(id(t), (t, t))[1]

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Remember the values of what `func` made, if those of all it took are known."""
        made = flat_tensors(result)
        if not made or not any(t.device.type == "meta" and t.numel() <= MAX_NUMEL for t in made):
            return
        key = op_key(func)
        given = flat_tensors((args, kwargs))
        is_random = isinstance(key, str) and key.startswith(_RANDOM)
        if is_random or any(t.device.type == "meta" and id(t) not in self._values for t in given):
            return
        args, kwargs = tree_map(self._on_cpu, (args, kwargs))
        try:
            with torch.device("cpu"):
                known = flat_tensors(func(*args, **kwargs))
        except Exception:  # noqa: BLE001 - it ran on meta: what is wrong with the values is said where they are needed
            return
        self._values |= {id(t): (t, v) for t, v in zip(made, known, strict=True)}

    def _on_cpu(self, v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return self.value(v)
        return "cpu" if isinstance(v, str | torch.device) and str(v) == "meta" else v
