"""What the prologue checks of what a program has looked at, written as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.guarding.surroundings import Surroundings
from thunder_norm.tracing.guarding.unchanged import FEWEST, UNCHANGED, Decided, Unchanged, are_attributes_counted, is_of_instance
from thunder_norm.tracing.guarding.ways import Path, Ways
from thunder_norm.tracing.guarding.written_code import code_of
from thunder_norm.tracing.provenances import key_itself


class GuardError(Exception):
    """What the program runs with is other than what its trace was acquired with: another trace is needed."""


_NOT_AS_IT_WAS = "not what it was when the trace was acquired"

# What is checked, of a value, what was noted of it, and an attribute or key.
_CONDITIONS = {
    "is": "{value} is {expected}",
    "itself": "{value} is {expected}",  # what is no code, and may be in a cell
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
    constants: dict[str, Any] = {"fn": ways.roots["fn"], "modules": ways.roots["modules"], "_GuardError": GuardError}
    checked, of_modules, read = (_Lines(ways, constants) for _ in range(3))
    decided = Decided(ways)
    taken = [decided.takes(path, kind, expected) for path, kind, _, expected in conditions]
    if len(decided.modules) < FEWEST or not are_attributes_counted():
        taken, decided = [False] * len(conditions), Decided(ways)
    for condition, is_taken in zip(conditions, taken, strict=True):
        (of_modules if is_taken else checked).refuse_unless(*condition)
    for path, other, is_one in meetings:
        checked.refuse_if(f"{checked.place(path)} {'is not' if is_one else 'is'} {checked.place(other)}", _described(path))
    for (cls, key), expected in decided.of_classes.items():
        found = _attribute(checked.constant(cls), key)
        checked.refuse_if(f"{found} is not {checked.constant(expected)}", f"{cls.__qualname__}.{key} is {_NOT_AS_IT_WAS}")
    for condition, what in surroundings.conditions(constants):
        checked.refuse_if(f"not ({condition})", f"{what} {_NOT_AS_IT_WAS}")
    if decided.modules:
        holders = ", ".join("(" + "".join(f"{read.place(p)}, " for p in paths) + ")" for paths in decided.holders())
        read.lines.append(f"return {holders}")
        checked.lines.append("_unchanged()")
    if not checked.lines:
        return None
    source = checked.source("check(args, kwargs)")
    if decided.modules:
        source += of_modules.source("of_modules()") + read.source("read()")
    exec(code_of(source, "guards"), constants)  # noqa: S102 - of names and literals alone
    check = constants["check"]
    if decided.modules:
        unchanged = constants["_unchanged"] = Unchanged(constants["read"], constants["of_modules"])
        setattr(check, UNCHANGED, unchanged)
    return check


class _Lines:
    """The lines of a function that reads what is at the end of ways, and refuses a call."""

    def __init__(self, ways: Ways, constants: dict[str, Any]):
        self.lines: list[str] = []
        self._ways, self._constants = ways, constants
        self._names: dict[Path, str] = {}

    def source(self, signature: str) -> str:
        return f"def {signature}:\n" + "".join(f"    {line}\n" for line in self.lines)

    def constant(self, value: Any, kind: str = "c") -> str:
        name = f"{kind}{len(self._constants)}"
        self._constants[name] = value
        return name

    def refuse_if(self, condition: str, what: str) -> None:
        self.lines.append(f"if {condition}: raise _GuardError({what!r})")

    def refuse_unless(self, path: Path, kind: str, detail: Any, expected: Any) -> None:
        value = self.place(path)
        if kind == "not own":
            value = self._entries(path, value)
        condition = _CONDITIONS[kind].format(value=value, expected=self.constant(expected), detail=detail)
        self.refuse_if(f"not ({condition})", _described(path))

    def place(self, path: Path) -> str:
        """The variable that has what is at the end of a way."""
        if len(path) == 1:
            return path[0][0]
        if path not in self._names:
            before, (step, key) = self.place(path[:-1]), path[-1]
            if step == "attribute" and is_of_instance(self._ways.end(path[:-1]), key):
                before, step = self._entries(path[:-1], before), "item"
            name = self._named(path)
            if step == "item":
                reader, key = stored.reader(type(self._ways.end(path[:-1]))), self._written(key)
                self.lines.append(f"{name} = {reader}({before}, {key})" if reader else f"{name} = {before}[{key}]")
            else:
                self.lines.append(f"{name} = {_attribute(before, key)}")
        return self._names[path]

    def _named(self, path: Path) -> str:
        name = self._names[path] = f"v{len(self._names)}"
        return name

    def _written(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int, bool, type(None)) else self.constant(key_itself(key), "k")

    def _entries(self, path: Path, owner: str) -> str:
        of_owner = (*path, ("attribute", "__dict__"))
        if of_owner not in self._names:
            self.lines.append(f"{self._named(of_owner)} = {owner}.__dict__")
        return self._names[of_owner]


def _attribute(value: str, key: str) -> str:
    return f"{value}.{key}" if key.isidentifier() and not key.startswith("__") else f"getattr({value}, {key!r})"


def _described(path: Path) -> str:
    parts = [f"[{key!r}]" if step == "item" else f".{key}" for step, key in path[1:]]
    return f"{path[0][0]}{''.join(parts)} is {_NOT_AS_IT_WAS}"
