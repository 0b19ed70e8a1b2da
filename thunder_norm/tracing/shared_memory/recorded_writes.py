"""What autograd knows of tensors after a write into their memory: views of one tensor have one history."""

from __future__ import annotations

from collections.abc import Set

from thunder_norm.tracing import activity
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op


class Histories:
    """Which tensors have one history, as autograd sees the operations of a trace one after the other: views of one tensor, and the tensor."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def after(self, bsym: BoundSymbol, active: Set[str]) -> Set[str]:
        """The names of what has a history since an operation wrote something into its memory that is among `active`."""
        is_write = _is_inplace_op(bsym)
        if not (is_write or makes_view(bsym)) or activity.has_no_history(bsym) or not bsym.flat_proxy_args:
            return set()
        given, made = bsym.flat_proxy_args[0].name, {p.name for p in bsym.flat_proxy_outs}
        root = self._roots.get(given, given)
        self._roots.update(dict.fromkeys(made, root))
        if not is_write or active.isdisjoint(made):
            return set()
        return {root, *(name for name, of in self._roots.items() if of == root)}
