"""Expressions for modules, as trees that get smaller, and random choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """``head(*args, **options)``; `options` are texts such as ``bias=False``."""

    head: str
    args: tuple[Node | str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The expression."""
        given = [a if isinstance(a, str) else a.text for a in self.args]
        return f"{self.head}({', '.join([*given, *self.options])})"

    def nodes(self) -> Iterator[Node]:
        """This one and all inside."""
        yield self
        for a in self.args:
            if isinstance(a, Node):
                yield from a.nodes()

    def smaller(self) -> Iterator[Node]:
        """Expressions with one thing less: a part in place of the whole, an argument or an option less, or such a part."""
        yield from (a for a in self.args if isinstance(a, Node))
        for i, a in enumerate(self.args):
            if isinstance(a, Node) and len(self.args) > 1 and self.head in SEVERAL:
                yield replace(self, args=self.args[:i] + self.args[i + 1 :])
        for i in range(len(self.options)):
            yield replace(self, options=self.options[:i] + self.options[i + 1 :])
        for i, a in enumerate(self.args):
            if not isinstance(a, Node):
                continue
            if a.head != "nn.Identity":
                yield replace(self, args=(*self.args[:i], Node("nn.Identity"), *self.args[i + 1 :]))
            for b in a.smaller():
                yield replace(self, args=(*self.args[:i], b, *self.args[i + 1 :]))


SEVERAL = ("nn.Sequential", "Each", "Mean", "Concat", "CheckpointedInParts")


class Pick:
    """Random choices."""

    def __init__(self, random: Random):
        self.random = random
        self.choice = random.choice

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.random.random() < p

    def options(self, *given: str, p: float = 0.3) -> tuple[str, ...]:
        """Each of these texts with probability p; of those that say the same thing, parted by "|", one."""
        return tuple(self.choice(text.split("|")) for text in given if self.chance(p))

    def several(self, values: tuple, n: int) -> tuple:
        """n of these, with repetitions."""
        return tuple(self.choice(values) for _ in range(n))


def places(shape: Shape) -> int:
    """The number of dimensions of a picture: of [n, c, *places]."""
    return min(max(len(shape) - 2, 1), 3)
