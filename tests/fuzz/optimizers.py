"""Drawn models of which it is known what each parameter is, and what the optimizer, its norm, the clip of logits and the monitor make of them.

A model is text, parts beside a residual stream; whoever writes it knows which rows are which block.  Each program has one check (`CHECKS`).
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .optimizer_attentions import BATCH, TOKENS, WIDTH, Attended, Part
from .optimizer_case import Case, NoOracle
from .optimizer_checks import bound, groups, roles
from .optimizer_logits import clip, monitor
from .optimizer_parts import NORMS, PARTS, end, start
from .optimizer_training import inexact, saved, steps
from .optimizer_truth import Known
from .program import Outcome

HEAD = """\
import math
import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

def rotation(t):
    angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * torch.arange(1, t.shape[-1] // 2 + 1, dtype=t.dtype)
    return angle.cos(), angle.sin()

def rotated_halves(t):
    cos, sin = rotation(t)
    a, b = t.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

def rotated_pairs(t):
    cos, sin = rotation(t)
    a, b = t[..., ::2], t[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

class Model(nn.Module):
    looks = False
    def look(self, name, q, k, scale, causal):
        if self.looks:
            s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
            self.seen[name] = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if causal else s
"""
_numbers = itertools.count()
CHECKS: dict[str, Callable[[Case], str | None]] = {
    **{
        "roles": roles,
        "groups": groups,
        "bound": bound,
        "steps": steps,
        "saved": saved,
        "inexact": inexact,
        "clip": clip,
        "monitor": monitor,
    },
}


@dataclass(frozen=True)
class Trained:
    """A model of parts, and one check of it."""

    parts: tuple[Part, ...]
    check: str
    seed: int

    def text(self) -> str:
        """The model."""
        init = [line for part in self.parts for line in part.init]
        forward = [line for part in self.parts for line in part.forward]
        body = ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in init)]
        body += ["        self.seen = {}", "    def forward(self, inputs):", *(f"        {line}" for line in forward)]
        return HEAD + "\n".join(body) + "\n"

    def case(self) -> Case:
        """The model, made, with its arguments and what is known of it."""
        text, name = self.text(), f"<optimizers {next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        scope: dict[str, Any] = {}
        exec(compile(text, name, "exec"), scope)  # of this package's lines
        torch.manual_seed(self.seed)
        model = scope["Model"]()
        is_tokens = self.parts[0].label == "tokens"
        inputs = torch.randint(11, (BATCH, TOKENS)) if is_tokens else torch.randn(BATCH, TOKENS, WIDTH)
        return Case(model, inputs, self.known(), self.attentions(), random.Random(self.seed), scope["Model"])

    def known(self) -> dict[str, Known]:
        """What is known of each parameter."""
        found: dict[str, Known] = {}
        for part in self.parts:
            is_first = not found
            found |= {name: replace(known, is_first=known.is_first and is_first) for name, known in part.known}
        return found

    def attentions(self) -> tuple[Attended, ...]:
        """What is known of attentions, in order."""
        return tuple(part.attention for part in self.parts if part.attention is not None)

    def run(self) -> Outcome:
        """What the check says."""
        try:
            problem = CHECKS[self.check](self.case())
        except NoOracle as e:
            return Outcome("no oracle", str(e))
        return Outcome("right") if problem is None else Outcome("wrong", f"{self.check}: {problem}")

    def smaller(self) -> Iterable[Trained]:
        """Without a part."""
        for i in range(1, len(self.parts) - 1):
            yield replace(self, parts=self.parts[:i] + self.parts[i + 1 :])

    def source(self) -> str:
        """A program that can be pasted."""
        known = "".join(f"# {name}: {known}\n" for name, known in self.known().items())
        arguments = "torch.randint(11, (2, 5))" if self.parts[0].label == "tokens" else "torch.randn(2, 5, 8)"
        return f"{self.text()}\n{known}from thunder_norm.modular import find_roles\nprint(find_roles(Model(), {arguments}))\n# {self.check}, seed {self.seed}\n"

    def labels(self) -> Sequence[str]:
        """The check and the parts."""
        return [self.check, *(part.label for part in self.parts)]


def draw(random: random.Random) -> Trained:
    """One to three parts between a start and an end, and a check."""
    first = start(random)
    parts = [first]
    for i in range(random.choice((1, 1, 2, 2, 3))):
        made = random.choice(PARTS)(random, f"p{i}", True)
        parts.append(replace(made, forward=(random.choice(NORMS), *made.forward)))
    parts.append(end(random, first))
    return Trained(tuple(parts), random.choice(tuple(CHECKS)), random.randrange(2**31))
