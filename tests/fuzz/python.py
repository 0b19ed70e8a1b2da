"""Structured programs of Python, traced: statements in each other, functions, generators, classes and what they do to each other.

What each of three calls returns or raises, and what its arguments, the module's variables and its classes hold afterwards, is Python's; before
the second and third something is changed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.transforms import NormTransform
import thunder

from .program import Outcome, outcome_of
from .python_comparison import Difference, differing, state_of
from .python_definitions import HEAD
from .python_shrinking import smaller
from .python_writing import ARGUMENTS, written

_numbers = itertools.count()


def arguments(box: Callable) -> dict[str, Any]:
    """What a program is called with."""
    x, y = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    return {"x": x, "y": y, "n": 2, "k": 1, "s": "ab", "l": [3, 1, 2], "d": {"a": 1, "b": 4}, "o": box(2, x)}


@dataclass(frozen=True)
class Structured:
    """The text of a module with a function ``f``, what is executed before its second and third call, and what is in it.

    `left` is how much the last step left out that made it smaller: more than that was tried before.
    """

    text: str
    changes: tuple[str, ...]
    parts: tuple[str, ...] = ()
    left: int = sys.maxsize

    def run(self) -> Outcome:
        """Each call, Python's and ours."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                eager, ours = executed(self.text), executed(self.text)
            except Exception as e:  # noqa: BLE001 - a module that does not run
                return Outcome("no oracle", f"{type(e).__name__}: {e}")
            return self._compared(eager, ours)

    def _compared(self, eager: dict[str, Any], ours: dict[str, Any]) -> Outcome:
        jitted = thunder.jit(ours["f"], transforms=[NormTransform()])
        given = [arguments(scope["Box"]) for scope in (eager, ours)]
        for number, change in enumerate(("pass", *self.changes)):
            for scope, a in zip((eager, ours), given, strict=True):
                with contextlib.suppress(Exception):  # a change of what an earlier one made another
                    exec(change, scope, {"a": a})  # noqa: S102 - of this package
            expected, found = called(eager["f"], given[0]), called(jitted, given[1])
            if found.error is not None and type(found.error).__name__ != type(expected.error).__name__:
                outcome = outcome_of(found.error)
                return replace(outcome, detail=f"{outcome.detail}\nin call {number}, after {change}; Python: {expected.error!r}")
            try:
                differing((found.result, found.error), (expected.result, expected.error))
                differing((given[1], state_of(ours)), (given[0], state_of(eager)), "afterwards")
            except Difference as e:
                return Outcome("wrong", f"call {number}, after {change}: {e}")
        return Outcome("right")

    def smaller(self) -> Iterable[Structured]:
        """With fewer changes and statements."""
        for n, change in enumerate(self.changes):
            if change != "pass":
                yield replace(self, changes=(*self.changes[:n], "pass", *self.changes[n + 1 :]))
        for left, text in smaller(self.text, self.left):
            yield replace(self, text=text, left=left)

    def source(self) -> str:
        """A program that can be pasted, run from the folder of the project."""
        calls = "".join(
            f"exec({change!r}, globals(), {{'a': given}})\nprint(called(call, given))\n" for change in ("pass", *self.changes)
        )
        return f"""\
from thunder_norm.transforms import NormTransform
import thunder
from tests.fuzz.python import arguments, called
{HEAD}{self.text}
import sys
given = arguments(Box)
call = f if "eager" in sys.argv else thunder.jit(f, transforms=[NormTransform()])
{calls}"""

    def labels(self) -> Sequence[str]:
        """The statements and definitions."""
        return self.parts


@dataclass
class Called:
    """What a call returned, or raised."""

    result: Any = None
    error: BaseException | None = None


def called(f: Callable, given: dict[str, Any]) -> Called:
    """What comes of a call."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return Called(result=f(*(given[name] for name in ARGUMENTS)))
    except BaseException as e:  # noqa: BLE001 - an outcome
        if isinstance(e, KeyboardInterrupt):
            raise
        return Called(error=e)


def executed(text: str) -> dict[str, Any]:
    """The variables of a new module of this text, after what all have."""
    text = HEAD + text
    name = f"structured_{next(_numbers)}"
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(True), f"<{name}>")
    module = sys.modules[name] = types.ModuleType(name)  # as dataclasses look for it
    exec(compile(text, f"<{name}>", "exec"), vars(module))  # noqa: S102 - of this package
    return vars(module)


def draw(random: random.Random) -> Structured:
    """Up to three definitions, what uses them, and one to five statements, nested up to three deep."""
    return Structured(*written(random))
