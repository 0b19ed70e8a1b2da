"""What a traced program has written into the memory of plain tensors so far: what was computed of them before is another number now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch

from thunder_norm.subclass.acquiring.fakes import Fakes
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF, makes_view
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op


class Writes:
    """The in-place operations of the trace that is being acquired, by the memory that they write into.

    Two tensors have one memory if one is a view of the other, as Thunder made it or as their fakes are, or may be the other itself
    (``x.type_as(y)``), or if the inputs that they are share their storage in the call at hand.
    """

    def __init__(self, fakes: Fakes):
        self._fakes = fakes
        self._parent: dict[Hashable, Hashable] = {}
        self._places: defaultdict[Hashable, list[int]] = defaultdict(list)  # of the operations, in the trace
        self._num_followed = 0

    def into(self, t: torch.Tensor) -> int:
        """How many there were so far into the memory of the tensor that a fake stands for; the number never falls."""
        return len(self._into(t))

    def operations(self, t: torch.Tensor) -> Sequence[BoundSymbol]:
        """Those operations, in their order."""
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        return [bsyms[i] for i in sorted(self._into(t))]

    def _into(self, t: torch.Tensor) -> list[int]:
        self._follow()
        proxy = self._fakes.proxy_of(t)
        return self._places[self._memory_of(proxy) if proxy is not None else self._united(_of_fake(t))]

    def _follow(self) -> None:
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for place, bsym in enumerate(bsyms[self._num_followed :], self._num_followed):
            if not bsym.flat_proxy_args or not isinstance(target := bsym.flat_proxy_args[0], TensorProxy):
                continue
            is_write = bool(_is_inplace_op(bsym))
            if is_write or makes_view(bsym) or bsym.sym.name in RETURNING_SELF:
                results = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
                memory = self._memory_of(target, *results)
                if is_write:
                    self._places[memory].append(place)
        self._num_followed = len(bsyms)

    def _memory_of(self, *proxies: TensorProxy) -> Hashable:
        return self._united(node for proxy in proxies for node in self._nodes(proxy))

    def _nodes(self, proxy: TensorProxy) -> Iterator[Hashable]:
        yield proxy.name
        storage = aliases.storage_of(proxy)
        if storage:
            yield "input", storage
        fake = self._fakes.known(proxy)
        if fake is not None:
            yield from _of_fake(fake)

    def _united(self, nodes: Iterator[Hashable]) -> Hashable:
        """What stands for the memory of which all the nodes are."""
        found = next(nodes, None)
        root = self._root(found)
        for node in nodes:
            other = self._root(node)
            if other != root:
                self._parent[other] = root
                self._places[root] += self._places.pop(other, [])
        return root

    def _root(self, node: Hashable) -> Hashable:
        while node in self._parent:
            node = self._parent[node]
        return node


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor has a storage that can be asked for."""
    return t.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _of_fake(t: torch.Tensor) -> Iterator[Hashable]:
    if has_memory(t):
        yield "fake", t.untyped_storage()._cdata
