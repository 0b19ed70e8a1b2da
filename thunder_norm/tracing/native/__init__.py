"""Thunder's interpreter, without interpreting itself.

Thunder acquires a trace by interpreting the bytecode of the program, and interprets its own helpers on the way: for each item of a
tuple the ten opcodes of ``lambda obj, index: obj.__getitem__(index)``, for each ``len`` a function of thirty.  Of 232,871 opcodes of
a GPT-2 with two layers some 10,000 are the program's.  Here are native equivalents of these helpers, for values of exactly the types
they know: they leave the same wrappers, provenances and guards behind, so that traces and prologues are the same to the character
(`tests/tracing/test_native.py`), and call Thunder's own function for anything else.

They stand in for Thunder's functions while a trace is acquired under a transform of ours, in any thread, and at no other time; those
of `passes` from then on until the program is compiled.  Passes leave the same operations too; but that the results of what an executor
claims keep their names, where Thunder's pass numbers them anew.
``THUNDER_NORM_NATIVE=0`` in the environment, or `switched_off`, leaves everything to Thunder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from thunder_norm.tracing.native import bound_symbols, builtins, calls, constraints, elements, frames, passes, values
from thunder_norm.tracing.replacement import Replacements

REPLACEMENTS = Replacements(
    (
        *values.REPLACEMENTS,
        *frames.REPLACEMENTS,
        *elements.REPLACEMENTS,
        *builtins.REPLACEMENTS,
        *calls.REPLACEMENTS,
        *constraints.REPLACEMENTS,
    )
)
_is_on = os.environ.get("THUNDER_NORM_NATIVE", "1") != "0" and version("lightning-thunder") == "0.2.6"


@contextmanager
def interpreter() -> Iterator[None]:
    """Use the native helpers meanwhile, with the Thunder that they were written for."""
    if not _is_on:
        yield
        return
    values.forget_types()
    with REPLACEMENTS.in_place():
        yield


@contextmanager
def compiler() -> Iterator[None]:
    """Use those of Thunder's passes meanwhile."""
    if not _is_on:
        yield
        return
    passes.forget_signatures()
    try:
        with passes.REPLACEMENTS.in_place():
            yield
    finally:
        passes.forget_signatures()  # they keep their functions alive
        bound_symbols.forget_names()


@contextmanager
def switched_off() -> Iterator[None]:
    """Leave everything to Thunder meanwhile."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before
