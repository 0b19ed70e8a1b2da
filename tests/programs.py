"""Random programs: straight-line code over operations with norm rules, with fan-out, shared inputs and weights of many kinds.

A `Program` is source text and the balls its inputs come from.  `grown` writes one, operation by operation; what a rule refuses is
not added.  A shorter program of the same seed is the beginning of a longer one, so a failure shrinks to the first step that shows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from tests.program_forms import FORMS, LOSSES, Form, Operand, Pick, Plain, Shape
from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.audit import Ball, start
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, UnsupportedOpError

SIZES = (1.0, 0.5, 3.0, 1e-3, 0.1, 30.0, 1e3)
LARGEST = 1e9  # beyond, float64 has too few digits left for what is asked
_MOST_ENTRIES = 200


# -- programs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """``target = expression``, of values by name."""

    form: Form
    target: str
    expression: str
    operands: tuple[str, ...]

    def run(self, *values: Any) -> Any:
        """The step alone, on values of its own: one for each operand, even of the same name."""
        names = [f"v{i}" for i in range(len(self.operands))]
        return _evaluated(f"lambda {', '.join(names)}: {self.expression.format(*names)}")(*values)


@dataclass(frozen=True, repr=False)
class Program:
    """Straight-line code: inputs from balls, plain inputs, steps; the last target is the result."""

    balls: tuple[Ball, ...]
    plain: dict[str, torch.Tensor]
    steps: tuple[Step, ...]

    @property
    def source(self) -> str:
        """The program as the text of a function."""
        lines = [f"    {s.target} = {s.expression.format(*s.operands)}" for s in self.steps]
        names = ", ".join([*(b.name for b in self.balls), *self.plain])
        return "\n".join([f"def program({names}):", *lines, f"    return {self.steps[-1].target}", ""])

    @property
    def is_traced(self) -> bool:
        """Whether Thunder knows all of its operations."""
        return all(s.form.is_traced for s in self.steps)

    def function(self) -> Callable:
        """The program as a Python function of its inputs and plain inputs."""
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        exec(self.source, namespace)
        return namespace["program"]

    def __call__(self, *inputs: Any) -> Any:
        return self.function()(*inputs, *self.plain.values())

    def points(self, which: int, generator: torch.Generator) -> list[torch.Tensor]:
        """Inputs on the boundary of the balls, of one of eight sorts."""
        return [start(b, which, generator) * b.norm_size for b in self.balls]

    def normed(self, points: Sequence[torch.Tensor], moving: Sequence[float | None]) -> list[NormedTensor]:
        """Inputs as normed tensors, with the perturbation sizes `moving`."""
        return [b.normed(p, m) for b, p, m in zip(self.balls, points, moving, strict=True)]

    def __repr__(self) -> str:
        inputs = [f"    # {b.name}: {b.kind.__name__}{list(b.shape)} over {b.dims}, size {b.norm_size:g}" for b in self.balls]
        return "\n" + "\n".join([*inputs, self.source])

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis shows


def _evaluated(text: str) -> Callable:
    return eval(text, {"torch": torch, "F": F, "math": math})


class _Growing:
    """A program being written, with its values in normed mode."""

    def __init__(self, pick: Pick, generator: torch.Generator):
        self.pick, self.generator = pick, generator
        self.balls: dict[str, Ball] = {}
        self.plain: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        self.values: dict[str, NormedTensor] = {}

    def add_input(self, shape: Shape, kinds: Sequence[type[NormedTensor]]) -> str:
        kind = self.pick(kinds)
        dims = None
        if not issubclass(kind, LinfTensor | RMSToRMSTensor):
            every = tuple(range(-len(shape), 0))
            dims = self.pick([every[-1:], every, every[:1], every[1:], ()] if kind is RMSTensor else [every[-1:], every])
        name = f"x{len(self.balls)}"
        ball = Ball(name, kind, shape, self.pick(SIZES), dims)
        self.balls[name] = ball
        self.values[name] = ball.normed(start(ball, 0, self.generator) * ball.norm_size, 1.0)
        return name

    def _operand(self, wanted: Operand | Plain, shape: Shape, last: str) -> str:
        if isinstance(wanted, Plain):
            name = f"i{len(self.plain)}"
            self.plain[name] = wanted.make(shape, self.generator)
            return name
        needed = tuple(wanted.shape(shape))
        there = [] if wanted.is_new else [n for n, v in self.values.items() if tuple(v.shape) == needed]
        chosen = self.pick([None, *there])
        return self.add_input(needed, wanted.kinds) if chosen is None else chosen

    def grow(self, forms: Sequence[Form], first: str) -> bool:
        """Try to add one operation on `first`; whether it was added."""
        shape = tuple(self.values[first].shape)
        form = self.pick(forms)
        expression = form.write(shape, self.pick) if shape else None
        if expression is None:
            return False
        before = dict(self.balls), dict(self.plain), dict(self.values)
        operands = (first, *(self._operand(o, shape, first) for o in form.others))
        step = Step(form, f"t{len(self.steps)}", expression, operands)
        try:
            out = step.run(*(self.values[n] if n in self.values else self.plain[n] for n in operands))
        except (NormMismatchError, MissingNormRuleError, UnsupportedOpError):
            out = None
        if not isinstance(out, NormedTensor) or not self._is_fit(out):
            self.balls, self.plain, self.values = before
            return False
        self.steps.append(step)
        self.values[step.target] = out
        return True

    @staticmethod
    def _is_fit(out: NormedTensor) -> bool:
        sizes = (out.norm_size.item(), 0.0 if out.perturbation_size is None else out.perturbation_size.item())
        return max(sizes) <= LARGEST and 0 < out.numel() <= _MOST_ENTRIES

    def finished(self) -> Program:
        """The program that computes the value with the most operations behind it, and no others."""
        steps = max((self._behind(step.target) for step in self.steps), key=len)
        needed = {name for step in steps for name in step.operands}
        balls = tuple(b for name, b in self.balls.items() if name in needed)
        return Program(balls, {n: t for n, t in self.plain.items() if n in needed}, tuple(steps))

    def _behind(self, target: str) -> list[Step]:
        needed, steps = {target}, []
        for step in reversed(self.steps):
            if step.target in needed:
                needed.update(step.operands)
                steps.insert(0, step)
        return steps


_KINDS = (RMSTensor, RMSTensor, RMSTensor, LinfTensor, L1Tensor, L2Tensor)
_SHAPES = ((2, 3, 4), (3, 4), (4,), (2, 2, 2, 3), (1, 4), (2, 1, 3), (3, 3))


def grown(seed: int, length: int, forms: Sequence[Form] = FORMS) -> Program:
    """A program of at least 2 and about `length` operations; one in four ends in a loss."""
    growing = _Growing(random.Random(seeded(seed)).choice, torch.Generator().manual_seed(seeded(seed)))
    pick = growing.pick
    for _ in range(pick([1, 2])):
        growing.add_input(pick(_SHAPES), _KINDS)
    for _ in range(5 * length):
        if growing.steps and len(growing.finished().steps) >= length:
            break
        used = {n for s in growing.steps for n in s.operands}
        unused = [n for n in growing.values if n not in used]
        growing.grow(forms, pick([*unused, *unused, *unused, *growing.values]))
    if seed % 4 == 0:
        growing.grow(LOSSES, growing.finished().steps[-1].target if growing.steps else "x0")
    at = growing.steps[-1].target if growing.steps else "x0"
    while not growing.steps or len(growing.finished().steps) < 2:
        at = at if growing.values[at].ndim else "x0"  # a scalar comes to an end early
        at = growing.steps[-1].target if growing.grow(FORMS[:8], at) else at
    return growing.finished()


@st.composite
def programs(draw: Callable, forms: Sequence[Form] = FORMS, most: int = 12) -> Program:
    """Programs of 2 to `most` operations."""
    return grown(draw(st.integers(0, 2**32)), draw(st.integers(2, most)), forms)
