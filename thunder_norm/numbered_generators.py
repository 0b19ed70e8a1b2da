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


# by id, and the number is what weak references are to: generators of older torches take none
_generators: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
