"""What Thunder's interpreter calls instead of a function, where thunder_norm has an answer; `hooks` asks these tables.

Tables by whose function it is.  Our own functions (``grad``, a call of what it returns) have one answer wherever they are met.
Functions of torch, Python and libraries have another than Thunder's only where one of our transforms has a part in the compilation.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.interpreter import WrappedValue

_of_thunder_norm: dict[Any, Callable] = {}
_of_others: dict[Any, Callable] = {}
_of_libraries: dict[tuple[str, str], Callable] = {}
_WITH_NAMES = (types.FunctionType, type)


def for_our(fn: Callable) -> Callable[[Callable], Callable]:
    """Register what to call for `fn`, a function of thunder_norm; it takes and returns what the interpreter has wrapped."""
    return _entering(_of_thunder_norm, fn)


def instead_of(fn: Callable) -> Callable[[Callable], Callable]:
    """Register what to call for `fn`, a function of torch or of Python, in compilations in which a transform of ours has a part."""
    return _entering(_of_others, fn)


def instead_of_named(module: str, name: str) -> Callable[[Callable], Callable]:
    """As `instead_of`, for a function or class of a module that is not imported for it."""
    return _entering(_of_libraries, (module, name))


def _entering(table: dict[Any, Callable], fn: Any) -> Callable[[Callable], Callable]:
    def enter(lookaside: Callable) -> Callable:
        table[fn] = lookaside
        return lookaside

    return enter


def of_thunder_norm(fn: Callable) -> Callable | None:
    """What to call for a function of ours."""
    return look_up(_of_thunder_norm, fn)


def of_others(fn: Callable) -> Callable | None:
    """What to call for a function of torch, Python or a library where a transform of ours has a part."""
    found = look_up(_of_others, fn)
    if found is None and isinstance(fn, _WITH_NAMES):
        return _of_libraries.get((fn.__module__, fn.__qualname__))
    return found


@functools.cache
def under_another_name(function: types.FunctionType) -> Callable:
    """The same function, which nothing is called instead of."""
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, f"interpreted.{function.__qualname__}"
    return own


def is_registered(fn: Callable) -> bool:
    """Whether a table has `fn`."""
    return of_thunder_norm(fn) is not None or of_others(fn) is not None


def is_pythons(fn: Callable) -> bool:
    """Whether Python's own is called although a Thunder has an operation for it: that of its nightly takes two numbers and nothing else."""
    return fn is max or fn is min


def look_up(table: dict[Any, Callable], fn: Callable) -> Callable | None:
    """What a table has for `fn`, which may be an object that is not hashable."""
    try:
        return table.get(fn)
    except TypeError:  # not hashable
        return None


def shown_to_thunder(fn: Callable, args: tuple[WrappedValue, ...]) -> tuple[WrappedValue, ...]:
    """The arguments by which Thunder decides what to call instead of `fn`: it iterates over sequences, looking for tensors.

    Those of classes written in Python run their own code then, before ``__init__`` for instance; for functions that are interpreted
    anyway it does not matter what they hold.
    """
    if type(fn) is not types.FunctionType or not any(_runs_own_code(a.value) for a in args):
        return args
    return tuple(a for a in args if not _runs_own_code(a.value))


def _runs_own_code(value: Any) -> bool:
    return isinstance(value, Sequence) and isinstance(getattr(type(value), "__iter__", None), types.FunctionType)
