"""What a program reads and changes itself: counters in variables and classes, lists that it appends to, entries that it takes out of dicts.

Python changes them once, while the trace is acquired, before the prologue looks at them.  The trace holds the numbers of one call, and the
next one is acquired anew, until a call changes nothing any more: one that finds in a cache what the one before has put there.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import warnings
from contextlib import AbstractContextManager
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.errors import AcquiredAnewWarning, UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards, snapshots, stored
from thunder_norm.tracing.guarding.ways import GONE, LEFT_OUT, Path, Ways, path_of
from thunder_norm.tracing.shared_memory.aliases import given_as
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import TraceCtx

_OF_VARIABLES = (("attribute", "__globals__"), ("attribute", "cell_contents"))
_TRIED_FOR_ALL = "_thunder_norm_numbers_tried"
_NUMBERS_AND_WORDS = (bool, int, float, complex, str)
_taken_out: contextvars.ContextVar[list[TensorProxy]] = contextvars.ContextVar("thunder_norm_taken_out")
_are_made_once: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_changes_are_made_once", default=False)


def let_be(ctx: Any, roots: dict[str, Any]) -> None:
    """Let the prologue of the trace that is being acquired not check what the program has changed meanwhile.

    Args:
        ctx: Thunder's, of the acquisition.
        roots: what ways to variables begin at.

    Raises:
        UnsupportedOpError: the program uses a tensor that it has taken out of where a prologue would look for it.
    """
    ways = Ways(roots)
    if (numbers := guards.changing_numbers()) is not None:
        numbers.check_in_place(ways)
    _taken_out.set([])
    changed = [c for c in ctx._constraints if _is_changed_variable(c, ways)]
    if changed:
        name = path_of(changed[0][1].history)[-1][1]  # type: ignore[index]
        _acquire_anew("a variable of a closure" if name == "cell_contents" else str(name))
    if guards.has_changed_array():
        _acquire_anew("a numpy array")
    if guards.has_changed_imported():
        _acquire_anew("what it imports")
    if (surroundings := guards.surroundings()) is not None and surroundings.has_changed_variable():
        _acquire_anew("a context variable")
    is_changing = guards.is_of_one_call()
    used = {p.name for b in ctx.computation_trace.bound_symbols for p in b.flat_proxy_args}
    ctx._constraints[:] = [c for c in ctx._constraints if not _is_outdated(c, ways, used, is_changing)]


def note(what: str, changes: dict[Any, tuple[Any, Any]]) -> None:
    """Note that the program has changed something, which stays as Python changed it.

    Where the same change leaves things as they are when it is made again, what is acquired next holds for all calls.

    Args:
        what: it is, in words.
        changes: what was under each key, and what is now.
    """
    if _are_made_once.get():
        return
    changed = [pair for pair in changes.values() if not _is_alike(*pair)]
    if changed and all(type(then) is type(now) and type(now) in (int, float) for then, now in changed):
        _acquire_for_all(what)
    elif changed:
        _acquire_anew(what)


def made_once() -> AbstractContextManager[None]:
    """A trace that is acquired meanwhile stands for all calls: what it appends to a list, say, is appended once."""
    return setting(_are_made_once, True)


def _acquire_for_all(what: str) -> None:
    """Have the next call acquire the program for all numbers that it may find there, see `changing_numbers`; where it has, it is acquired anew."""
    tried = vars(get_compile_data()).setdefault(_TRIED_FOR_ALL, set())
    if what in tried:
        _acquire_anew(what)
    else:
        tried.add(what)
        guards.use_for_one_call()


def _acquire_anew(what: str) -> None:
    if guards.is_of_one_call():
        return
    guards.use_for_one_call()
    warnings.warn(
        with_details(
            f"the jitted function changes {what}, as each call does in eager mode: its trace is acquired anew in each call that changes it",
            why="what it reads goes into the trace as a number, which the next call must not have",
            instead="keep it as a tensor, or as an attribute of a module; or give it as an argument and return it",
        ),
        AcquiredAnewWarning,
        stacklevel=2,
    )


def _is_alike(then: Any, now: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether a program that finds one where the other was does the same."""
    if now is then or (id(then), id(now)) in seen:
        return True
    if type(now) is not type(then) or isinstance(now, torch.Tensor):
        return False
    are_alike = functools.partial(_is_alike, seen=seen | {(id(then), id(now))})
    if isinstance(now, FunctionType):
        return now.__code__ is then.__code__ and are_alike(_made_of(then), _made_of(now))
    if type(now) in (list, collections.deque) or isinstance(now, tuple):
        return len(now) == len(then) and all(map(are_alike, then, now))
    if isinstance(now, dict):
        return tuple(now) == tuple(then) and all(map(are_alike, then.values(), now.values()))
    if snapshots.same_as(then)(now):
        return True
    own = getattr(now, "__dict__", None)
    return type(own) is dict and not isinstance(now, type | ModuleType) and are_alike(vars(then), own)


