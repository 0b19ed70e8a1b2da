"""Operators of torch's that do one thing to each tensor of a list (``torch._foreach_add``): as they are recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.trees import flat_tensors

aten = torch.ops.aten


def instead_of(fn: Callable, args: tuple) -> Callable:
    """What to run for a function of torch's: it takes a tensor without dimensions for a number, which is a value, where it may."""
    packet = _WITH_A_TENSOR.get(fn)
    is_given_one = packet is not None and len(args) > 1 and isinstance(args[1], torch.Tensor)
    return packet.Tensor if is_given_one and all(t.ndim for t in args[0]) else fn


_WITH_A_TENSOR = {torch._foreach_add: aten._foreach_add, torch._foreach_add_: aten._foreach_add_}


def is_on_lists(func: Any) -> bool:
    """Whether an overload is one of these."""
    return func.namespace == "aten" and func.overloadpacket.__name__.startswith("_foreach_")


def with_lists(func: Any, args: tuple) -> tuple[Any, tuple]:
    """The same with a list in the place of one tensor for all, which torch has no derivative for."""
    if func._overloadname != "Tensor" or not isinstance(args[1], torch.Tensor):
        return func, args
    return func.overloadpacket.List, (args[0], [args[1]] * len(args[0]), *args[2:])


def out_of_place(func: Any, args: tuple, kwargs: dict) -> tuple[Callable, list[tuple[tuple, dict]]]:
    """What returns what an overload writes, and what it is called with, once or for each place of the lists.

    The tensors are written into one after the other.  If one is in the memory of what stands at another place of the lists, that is seen there.
    """
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"))
    functional = _zeros if func is aten._foreach_zero_.default else getattr(packet, func._overloadname)
    places = range(len(args[0]))
    memory = [{_memory(t) for t in flat_tensors(_at(i, args))} for i in places]
    if not any(_memory(args[0][i]) in memory[j] for i, j in itertools.permutations(places, 2)):
        return functional, [(args, kwargs)]
    return functional, [(_at(i, args), kwargs) for i in places]


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _at(i: int, args: tuple) -> tuple:
    """The arguments for one place of the lists."""
    return tuple([[a[i]] if isinstance(a, list | tuple) else a for a in args])


def _zeros(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(t) for t in tensors]
