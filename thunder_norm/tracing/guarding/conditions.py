"""What the prologue checks of what a program has looked at, written as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.guarding.surroundings import Surroundings
from thunder_norm.tracing.guarding.ways import Path, Ways
from thunder_norm.tracing.guarding.written_code import code_of


class GuardError(Exception):
    """What the program runs with is other than what its trace was acquired with: another trace is needed."""


_NOT_AS_IT_WAS = "not what it was when the trace was acquired"

# What is checked, of a value, what was noted of it, and an attribute or key.
_CONDITIONS = {
    "is": "{value} is {expected}",
    "is none": "({value} is None) is {expected}",
    "type": "type({value}) is {expected}",
    "instance": "isinstance({value}, {expected}[0]) is {expected}[1]",
    "written": "repr({value}) == {expected}",
    "same": "{expected}({value})",
    "names": "dir({value}) == {expected}",
    "length": "type({value}) is {expected}[0] and len({value}) == {expected}[1]",
    "keys": "type({value}) is {expected}[0] and tuple({value}) == {expected}[1]",
    "no keys": "type({value}) is {expected} and not {value}",
    "contains": "({detail!r} in {value}) is {expected}",
    "stored": "{expected}({value})",
    "stored key": "dict.__contains__({value}, {detail!r}) is {expected}",
    "own attribute": "{expected}(object.__getattribute__({value}, {detail!r}))",
    "own state": "{expected}(vars({value}))",
    "not own": "{detail!r} not in {value}",  # of its ``__dict__``
    "has": "hasattr({value}, {detail!r}) is {expected}",
}


@functools.cache
def _code(kind: str, detail: Any) -> CodeType:
    return compile(_CONDITIONS[kind].format(value="value", expected="expected", detail=detail), "<condition>", "eval")


def holds(value: Any, kind: str, detail: Any, expected: Any) -> bool:
    """Whether a condition holds of a value."""
    value = value.__dict__ if kind == "not own" else value
    return eval(_code(kind, detail), {"value": value, "expected": expected})  # noqa: S307 - of names and literals alone


def compiled(
    ways: Ways,
    conditions: Sequence[tuple[Path, str, Any, Any]],
    meetings: Sequence[tuple[Path, Path, bool]],
    surroundings: Surroundings,
) -> Callable[[tuple, dict], None] | None:
    """A function that raises a GuardError if something is not as it was; None if there is nothing to check.

    Args:
        ways: from the arguments and the jitted function.
        conditions: way, kind, detail and what was noted of what it leads to.
        meetings: pairs of ways, and whether they lead to one object.
        surroundings: what else the program has met.
    """
    names: dict[Path, str] = {}
    constants: dict[str, Any] = {"fn": ways.roots["fn"], "_GuardError": GuardError}
    lines: list[str] = []

    def place(path: Path) -> str:
        if len(path) == 1:
            return path[0][0]
        if path not in names:
            before, (step, key) = place(path[:-1]), path[-1]
            if step == "attribute" and _is_of_instance(ways.end(path[:-1]), key):
                before, step = entries(path[:-1], before), "item"
            names[path] = name = f"v{len(names)}"
            if step == "item":
                reader = stored.reader(type(ways.end(path[:-1])))
                lines.append(f"{name} = {reader}({before}, {written(key)})" if reader else f"{name} = {before}[{written(key)}]")
            else:
                lines.append(f"{name} = {_attribute(before, key)}")
        return names[path]

    def written(key: Any) -> str:
        if type(key) in (str, int, bool, type(None)):
            return repr(key)
        constant = f"k{len(constants)}"
        constants[constant] = key
        return constant

    def entries(path: Path, owner: str) -> str:
        of_owner = (*path, ("attribute", "__dict__"))
        if of_owner not in names:
            names[of_owner] = f"v{len(names)}"
            lines.append(f"{names[of_owner]} = {owner}.__dict__")
        return names[of_owner]

    for path, kind, detail, expected in conditions:
        value, constant = place(path), f"c{len(constants)}"
        if kind == "not own":
            value = entries(path, value)
        constants[constant] = expected
        condition = _CONDITIONS[kind].format(value=value, expected=constant, detail=detail)
        lines.append(f"if not ({condition}): raise _GuardError({_described(path)!r})")
    for path, other, is_one in meetings:
        condition = f"{place(path)} {'is not' if is_one else 'is'} {place(other)}"
        lines.append(f"if {condition}: raise _GuardError({_described(path)!r})")
    for condition, what in surroundings.conditions(constants):
        lines.append(f"if not ({condition}): raise _GuardError({f'{what} {_NOT_AS_IT_WAS}'!r})")
    if not lines:
        return None
    source = "def check(args, kwargs):\n" + "".join(f"    {line}\n" for line in lines)
    exec(code_of(source, "guards"), constants)  # noqa: S102 - of names and literals alone
    return constants["check"]


def _is_of_instance(owner: Any, key: str) -> bool:
    """Whether an attribute of a module stands in its ``__dict__`` and nowhere else: reading it there is three times as fast."""
    cls = type(owner)
    return (
        isinstance(owner, torch.nn.Module)
        and cls.__getattribute__ is object.__getattribute__
        and key in vars(owner)
        and not hasattr(cls, key)
    )


def _attribute(value: str, key: str) -> str:
    return f"{value}.{key}" if key.isidentifier() and not key.startswith("__") else f"getattr({value}, {key!r})"


def _described(path: Path) -> str:
    parts = [f"[{key!r}]" if step == "item" else f".{key}" for step, key in path[1:]]
    return f"{path[0][0]}{''.join(parts)} is {_NOT_AS_IT_WAS}"
