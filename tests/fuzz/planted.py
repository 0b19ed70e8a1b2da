"""Programs whose outcome is known, one of each sort: what the tester itself is tested with."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from thunder_norm.errors import TransformError

from .program import Outcome

WORDS = ("right", "wrong", "raises", "refused", "unknown", "endless", "dies")


@dataclass(frozen=True)
class Sentence:
    """A program of words, each of which does what it says; those before it are in order."""

    words: tuple[str, ...]

    def run(self) -> Outcome:
        for word in self.words:
            if word == "wrong":
                return Outcome("wrong", "1 is not 2")
            if word == "raises":
                raise AttributeError("no such thing")
            if word == "refused":
                raise TransformError("not this one")
            if word == "unknown":
                return Outcome("no oracle")
            if word == "endless":
                _wait()
            if word == "dies":
                os._exit(3)
        return Outcome("right")

    def smaller(self) -> Iterable[Sentence]:
        for i in range(len(self.words)):
            yield Sentence(self.words[:i] + self.words[i + 1 :])

    def source(self) -> str:
        return " ".join(self.words)

    def labels(self) -> Sequence[str]:
        return self.words


def _wait() -> NoReturn:
    while True:
        signal.pause()


def draw(random: random.Random) -> Sentence:
    """Some words that are in order, one that need not be, and some more."""
    return Sentence((*["right"] * random.randrange(4), random.choice(WORDS), *["right"] * random.randrange(4)))
