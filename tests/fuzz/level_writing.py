"""What is known of a program while levels are written around its function, and the trees that it returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .writing import Redraw


@dataclass(frozen=True)
class Level:
    """A transform; `seed` draws how it is written, None is the plainest way."""

    kind: str
    seed: int | None = None


@dataclass
class Argument:
    """An argument of the function: its name, a sample of it, and the expression that is passed at the end."""

    name: str
    value: Any
    text: str


@dataclass
class Writing:
    """The program so far: its lines, the function that was written last, and what that returns."""

    arguments: list[Argument]
    lines: list[str]
    function: str = "f"
    out: Any = None
    count: int = 0
    result: str = ""
    pick: random.Random | None = field(default=None)

    # -- drawing ------------------------------------------------------------------------------------------------------------

    def choose(self, options: Sequence[Any]) -> Any:
        """One of them; the first, where nothing is drawn."""
        return options[0] if self.pick is None else self.pick.choice(list(options))

    def some(self, options: Sequence[Any]) -> list[Any]:
        """At least one of them, in order; all, where nothing is drawn."""
        if self.pick is None or self.pick.random() < 0.4:
            return list(options)
        chosen = self.pick.sample(range(len(options)), self.pick.randint(1, len(options)))
        return [options[i] for i in sorted(chosen)]

    # -- text ---------------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [a.name for a in self.arguments]

    @property
    def head(self) -> str:
        """The arguments, as in a definition or a call."""
        return ", ".join(self.names)

    def new(self, prefix: str = "g") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def define(self, name: str, body: Sequence[str]) -> None:
        """``def name(arguments): body``; a single expression as the function it is."""
        if len(body) == 1 and body[0].startswith("return ") and self.choose([True, False]) and self.pick is not None:
            self.lines.append(f"{name} = lambda {self.head}: {body[0].removeprefix('return ')}")
        else:
            self.lines.append(f"def {name}({self.head}):")
            self.lines.extend(f"    {line}" for line in body)


def rebuilt(tree: Any, name: str, leaf: Callable[[str, torch.Tensor], str]) -> str:
    """An expression of the structure of `tree`, which is called `name`, with ``leaf(its name, it)`` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return leaf(name, tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {rebuilt(v, f'{name}[{k!r}]', leaf)}" for k, v in tree.items()) + "}"
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return f"Pair({', '.join(rebuilt(v, f'{name}.{k}', leaf) for k, v in zip(tree._fields, tree, strict=True))})"
    parts = "".join(f"{rebuilt(v, f'{name}[{i}]', leaf)}, " for i, v in enumerate(tree))
    return f"[{parts}]" if isinstance(tree, list) else f"({parts})"


def leaves_of(tree: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree, each with the expression for it."""
    found: list[tuple[str, torch.Tensor]] = []
    rebuilt(tree, name, lambda n, v: found.append((n, v)) or "")
    return found


def is_inexact(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())


def all_inexact(tree: Any) -> None:
    leaves = tree_leaves(tree)
    if not leaves or not all(map(is_inexact, leaves)):
        raise Redraw


def all_real(tree: Any) -> None:
    if any(v.is_complex() for v in tree_leaves(tree)):
        raise Redraw


def scalar_text(w: Writing, name: str) -> str:
    """An expression for a scalar function of the result `name`, of all that is inexact in it."""
    terms = []
    for leaf, t in leaves_of(w.out, name):
        if not is_inexact(t):
            continue
        if t.is_complex():
            terms.append(
                w.choose(["{}.real.sum()", "({0} * {0}.conj()).real.sum()", "{}.abs().sum()", "{}.imag.sin().sum()"]).format(leaf)
            )
        elif t.ndim == 0:
            terms.append(w.choose(["{}", "{}.sin()", "{} ** 2"]).format(leaf))
        else:
            terms.append(
                w.choose(
                    ["{}.sin().sum()", "{}.sum()", "({0} * {0}.cos()).sum()", "{}.square().mean()", "torch.tanh({}).sum()"]
                ).format(leaf)
            )
    if not terms:
        raise Redraw
    return " + ".join(terms)


def to_scalar(w: Writing) -> None:
    """Let the function return a real scalar."""
    if isinstance(w.out, torch.Tensor) and w.out.ndim == 0 and w.out.is_floating_point():
        return
    before, w.function = w.function, w.new("s")
    text = scalar_text(w, "out")
    w.define(w.function, [f"out = {before}({w.head})", f"return {text}"])
    w.out = torch.zeros((), dtype=torch.float64)
