"""Rules by name: what a report says of one in another process, where it may not be registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thunder_norm.core import registry


@dataclass(frozen=True)
class RuleName:
    """Where a rule is defined, its docstring, and which it is of those that one function has made there, in the order of registration."""

    module: str
    name: str
    line: int
    doc: str | None
    number: int = 0

    @staticmethod
    def of(rule: Callable | None) -> RuleName | None:
        """That of a rule, if there is one."""
        if rule is None or isinstance(rule, UnknownRule):
            return None if rule is None else rule.is_called
        name = RuleName(*_written_as(rule))
        alike = name._alike()
        return replace(name, number=alike.index(rule)) if rule in alike else name

    def find(self) -> Callable:
        """The rule that is registered under this name, or what stands for it where there is none."""
        alike = self._alike()
        return alike[self.number] if self.number < len(alike) else UnknownRule(self)

    def _alike(self) -> list[Callable]:
        """The registered rules that are written in one place, and differ by what the function around them was given."""
        place = (self.module, self.name, self.line, self.doc)
        rules = (rule.fn for op in registry.registered_ops().values() for rule in op.rules)
        return list(dict.fromkeys(fn for fn in rules if fn.__name__ == self.name and _written_as(fn) == place))


def _written_as(rule: Callable) -> tuple[str, str, int, str | None]:
    line = getattr(getattr(rule, "__code__", None), "co_firstlineno", 0)
    return rule.__module__, rule.__name__, line, rule.__doc__


class UnknownRule:
    """Stands for a rule that is not registered in this process."""

    def __init__(self, is_called: RuleName):
        self.is_called = is_called
        self.__module__ = is_called.module
        self.__name__ = is_called.name
        self.__doc__ = is_called.doc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """There is nothing to call."""
        raise NotImplementedError(f"the rule {self.__module__}.{self.__name__} is not registered in this process")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownRule) and other.is_called == self.is_called

    def __hash__(self) -> int:
        return hash(self.is_called)