def _made_of(function: FunctionType) -> tuple[Any, ...]:
    cells = [c.cell_contents for c in function.__closure__ or () if c != CellType()]
    return (*cells, function.__defaults__, function.__kwdefaults__)


def _way(constraint: tuple) -> Path | None:
    """The way to what a constraint is of."""
    return _way_of(constraint[1]) if len(constraint) > 1 else None


def _way_of(value: Any) -> Path | None:
    history = getattr(value, "history", None)
    return None if history is None else path_of(history)


def _is_changed_variable(constraint: tuple, ways: Ways) -> bool:
    """Whether a constraint is of a number or word that is a variable of a function, and another by now."""
    path = _way(constraint) if _is_of_number(constraint) else None
    return path is not None and any(step in _OF_VARIABLES for step in path) and _is_another(ways.end(path), constraint[2])


def _is_of_number(constraint: tuple) -> bool:
    return len(constraint) == 3 and isinstance(constraint[1], Proxy) and type(constraint[2]) in _NUMBERS_AND_WORDS


def _is_outdated(constraint: tuple, ways: Ways, used: set[str], is_changing: bool) -> bool:
    """Whether a constraint does not hold any more where the program has changed what it is of, or tells one call what it knows.

    To look at an attribute again may run a property, which changes again what it changes.
    """
    if is_changing and _is_of_number(constraint):
        return True
    path = _way(constraint)
    if path is None or (now := ways.end(path)) is LEFT_OUT:
        return False
    if not is_changing and (now is not GONE or stored.has_own_methods(type(ways.end(path[:-1])))):
        return False  # of what is not stored a method of the class's own may have said what it is
    if not isinstance(constraint[1], TensorProxy):
        return now is GONE or (_is_of_number(constraint) and _is_another(now, constraint[2]))
    is_moved = path[-1][0] == "item" and ("attribute", "_parameters") not in path and ("attribute", "_buffers") not in path
    if not is_moved or (now is not GONE and (not isinstance(now, torch.Tensor) or given_as(constraint[1]) is now)):
        return False
    if constraint[1].name not in used:
        _taken_out.get().append(constraint[1])
        return True
    raise _refusal(constraint[1])


def check_taken_out(prologue: TraceCtx) -> None:
    """Refuse a prologue that looks for what the program has taken out, and returns or keeps.

    Raises:
        UnsupportedOpError: it would return what is at the place by then.
    """
    # by their ways: what stands for them may have been named anew
    looked_for = {_way_of(p) for p in prologue.bound_symbols[-1].flat_proxy_args}
    for tensor in _taken_out.get():
        if _way_of(tensor) in looked_for:
            raise _refusal(tensor)


def is_moved(wrapped: WrappedValue) -> bool:
    """Whether a value that the program returns or keeps is not where it was any more: a prologue would find another there, or none.

    Raises:
        UnsupportedOpError: it is no number or word, and could not be written into the trace.
    """
    path, value = path_of(wrapped.provenance), wrapped.value
    if path is None or isinstance(value, Proxy) or wrapped.original_value is not wrapped.nothing:
        return False
    now = Ways(guards.roots()).end(path)
    if now is LEFT_OUT or now is value or (type(now) is type(value) and type(value) in _NUMBERS_AND_WORDS and now == value):
        return False
    if value is None or type(value) in (*_NUMBERS_AND_WORDS, bytes):
        return True
    raise UnsupportedOpError(
        with_details(
            f"a {type(value).__qualname__} is taken out of a list or dict that was there before the call, and returned",
            why="a prologue would look for it where it was, and there is another by then, or none",
            instead="take it out before, and give it as an argument",
        )
    )


def _refusal(tensor: TensorProxy) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"a tensor of shape {list(tensor.shape)} is taken out of a list or dict that was there before the call, and used",
            name=tensor.name,
            why="a prologue would look for it where it was, and there is another by then, or none",
            instead="take it out before, and give it as an argument",
        )
    )


def _is_another(now: Any, then: Any) -> bool:
    return now is not LEFT_OUT and type(now) in _NUMBERS_AND_WORDS and (type(now) is not type(then) or now != then) and now == now
