"""A function of Thunder's and the native one that stands in for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Replacement:
    """The entry `name` of a module, a class or a table of Thunder's, replaced by `native` for a while.

    `lines` names the upstream lines that `native` does the work of (lightning-thunder 0.2.6).
    """

    owner: Any
    name: Any
    native: Callable
    lines: str
    original: Any = field(init=False)

    def __post_init__(self) -> None:
        self.original = self._current()

    def _current(self) -> Any:
        return self.owner[self.name] if isinstance(self.owner, MutableMapping) else vars(self.owner)[self.name]

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, MutableMapping):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def put(self) -> None:
        """Let the native function stand in."""
        self._set(self.native)

    def take_back(self) -> None:
        """Let Thunder's own function stand there again."""
        self._set(self.original)


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
