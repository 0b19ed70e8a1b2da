"""Variables that a program reads and changes itself: counters in globals and closures.

Python changes them once, while the trace is acquired, before the prologue looks at them.  The trace holds the number of one call, and the
next one is acquired anew.
"""

from __future__ import annotations

import warnings
from typing import Any

from thunder_norm.errors import AcquiredAnewWarning, with_details
from thunder_norm.tracing import guards
from thunder_norm.tracing.ways import LEFT_OUT, Path, Ways, path_of
from thunder.core.proxies import Proxy

_OF_VARIABLES = (("attribute", "__globals__"), ("attribute", "cell_contents"))
_NUMBERS_AND_WORDS = (bool, int, float, complex, str)


def let_be(ctx: Any, roots: dict[str, Any]) -> None:
    """Let the prologue of the trace that is being acquired not check what the program has changed meanwhile.

    Args:
        ctx: Thunder's, of the acquisition.
        roots: what ways to variables begin at.
    """
    ways, kept, changed = Ways(roots), [], []
    for constraint in ctx._constraints:
        path = _variable(constraint)
        if path is not None and _is_another(ways.end(path), constraint[2]):
            changed.append(str(path[-1][1] if path[-1][1] != "cell_contents" else "a variable of a closure"))
        else:
            kept.append(constraint)
    if not changed:
        return
    ctx._constraints[:] = kept
    guards.use_for_one_call()
    warnings.warn(
        with_details(
            f"the jitted function changes {changed[0]}, which it reads: its trace is acquired anew in each call",
            why="what it reads goes into the trace as a number, which the next call must not have",
            instead="keep it as a tensor, or as an attribute of a module; or give it as an argument and return it",
        ),
        AcquiredAnewWarning,
        stacklevel=2,
    )


def _variable(constraint: tuple) -> Path | None:
    """The way to the number or word that a constraint is of, if it is a variable of a function."""
    if len(constraint) != 3 or not isinstance(constraint[1], Proxy) or type(constraint[2]) not in _NUMBERS_AND_WORDS:
        return None
    path = path_of(constraint[1].history) if constraint[1].history is not None else None
    return path if path is not None and any(step in _OF_VARIABLES for step in path) else None


def _is_another(now: Any, then: Any) -> bool:
    return now is not LEFT_OUT and type(now) in _NUMBERS_AND_WORDS and (type(now) is not type(then) or now != then) and now == now
