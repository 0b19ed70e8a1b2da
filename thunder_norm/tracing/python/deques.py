"""Deques that a program is given, and changes: a later call finds each of their items where it stood before.

Thunder follows what becomes of lists and dicts.  Of a deque it knows where an item was when the program read it, at which another one stands in
the next call once the program has rotated the deque, or put something before the item.  Of a `types.MappingProxyType` it knows what ``m[key]``
is, and not what its methods return.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.guarding import guards, held_by_classes
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.trees import flat_tensors
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, interpreter_needs_wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx

_TAKEN = "_thunder_norm_taken_deques"


def take(args: Sequence[WrappedValue]) -> None:
    """Have the items of deques and views of dicts that are given be known by their places, before anything becomes of them.

    Args:
        args: what a function is called with that is not interpreted.
    """
    for a in args:
        if isinstance(a.value, (deque, MappingProxyType)) and guards.is_guarded(a) and id(a.value) not in (taken := _taken()):
            held_by_classes.note(a.value)  # an object of Python's may hold it, as a queue does
            values = [(a.value[place], place) for place in _places(a.value)]
            items = [thunders.wrap_binary_subscr(item, a, wrap_const(place)) for item, place in values]
            take_proxies(*items)
            taken[id(a.value)] = [a, *items]
            known = thunders.get_interpreterruntimectx()._known_wrappers
            known |= {
                id(item): (weakref.ref(w),) for (item, _), w in zip(values, items, strict=True) if isinstance(item, torch.Tensor)
            }


def _places(given: deque | MappingProxyType) -> Iterable[Hashable]:
    """Where items are; of a view, which may be that of a class, where tensors are."""
    return range(len(given)) if isinstance(given, deque) else [key for key, value in given.items() if flat_tensors(value)]


def _taken() -> dict[int, list[WrappedValue]]:
    """By the identity of each deque or view: itself and its items, which are found again as long as they are held."""
    return vars(get_jit_ctx()).setdefault(_TAKEN, {})


@instead_of(deque.__getitem__)
def _getitem(items: WrappedValue, place: WrappedValue) -> Any:
    """An item of a deque: of one that is given it is found by what it is, since it may stand elsewhere by now."""
    return interpreter_needs_wrap(_found if id(items.value) in _taken() else deque.__getitem__)(items, place)


def _found(items: deque, place: Any) -> Any:
    return deque.__getitem__(items, place)
