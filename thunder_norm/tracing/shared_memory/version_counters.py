"""Which tensors of one memory autograd counts the changes of together.

A tensor, its views and what `detach` makes of it have one version counter in torch; ``x.data`` has one of its own.  What is written into
``x.data`` is therefore no change to a backward that kept x: it computes with what is in the memory when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from thunder.core.proxies import Proxy

# A tag beside Thunder's own, to which an import of ours adds none.
_OWN = "own version counter"


def give_own(proxy: Proxy) -> None:
    """Let a result of an operation, a view for Thunder, have a version counter of its own."""
    proxy.tags.add(_OWN)


class VersionCounters:
    """The counters of the tensors of a program, each named by the first tensor that has it."""

    def __init__(self) -> None:
        self._same_as: dict[str, str] = {}

    def note_views(self, views: Mapping[str, str], outs: Iterable[Proxy]) -> None:
        """Take in the results of an operation that are views of others, or the others themselves."""
        own = {p.name for p in outs if _OWN in p.tags}
        self._same_as |= {out: base for out, base in views.items() if out not in own}

    def of(self, name: str) -> str:
        """The counter of a tensor."""
        while name in self._same_as:
            name = self._same_as[name]
        return name
