"""Which of its arguments an operation of torch's keeps for its backward as the objects that they are, and not as views or results of its own.

Of an object autograd finds what is in it when the backward runs; of a view, what was in it when it was taken.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.tracing.translation import for_torch
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

_SAVED = "_saved_"


def keeps(bsym: BoundSymbol, names: set[str]) -> bool:
    """Whether torch's operation keeps one of these arguments itself, whichever others are differentiated; yes, where nobody knows."""
    function = _torchs(bsym.sym.id)
    if function is None:
        return True
    given: dict[str, torch.Tensor] = {}

    def example(v: Any) -> Any:
        if isinstance(v, TensorProxy):
            return given.setdefault(v.name, _without_data(v))
        return v.value if isinstance(v, NumberProxy) else for_torch(v)

    try:
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            result = function(*tree_map(example, bsym.args), **tree_map(example, bsym.kwargs))
    except Exception:  # noqa: BLE001 - of tensors without data torch may know nothing
        return True
    asked = [t for name, t in given.items() if name in names]
    return any(t is kept for kept in _kept(tree_leaves(result)) for t in asked)


@functools.lru_cache(maxsize=256)
def _torchs(name: Any) -> Any:
    """The function of torch that a symbol of Thunder's stands for, by its name; None if there is none."""
    if not isinstance(name, str) or not name.startswith("torch."):
        return None
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found if callable(found) else None


def _without_data(p: TensorProxy) -> torch.Tensor:
    dtype = for_torch(p.dtype)
    is_differentiable = dtype.is_floating_point or dtype.is_complex
    return torch.empty(tuple(p.shape), dtype=dtype, device="meta", requires_grad=is_differentiable)


def _kept(results: list[Any]) -> Iterator[torch.Tensor]:
    """What the nodes of torch's graph keep."""
    pending = [t.grad_fn for t in results if isinstance(t, torch.Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [n for n, _ in node.next_functions]
        for name in dir(node):
            if name.startswith(_SAVED):
                yield from (t for t in tree_leaves(getattr(node, name)) if isinstance(t, torch.Tensor))
