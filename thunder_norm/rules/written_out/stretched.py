"""Multiples by constants that may be large in some entries: the lengths of a ray's intervals, of which the last one is 1e10.

In mode "typical" the size of such a product is that of its largest entries, as if all were of it.  What is bounded, and is taken of it, then
moves as a jump does: no farther than by 1 in as much as the factor that moves is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, every_fact, fact, with_fact


@dataclass(frozen=True, eq=False)
class Stretched:
    """The entries are those of a tensor of this size, each times a constant of its own."""

    norm_size: torch.Tensor

    def slope(self, n: torch.Tensor) -> torch.Tensor:
        """How far a function between 0 and 1 of the product, which is of size n, moves with it."""
        return (self.norm_size.clamp(min=1.0) / n).clamp(max=1.0)  # a factor that is larger may be masked


def _moves(x: Any) -> bool:
    return isinstance(x, NormedTensor) and x.perturbation_size is not None


def _product(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    given = [*args, *kwargs.values()]
    moving = [x for x in given if _moves(x)]
    if current_mode() != "typical" or len(given) != 2 or len(moving) != 1 or not isinstance(moving[0], RMSTensor):
        return out._facts
    return _with(out, Stretched(moving[0].norm_size))


def _negative(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    found = fact(args[0], Stretched) if args else None
    return out._facts if found is None else _with(out, found)


def _with(out: NormedTensor, found: Stretched) -> Any:
    if out._facts is not None and not isinstance(out._facts, Alternatives):
        return out._facts
    return with_fact(out, Alternatives((*every_fact(out), found)))._facts


normed_op(torch.mul).register_fact(_product)
normed_op(torch.neg).register_fact(_negative)
