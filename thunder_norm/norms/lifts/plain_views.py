"""Views that a traced program makes of plain tensors: of which tensor, and where its entries lie.

    index.view(-1, 1).expand_as(source)

Thunder's proxies of such views have no memory of their own or of others: two of one tensor are two tensors to whom looks at their fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.tracing.shared_memory.writes import targets
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

# what makes a view from a shape
_BY_SHAPE: dict[str, Callable] = {
    "view": torch.Tensor.view,
    "reshape": torch.Tensor.view,
    "unsqueeze": torch.Tensor.view,
    "squeeze": torch.Tensor.view,
    "getitem": torch.Tensor.view,  # that only puts dimensions in
    "expand": torch.Tensor.expand,
    "expand_as": torch.Tensor.expand,
}


def place_of(proxy: TensorProxy) -> tuple[Hashable, torch.Tensor] | None:
    """Which tensor it is that a tensor of integers is, or is a view of, and on the meta device what that view is; None if it may have been written."""
    bound_symbols = get_tracectx().bound_symbols
    if any(map(_writes_integers, bound_symbols)):
        return None
    makers = {p.name: b for b in bound_symbols for p in b.flat_proxy_outs}
    made = []
    while (maker := makers.get(proxy.name)) is not None and (function := _BY_SHAPE.get(_name(maker))) is not None:
        base = maker.args[0] if maker.args else None
        if not isinstance(base, TensorProxy) or base.name == proxy.name:
            return None
        if _name(maker) == "getitem" and not _only_puts_in(maker.args[1]):
            break
        made.append((function, tuple(map(int, proxy.shape))))
        proxy = base
    with _disable_current_modes():
        view = torch.empty(tuple(map(int, proxy.shape)), device="meta")
        try:
            for function, shape in reversed(made):
                view = function(view, shape)
        except RuntimeError:  # of a tensor that lies in memory in another way
            return None
    return _identity(proxy, makers), view


def _identity(proxy: TensorProxy, makers: Mapping[str, BoundSymbol]) -> Hashable:
    """The name of a tensor; of a part that an index of numbers names (``edges[1]``, each time anew) the whole's, and the index."""
    maker = makers.get(proxy.name)
    if maker is None or _name(maker) != "getitem" or len(maker.args) != 2 or not isinstance(base := maker.args[0], TensorProxy):
        return proxy.name
    items = maker.args[1] if isinstance(maker.args[1], tuple | list) else (maker.args[1],)
    numbers = [i for item in items for i in ((item.start, item.stop, item.step) if isinstance(item, slice) else (item,))]
    if base.name == proxy.name or any(type(i) is not int and i is not None and i is not Ellipsis for i in numbers):
        return proxy.name
    return _identity(base, makers), repr(items)


def _name(bsym: BoundSymbol) -> str:
    """``expand_as``, also of a plain tensor beside a normed one, whose operation is the latter's."""
    return bsym.sym.name.rpartition(".")[2]


def _only_puts_in(items: Any) -> bool:
    items = items if isinstance(items, tuple | list) else (items,)
    return all(i is None or i is Ellipsis or isinstance(i, slice) and i == slice(None) for i in items)


def _writes_integers(bsym: BoundSymbol) -> bool:
    """Whether it writes into a tensor of integers, or something in it does; the target of a normed tensor's operation is normed."""
    if any(map(_writes_integers, bsym.subsymbols)):
        return True
    return "." not in bsym.sym.name and any(not dtypes.is_inexact_dtype(t.dtype) for t in targets(bsym))
