"""Thunder's interpreter, without interpreting itself.

Thunder acquires a trace by interpreting the bytecode of the program, and interprets its own helpers on the way: for each item of a
tuple the ten opcodes of ``lambda obj, index: obj.__getitem__(index)``, for each ``len`` a function of thirty.  Of 232,871 opcodes of
a GPT-2 with two layers some 10,000 are the program's.  Here are native equivalents of these helpers, for values of exactly the types
they know: they leave the same wrappers, provenances and guards behind, so that traces and prologues are the same to the character
(`tests/test_native.py`), and call Thunder's own function for anything else.

They stand in for Thunder's functions while a trace is acquired under a transform of ours, in any thread, and at no other time.  ``THUNDER_NORM_NATIVE=0``
in the environment, or `switched_off`, leaves everything to Thunder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from thunder_norm.tracing.native import builtins, calls, elements, frames, values
from thunder_norm.tracing.native.replacement import Replacement

REPLACEMENTS: tuple[Replacement, ...] = (
    *values.REPLACEMENTS,
    *frames.REPLACEMENTS,
    *elements.REPLACEMENTS,
    *builtins.REPLACEMENTS,
    *calls.REPLACEMENTS,
)
_lock = threading.RLock()
_num_users = 0
_is_on = os.environ.get("THUNDER_NORM_NATIVE", "1") != "0" and version("lightning-thunder") == "0.2.6"


@contextmanager
def interpreter() -> Iterator[None]:
    """Use the native helpers meanwhile, with the Thunder that they were written for."""
    if not _is_on:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


@contextmanager
def switched_off() -> Iterator[None]:
    """Leave everything to Thunder meanwhile."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


def _enter() -> None:
    global _num_users
    with _lock:
        if _num_users == 0:
            values.forget_types()
            for r in REPLACEMENTS:
                r.put()  # assignments, none of which fails
        _num_users += 1


def _leave() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            for r in REPLACEMENTS:
                r.take_back()
