"""Classes of Python's standard library that are written in C, given tensors: ``functools.partial(f, x)``, ``deque([x])``.

Thunder takes any function in C that is given a tensor for an operation on tensors, and looks for its name in its module.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from thunder_norm.tracing import lookasides
from thunder.core.interpreter import default_lookaside, interpreter_needs_wrap, is_opaque
from thunder.core.jit_ext import _general_jit_lookaside_map

# methods of a deque that take a number first
AT_PLACES = frozenset(
    getattr(deque, name) for name in ("rotate", "insert", "__getitem__", "__delitem__", "__setitem__", "__mul__", "__imul__")
)


def is_known(fn: Callable) -> bool:
    """Whether Thunder has something of its own to call instead of `fn`."""
    if lookasides.is_pythons(fn):
        return False
    try:
        return fn in _general_jit_lookaside_map or default_lookaside(fn) is not None or lookasides.is_registered(fn)
    except TypeError:  # not hashable
        return False


def lookaside(fn: Callable) -> Callable | None:
    """What to call instead of `fn` if it is a method, of objects or of the class, of such a class; None if Thunder knows it, or it is none."""
    if not is_opaque(fn):
        return None
    owner = getattr(fn, "__self__", None)
    owner = owner if isinstance(owner, type) else getattr(fn, "__objclass__", None)
    if not isinstance(owner, type) or owner.__module__ == "builtins":
        return None
    if owner.__module__.partition(".")[0] not in sys.stdlib_module_names or is_known(fn):
        return None
    return interpreter_needs_wrap(fn)
