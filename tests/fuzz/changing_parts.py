"""What a program reads, and what may become of it between two calls: the parts that `changes` puts together.

A part is text: `before` at the top of the program, `init` in the module's ``__init__``, `body` in its ``forward``, where ``x`` is a tensor
of shape (3, 4) before and after it, and `changes`, each a statement that is run between two calls, where ``m`` is the module. ``{n}`` is
a number that no other part of the program has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One thing that a program reads."""

    name: str
    body: str
    changes: tuple[str, ...]
    init: str = ""
    before: str = ""


def attribute(name: str, body: str, *values: str) -> Part:
    """An attribute of the module, with each of its values."""
    return Part(name, body, tuple(f"m.a{{n}} = {v}" for v in values[1:]), f"self.a{{n}} = {values[0]}")
