"""Random programs on plain tensors in real mode, against the same program in eager mode.

Contexts, Python, dtypes, views and writes: what a call returns (containers, dtypes, shapes, whose memory it is, requires_grad), what it
leaves in its arguments and in the module, gradients, the random state and the modes of the process afterwards, in two or three calls
with other arguments.
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

from .program import Outcome, outcome_of
from .real_comparison import Call, called, difference
from .real_parts import HEAD, PARTS, RETURNS, Statement

HOW = {
    "NormTransform": lambda f: thunder.jit(f, transforms=[NormTransform()]),
    "SubclassTransform": lambda f: thunder.jit(f, transforms=[SubclassTransform()]),
    "inductor": lambda f: thunder.jit(f, transforms=[NormTransform()], executors=[inductor]),
}
FORMS = ("plain", "leaf", "result")
CHANGES = (
    "pass", "a['n'] = 3", "a['n'] = 2.0", "a['n'] = True", "a['k'] = 2", "a['s'] = 'mean'", "a['o'] = Color.RED", "a['o'] = 1.0",
    "a['x'] = a['x'].t().contiguous().t()", "a['x'] = a['x'].double()", "a['x'] = a['x'].detach()", "a['y'] = a['x'][0]",
    "a['z'] = a['z'].double()", "a['i'] = a['i'].int()", "a['d']['c'] = torch.ones(4)", "a['l'].append(torch.ones(4))", "m.eval()", "m.train()",
)  # fmt: skip
_numbers = itertools.count()


@dataclass(frozen=True)
class Real:
    """The statements of a module's forward, what it returns, and what changes before its later calls."""

    statements: tuple[Statement, ...]
    returned: str
    form: str
    changes: tuple[str, ...]
    how: str

    def text(self) -> str:
        """The module."""
        body = [line for s in self.statements for line in s.text.splitlines()]
        return HEAD + "".join(f"        {line}\n" for line in [*body, f"return {self.returned}"])

    def tolerance(self) -> float:
        """How far results may be from each other, for entries of 1: further where there is low precision."""
        is_low = any(re.search(r"autocast|half|bfloat16|float16|low\(|\bh\b", s.text) for s in self.statements)
        return 5e-2 if is_low else 1e-4

    def run(self) -> Outcome:
        """Each call, ours and eager's."""
        try:
            eager, ours = _executed(self.text()), _executed(self.text())
        except SyntaxError as e:
            return Outcome("no oracle", str(e))
        jitted = HOW[self.how](ours["m"])
        refused = None
        for change in ("pass", *self.changes):
            expected = called(eager, eager["m"], self.form, change)
            found = called(ours, jitted, self.form, change, expected)
            outcome = _judged(found, expected, change, self.tolerance())
            if outcome.kind == "refused":
                refused = refused or outcome
            elif outcome.kind != "right":
                return outcome
            if expected.error is not None or found.error is not None:
                break  # what an error leaves behind is for the first call alone
        return refused or Outcome("right")

    def smaller(self) -> Iterable[Real]:
        """With fewer changes and statements."""
        for i in range(len(self.changes)):
            yield replace(self, changes=self.changes[:i] + self.changes[i + 1 :])
        for i in range(len(self.statements)):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        if self.how == "inductor":
            yield replace(self, how="NormTransform")
        for form in FORMS[: FORMS.index(self.form)]:
            yield replace(self, form=form)

    def source(self) -> str:
        """A program that can be pasted, run from the folder of the project."""
        how = {
            "NormTransform": "transforms=[NormTransform()]",
            "SubclassTransform": "transforms=[SubclassTransform()]",
            "inductor": "transforms=[NormTransform()], executors=[inductor]",
        }[self.how]
        calls = "\n".join(f"    show(call, {self.form!r}, {change!r})" for change in ("pass", *self.changes))
        return f"""\
from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
from tests.fuzz.real_comparison import called
{self.text()}
def show(call, form, change):
    print(called(globals(), call, form, change))
for call in (m, thunder.jit(m, {how})):
{calls}
"""

    def labels(self) -> Sequence[str]:
        """How it is called, and the statements."""
        return [self.how, self.form, *(s.name for s in self.statements)]


def draw(random: random.Random) -> Real:
    """One to four statements and up to two changes."""
    statements = tuple(random.choice(PARTS) for _ in range(random.choice((1, 2, 2, 3, 4))))
    changes = tuple(random.choice(CHANGES) for _ in range(random.choice((0, 1, 1, 2))))
    how = random.choices(sorted(HOW), (5, 2, 2))[0]
    return Real(statements, random.choice(RETURNS), random.choice(FORMS), changes, how)


_NO_DERIVATIVE = re.compile("derivative for aten::floor_divide is not implemented")


def _judged(found: Call, expected: Call, change: str, tolerance: float) -> Outcome:
    if found.error is not None:
        if expected.error is not None:
            is_same = isinstance(found.error, type(expected.error))
            outcome = outcome_of(found.error)
            return Outcome("right") if is_same or outcome.kind == "refused" else Outcome("no oracle", str(expected.error))
        outcome = outcome_of(found.error)
        return replace(outcome, detail=f"{outcome.detail}\nafter {change}")
    if _NO_DERIVATIVE.search(str(expected.error)):
        return Outcome("no oracle", str(expected.error))  # ours is zero, as that of div(rounding_mode="floor") is in torch
    if expected.error is not None:
        return Outcome("wrong", f"no error after {change}, where eager has {type(expected.error).__name__}: {expected.error}")
    wrong = difference(found, expected, tolerance)
    return Outcome("wrong", f"{wrong} after {change}") if wrong else Outcome("right")


def _executed(text: str) -> dict[str, Any]:
    name = f"real_{next(_numbers)}"
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(True), f"<{name}>")
    module = sys.modules[name] = types.ModuleType(name)  # as dataclasses look for it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(text, f"<{name}>", "exec"), vars(module))
        vars(module)["m"] = vars(module)["Module"]()
    return vars(module)
