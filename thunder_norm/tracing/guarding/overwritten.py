"""Where a program overwrites what was there before the call: a trace that leaves it as it was serves calls alone that find it so.

``Settings.rate = 2`` where the rate is 2 by then changes nothing, and ``cache.pop("old", None)`` where there is no old one: in a call that
finds something else they do.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from thunder_norm.context_variables import setting
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE_MEMBER_DICT

# methods of containers that change what is under the key they are given first
_BY_KEY = frozenset("__setitem__ __delitem__ setdefault pop move_to_end".split())
# by the identity of what holds them, that and under which keys the program has written; None for all
_Keys = set[Any] | None
_current: contextvars.ContextVar[dict[int, tuple[Any, _Keys]] | None] = contextvars.ContextVar(
    "thunder_norm_overwritten", default=None
)


def noted() -> AbstractContextManager[None]:
    """Note meanwhile what the program overwrites."""
    return setting(_current, {})


def note(owner: Any, key: Any) -> None:
    """Note that the program writes what an object has under a key, or as an attribute."""
    found = _current.get()
    if found is not None:
        _, keys = found.setdefault(id(owner), (owner, set()))
        if keys is not None:
            keys.add(key)


def note_method(method: Callable, args: Sequence[WrappedValue]) -> None:
    """Note a call of a method that changes the container that it is of."""
    found, owner = _current.get(), args[0].value
    if found is None or args[0].provenance.ext_flag & EXT_FLAG_IS_MODULE_MEMBER_DICT:  # of which the program changes a copy
        return
    if getattr(args[0].provenance.inst, "opname", "").startswith("BUILD_"):
        return  # the program has made it, and drops what it holds when it likes: a generator is closed then
    if len(args) > 1 and getattr(method, "__name__", "") in _BY_KEY and isinstance(args[1].value, str | int):
        at = args[1].value
        note(owner, at + len(owner) if isinstance(owner, list) and type(at) is int and at < 0 else at)
    else:
        found[id(owner)] = owner, None


def keys_of(owners: Iterable[Any]) -> _Keys:
    """Under which keys the program has written into what is one of several objects for it; None for all."""
    found, keys = _current.get(), set[Any]()
    for owner in owners if found else ():
        _, of_owner = found.get(id(owner), (None, keys))
        if of_owner is None:
            return None
        keys |= of_owner
    return keys
