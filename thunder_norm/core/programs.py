"""Functions of torch that are run as programs of other operations where a normed tensor is involved: a call has no rule, its steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_norm.op_names import op_key

_Condition = Callable[[tuple, dict], bool]

_programs: dict[Any, tuple[Callable, _Condition | None]] = {}


def written_as(*functions: Callable, when: _Condition | None = None) -> Callable[[Callable], Callable]:
    """Register what functions of torch do, written in operations that have norm rules; it takes their arguments.

    Args:
        functions: the functions.
        when: a condition on the arguments, by position and by name: calls that fulfil it have no rule, others have rules of their own.
    """

    def register(program: Callable) -> Callable:
        for fn in functions:
            _programs[op_key(fn)] = (program, when)
        return program

    return register


def program_of(key: Any, args: tuple, kwargs: dict) -> Callable | None:
    """The program registered for calls of an operation, by its key, with these arguments."""
    program, when = _programs.get(key, (None, None))
    return program if when is None or when(args, kwargs) else None


_computed: dict[Any, Callable] = {}


def computed_as(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register what functions of torch compute, in others, where tensors have no values: torch looks at some before it computes.

    Their norms are those of their rules.
    """

    def register(program: Callable) -> Callable:
        _computed.update(dict.fromkeys(map(op_key, functions), program))
        return program

    return register


def without_values(func: Callable) -> Callable | None:
    """What computes the same as `func` without a look at values; None where `func` does."""
    return _computed.get(op_key(func)) if _computed else None
