"""Which tensors of a trace may share memory, by their names."""

from __future__ import annotations

from collections.abc import Iterable


class Memory:
    """Groups of names, each with one that stands for it."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def root(self, name: str) -> str:
        """The name that stands for all that may share memory with this one."""
        while name in self._above:
            name = self._above[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        """These may share memory; the first one's group goes on standing for all."""
        roots = list(dict.fromkeys(map(self.root, names)))
        for other in roots[1:]:
            self._above[other] = roots[0]
