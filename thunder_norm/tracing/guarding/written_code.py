"""Checks that are written as text: a program that is acquired again, for another shape say, or beside another, has the same ones."""

from __future__ import annotations

import functools
from types import CodeType


@functools.lru_cache(maxsize=1024)
def code_of(source: str, what: str) -> CodeType:
    """The code of a module with this text, compiled once; it says of itself `what` of ours it is."""
    return compile(source, f"<{what} of thunder_norm>", "exec")
