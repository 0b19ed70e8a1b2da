"""Numbers of random generators, by which operations of a trace that draw from one are called."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Numbered:
    """A generator and the number it has in traces."""

    generator: torch.Generator
    number: int


def numbered(generator: torch.Generator) -> Numbered:
    """The generator with its number, which is the same for as long as somebody has what this returns."""
    if (found := _generators.get(id(generator))) is None:
        found = _generators[id(generator)] = Numbered(generator, next(_numbers))
    return found


def name_with(name: str, source: Numbered) -> str:
    """What an operation is called that draws from a generator."""
    return f"{name}{_FROM}{source.number}"


def drawn_from(name: str) -> torch.Generator | None:
    """The generator that an operation of such a name draws from, while somebody has its number; None for other names."""
    number = name.rpartition(_FROM)[2] if _FROM in name else ""
    return next((n.generator for n in list(_generators.values()) if str(n.number) == number), None)


_FROM = "_from_generator_"
# by id, and the number is what weak references are to: generators of older torches take none
_generators: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
