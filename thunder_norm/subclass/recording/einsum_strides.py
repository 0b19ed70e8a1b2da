"""Views of what `einsum` makes: Thunder takes it apart on its own, and the result has the strides of other dimensions than torch's has.

So ``torch.einsum(...).view(...)``, which torch has, raises when Thunder's trace runs.  There a reshape computes the same.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_MADE = "_thunder_norm_made_of_einsum"  # of a trace


class _Made:
    """The tensors of a trace that are made from a result of `einsum`, as far as it was looked at: each operation once."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.last: BoundSymbol | None = None
        self.num_seen = 0

    def go_on(self, bsyms: list[BoundSymbol]) -> None:
        """Look at the operations that are new, at all of them if others went."""
        if self.num_seen > len(bsyms) or self.num_seen and bsyms[self.num_seen - 1] is not self.last:
            self.__init__()
        for bsym in bsyms[self.num_seen :]:
            is_einsum = bsym.sym is ltorch.einsum or any(inner.sym is ltorch.einsum for inner in bsym.subsymbols)
            if is_einsum or any(p.name in self.names for p in bsym.flat_proxy_args):
                self.names.update(p.name for p in bsym.flat_proxy_outs)
        self.num_seen, self.last = len(bsyms), bsyms[-1] if bsyms else None


def is_made_of_einsum(proxy: Any) -> bool:
    """Whether a result of `einsum` is among what a tensor was made from, and its strides perhaps that one's."""
    if not isinstance(proxy, TensorProxy):
        return False
    trace = get_jit_ctx().computation_trace
    made = vars(trace).setdefault(_MADE, _Made())
    made.go_on(trace.bound_symbols)
    return proxy.name in made.names
