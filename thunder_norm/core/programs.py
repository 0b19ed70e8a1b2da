"""Functions of torch that are run as programs of other operations where a normed tensor is involved: a call has no rule, its steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_norm.op_names import op_key

_programs: dict[str, Callable] = {}


def written_as(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register what functions of torch do, written in operations that have norm rules; it takes their arguments."""

    def register(program: Callable) -> Callable:
        for fn in functions:
            _programs[op_key(fn)] = program
        return program

    return register


def program_of(key: Any) -> Callable | None:
    """The program registered for an operation's key."""
    return _programs.get(key) if isinstance(key, str) else None
