"""Results that lie in one memory, entry by entry, and are several objects in eager mode: ``y, y.detach()``, ``x.detach()`` of an input.

A computation has nothing to do for the second one, and returns the first.  What is done to an object outside of the program
(``requires_grad_()``, ``resize_()``, an attribute) must not be seen at another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thunder_norm.tracing.guarding.bindable import bindable
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Objects:
    """Which object each tensor is that a computation is given or returns, as far as is asked."""

    def __init__(self, computation: TraceCtx, given: Iterator[tuple[TensorProxy, torch.Tensor]]):
        self._sources = dict(_copies(computation.bound_symbols))
        self._seen: dict[str, set[int]] = {}
        for p, fake in given:
            self._seen.setdefault(self._source(p.name), set()).add(id(fake))

    def is_another(self, p: TensorProxy, fake: torch.Tensor | None) -> bool:
        """Whether a result is another object than those so far, of which the computation returns one."""
        if fake is None:
            return False
        seen = self._seen.setdefault(self._source(p.name), set())
        is_known = not seen or id(fake) in seen
        seen.add(id(fake))
        return not is_known

    def _source(self, name: str) -> str:
        while name in self._sources:
            name = self._sources[name]
        return name


def _copies(bsyms: list[BoundSymbol]) -> Iterator[tuple[str, str]]:
    """The names of tensors that are others without an operation, and those of the others."""
    for bsym in bsyms:
        if bsym.sym.id == prims.PrimIDs.SHALLOW_COPY and bsym.output.name != bsym.args[0].name:
            yield bsym.output.name, bsym.args[0].name
        yield from _copies(bsym.subsymbols)


def another(p: TensorProxy, fake: torch.Tensor, other: TensorProxy) -> BoundSymbol:
    """``t5 = another_object(t4)``, a view where it is one in eager mode; the trace of which `other` is has to be open."""
    is_view = fake._is_view()

    def make(t: torch.Tensor) -> torch.Tensor:
        if t.requires_grad:  # with a history it is an object of its own
            return t
        return t.view_as(t) if is_view else t.detach()

    return bindable("another_object", make)(p, output=other)
