"""Deques that a program is given, and changes: a later call finds each of their items where it stood before.

Thunder follows what becomes of lists and dicts.  Of a deque it knows where an item was when the program read it, at which another one stands in
the next call once the program has rotated the deque, or put something before the item.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.guarding import guards, held_by_classes
from thunder_norm.tracing.lookasides import instead_of
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, interpreter_needs_wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx

_TAKEN = "_thunder_norm_taken_deques"


def take(args: Sequence[WrappedValue]) -> None:
    """Have the items of deques that are given be known by their places, before anything becomes of the deques.

    Args:
        args: what a function is called with that is not interpreted.
    """
    for a in args:
        if isinstance(a.value, deque) and guards.is_guarded(a) and id(a.value) not in (taken := _taken()):
            held_by_classes.note(a.value)  # an object of Python's may hold it, as a queue does
            items = [thunders.wrap_binary_subscr(item, a, wrap_const(i)) for i, item in enumerate(a.value)]
            take_proxies(*items)
            taken[id(a.value)] = [a, *items]
            known = thunders.get_interpreterruntimectx()._known_wrappers
            known |= {
                id(item): (weakref.ref(w),) for item, w in zip(a.value, items, strict=True) if isinstance(item, torch.Tensor)
            }


def _taken() -> dict[int, list[WrappedValue]]:
    """By the identity of each deque: itself and its items, which are found again as long as they are held."""
    return vars(get_jit_ctx()).setdefault(_TAKEN, {})


@instead_of(deque.__getitem__)
def _getitem(items: WrappedValue, place: WrappedValue) -> Any:
    """An item of a deque: of one that is given it is found by what it is, since it may stand elsewhere by now."""
    return interpreter_needs_wrap(_found if id(items.value) in _taken() else deque.__getitem__)(items, place)


def _found(items: deque, place: Any) -> Any:
    return deque.__getitem__(items, place)
