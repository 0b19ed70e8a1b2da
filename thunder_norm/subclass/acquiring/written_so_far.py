"""What the operations of a trace that grows write into, and which make views: each is looked at once."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_norm.tracing.shared_memory.views import RECORDED, makes_view
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op


class WrittenSoFar:
    """Of the operations of one trace.

    Attributes:
        anything: whether one of them writes into a tensor.
        integers: whether one writes into a tensor without floating-point numbers.
        viewed: the names of what such an operation, or one of Thunder's that makes a view, takes or gives.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seen = 0
        self._ends: tuple[BoundSymbol, ...] = ()  # the first and the last of those that were looked at
        self.anything = self.integers = False
        self.viewed: set[str] = set()

    def by(self, bsyms: Sequence[BoundSymbol]) -> WrittenSoFar:
        """Itself, for these: those that it knows and more, or others."""
        seen = self._seen
        if seen > len(bsyms) or (seen and (self._ends[0] is not bsyms[0] or self._ends[1] is not bsyms[seen - 1])):
            self._forget()
        for bsym in bsyms[self._seen :]:
            writes = _is_inplace_op(bsym)
            if writes:
                self.anything = True
                tensors = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
                self.integers = self.integers or not all(dtypes.is_inexact_dtype(p.dtype) for p in tensors)
            # what is recorded on fakes is seen by these
            if writes or (makes_view(bsym) and not bsym.sym.name.startswith(RECORDED)):
                self.viewed.update(p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
        self._seen = len(bsyms)
        self._ends = (bsyms[0], bsyms[-1]) if bsyms else ()
        return self
