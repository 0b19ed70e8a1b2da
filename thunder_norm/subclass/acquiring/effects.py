"""Operations with effects: they run once in every call, in the order of the program, also where nobody uses what they return.

A trace knows of an operation only what it takes and returns, and drops, moves and merges operations by that.  So each of these takes
the *turn* of the one before it and returns its own, a tensor without elements, and what the program returns waits for the last one
(`turns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from thunder_norm.errors import DataDependentError, with_details
from thunder_norm.op_names import identifier
from thunder_norm.subclass.acquiring.autocast import Regions, autocast_on, suffix


@dataclass(frozen=True)
class Effect:
    """Stands for the function of an operation with effects in a log: takes a turn before what the operation takes, returns one first."""

    @property
    def __name__(self) -> str:
        raise NotImplementedError

    def __call__(self, turn: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Run the operation."""
        raise NotImplementedError


def is_effect(func: Any) -> bool:
    """Whether a recorded function is an operation with effects."""
    return isinstance(func, Effect)


@dataclass(frozen=True)
class OfOperator(Effect):
    """An operator of torch's that does something besides returning tensors: prints, checks, writes into its arguments.

    What it writes into are copies, which are returned after its results.
    """

    func: Any
    written: tuple[int, ...] = ()  # arguments of its schema
    regions: Regions = ()  # of autocast, which are left to it

    @property
    def __name__(self) -> str:
        return identifier(self.func) + suffix(self.regions)

    def __call__(self, turn: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Run the operation."""
        own_args, own_kwargs, copies = self._with_copies(args, kwargs)
        with autocast_on(self.regions):
            result = self.func(*own_args, **own_kwargs)
        return turn.clone(), tree_map(lambda v: None if any(v is c for c in copies) else v, result), *copies

    def written_tensors(self, args: tuple, kwargs: dict) -> list[Any]:
        """The tensors among arguments that it writes into, or what stands for them."""
        return [t for _, value in self._written(args, kwargs) for t in _listed(value) if t is not None]

    def _written(self, args: tuple, kwargs: dict) -> list[tuple[int | str, Any]]:
        names = [a.name for a in self.func._schema.arguments]
        places = [i if i < len(args) else names[i] for i in self.written]
        return [(p, args[p] if isinstance(p, int) else kwargs.get(p)) for p in places]

    def _with_copies(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[torch.Tensor]]:
        # a tensor given twice has one copy: the operator may read in one place what it wrote in the other
        copies = {id(t): t.clone() for t in self.written_tensors(args, kwargs)}
        own_args, own_kwargs = tree_map(lambda v: copies.get(id(v), v), (args, kwargs))
        return own_args, own_kwargs, list(copies.values())


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def with_effects(func: Any, regions: Regions = ()) -> OfOperator | None:
    """What stands for an operator that writes into its arguments in ways without another name, or returns nothing; None for others."""
    schema = func._schema
    written = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    if func.namespace == "aten" and not func.overloadpacket.__name__.startswith("_fused_"):
        return OfOperator(func) if not schema.returns and not written and func not in _CHECKED_ON_FAKES else None
    return OfOperator(func, written, regions) if written or not schema.returns else None


# they ask for what is known while the trace is acquired
_CHECKED_ON_FAKES = frozenset({torch.ops.aten._assert_tensor_metadata.default})


@dataclass(frozen=True)
class SameValues(Effect):
    """Checks what a trace takes for granted: that two tensors which the program compared are equal."""

    at: str | None  # where

    @property
    def __name__(self) -> str:
        return "check_same_values"

    def __call__(self, turn: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple:
        """Check it.

        Raises:
            DataDependentError: they differ.
        """
        if not isinstance(a, FakeTensor) and not torch.equal(a, b):
            raise DataDependentError(
                with_details(
                    "two tensors differ which the program asked whether they are equal",
                    at=self.at,
                    why="the program was compiled for equal ones",
                    instead="call it outside the jitted function, where it may go on with tensors that differ",
                )
            )
        return (turn.clone(),)
