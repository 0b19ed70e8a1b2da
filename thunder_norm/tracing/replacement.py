"""A function of Thunder's and the native one that stands in for it."""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class Replacement:
    """The entry `name` of a module, a class or a table of Thunder's, replaced by `native` for a while.

    `lines` names the upstream lines that `native` does the work of (lightning-thunder 0.2.6).  A builtin that a module calls is
    replaced by a name of the module's, and a table may lack the entry.
    """

    owner: Any
    name: Any
    native: Callable
    lines: str
    original: Any = field(init=False)
    is_builtin: bool = field(init=False)
    is_missing: bool = field(init=False)
    _set: Callable[[Any, Any], None] = field(init=False)

    def __post_init__(self) -> None:
        # once: an abstract class is slow to ask, and some hundred are put in place for each compilation
        is_table = isinstance(self.owner, MutableMapping)
        self._set = self.owner.__setitem__ if is_table else functools.partial(setattr, self.owner)
        self.is_builtin = isinstance(self.owner, ModuleType) and self.name not in vars(self.owner)
        self.is_missing = is_table and self.name not in self.owner
        self.original = None if self.is_missing else getattr(builtins, self.name) if self.is_builtin else self._current()

    def _current(self) -> Any:
        if isinstance(self.owner, MutableMapping):
            return self.owner[self.name]
        return vars(self.owner)[self.name]

    def put(self) -> None:
        """Let the native function stand in."""
        self._set(self.name, self.native)

    def take_back(self) -> None:
        """Let Thunder's own function stand there again."""
        if self.is_builtin:
            delattr(self.owner, self.name)
        elif self.is_missing:
            del self.owner[self.name]
        else:
            self._set(self.name, self.original)


class Replacements:
    """Functions of Thunder's that are replaced together, for as long as somebody uses them."""

    def __init__(self, replacements: Sequence[Replacement]):
        self.all = tuple(replacements)
        self._lock = threading.RLock()
        self._num_users = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use them meanwhile."""
        with self._lock:
            if self._num_users == 0:
                for r in self.all:
                    r.put()  # assignments, none of which fails
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    for r in self.all:
                        r.take_back()
