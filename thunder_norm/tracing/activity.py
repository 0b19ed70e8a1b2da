"""Which tensors of a trace depend differentiably on inputs that require grad."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder.core import dtypes
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

_composites: set[Any] = set()
_of_first: set[Any] = set()

# What torch has no derivative of, by the ids of Thunder's symbols: results at these places never require grad.
_CONSTANT_PLACES = {
    "torch.linalg.lu": {0},
    "torch.lu_unpack": {0},
}


@functools.cache
def _constant() -> frozenset[str]:
    """The ids of those whose results never require grad: torch says it of each special function, of which others have a derivative in each version."""
    found = {"torch.histc"}
    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        for name in dir(torch.special):
            for args in ((x,), (x, 1)):
                try:
                    value = getattr(torch.special, name)(*args)
                except Exception:  # noqa: BLE001 - it takes other arguments
                    continue
                if isinstance(value, torch.Tensor) and not value.requires_grad:
                    found.add(f"torch.special.{name}")
    return frozenset(found)


def differentiated_inside(symbol_id: Any) -> None:
    """Register a composite whose gradient is that of the operations inside."""
    _composites.add(symbol_id)


def differentiated_in_first(symbol_id: Any) -> None:
    """Register an operation whose gradient is that of its first argument alone."""
    _of_first.add(symbol_id)


def propagate(bsym: BoundSymbol, active: set[str]) -> None:
    """Add to `active` the names of results of `bsym` that depend differentiably on a tensor in it."""
    if has_no_history(bsym):
        return
    for sub in bsym.subsymbols:
        propagate(sub, active)
    if active.isdisjoint([p.name for p in _followed_arguments(bsym)]):
        return
    decided = set() if _has_own_gradient(bsym) else _decided_inside(bsym)
    decided |= _constant_results(bsym)
    for p in bsym.flat_proxy_outs:
        if (
            isinstance(p, TensorProxy)
            and p.name not in decided
            and dtypes.is_inexact_dtype(p.dtype)
            and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in p.tags
        ):
            active.add(p.name)


def depending_on_gradients(bsyms: Sequence[BoundSymbol]) -> set[str]:
    """The names of what has a history in eager mode: inputs that require grad, and what depends differentiably on these."""
    inputs = (p for b in bsyms for p in b.flat_proxy_args if isinstance(p, TensorProxy) and p.history is not None)
    active = {p.name for p in inputs if p.requires_grad and dtypes.is_inexact_dtype(p.dtype)}
    for bsym in bsyms:
        propagate(bsym, active)
    return active


def has_history(p: TensorProxy) -> bool:
    """Whether eager mode would record what is done with a tensor of the trace that is being written."""
    if not torch.is_grad_enabled():
        return False
    is_given = p.history is not None and p.requires_grad
    return is_given or p.name in depending_on_gradients(get_tracectx().bound_symbols)


def depending(trace: TraceCtx, names: set[str]) -> set[str]:
    """The names in a trace of what depends differentiably on these."""
    active = set(names)
    for bsym in trace.bound_symbols:
        propagate(bsym, active)
    return active


def depended_on(trace: TraceCtx, names: set[str]) -> set[str]:
    """The names in a trace of what these depend on, perhaps differentiably: an operation of torch's counts as a whole."""
    found = set(names)
    for bsym in reversed(trace.bound_symbols[:-1]):
        _go_back(bsym, found)
    return found


def end_at_detached(trace: TraceCtx) -> None:
    """Tell Thunder that ``x.detach()`` and ``torch.zeros_like(x)`` are constant.

    Thunder differentiates them as any function: in every backward torch is asked for the gradient of `detach`, and zeros go back to x,
    where they are NaN if that has an infinite slope (``d / (d.square().sum(-1).sqrt().detach() + eps)`` at d = 0).
    """
    waiting = list(trace.bound_symbols)
    while waiting:
        bsym = waiting.pop()
        if has_no_history(bsym):
            for p in bsym.flat_proxy_outs:
                p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        waiting.extend(bsym.subsymbols)


def _go_back(bsym: BoundSymbol, found: set[str]) -> None:
    recorded = (p.name for p in bsym.flat_proxy_outs if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in p.tags)
    if has_no_history(bsym) or found.isdisjoint(recorded):
        return
    if not bsym.subsymbols or _has_own_gradient(bsym) or _is_torchs(bsym):
        found.update(p.name for p in _followed_arguments(bsym))
    for sub in reversed(bsym.subsymbols):
        _go_back(sub, found)


def _followed_arguments(bsym: BoundSymbol) -> Sequence[Proxy]:
    return bsym.flat_proxy_args[:1] if bsym.sym.id in _of_first else bsym.flat_proxy_args


def _decided_inside(bsym: BoundSymbol) -> set[str]:
    """The names of what is differentiable only if an operation that `bsym` consists of says so.

    Where Thunder writes a function of torch's without its arguments (`repeat` of nothing is `zeros`), none does: the result has a
    gradient of zero in torch.
    """
    reached = {p.name for p in bsym.flat_proxy_args}
    made: set[str] = set()
    for sub in bsym.subsymbols:
        names = {p.name for p in sub.flat_proxy_outs}
        made |= names
        if not reached.isdisjoint([p.name for p in sub.flat_proxy_args]):
            reached |= names
    return made & reached if _is_torchs(bsym) else made


def has_no_history(bsym: BoundSymbol) -> bool:
    """Whether what an operation returns depends differentiably on nothing: ``x.detach()``, ``torch.zeros_like(x)``, ``x.new_zeros(3)``."""
    symbol_id = bsym.sym.id
    return _has_none_by_name(bsym.sym.name, symbol_id if type(symbol_id) is str else "")


@functools.lru_cache(maxsize=8192)
def _has_none_by_name(name: str, symbol_id: str) -> bool:
    makes_new = name.endswith("_like") or name.startswith("new_")
    return (
        name in ("detach", "Tensor_detach")
        or (makes_new and symbol_id.startswith(("torch.", "Tensor.")))
        or symbol_id in _constant()
    )


def _constant_results(bsym: BoundSymbol) -> set[str]:
    """The names of those among the results of an operation that torch has no derivative of."""
    places = _CONSTANT_PLACES.get(bsym.sym.id) if isinstance(bsym.sym.id, str) else None
    return {bsym.output[k].name for k in places} if places else set()


def _is_torchs(bsym: BoundSymbol) -> bool:
    return not isinstance(bsym.sym.id, tuple) and str(bsym.sym.id).startswith("torch.")


def _has_own_gradient(bsym: BoundSymbol) -> bool:
    """Whether a rule may differentiate the operation as a whole, whatever it consists of."""
    if bsym.sym.id in _composites:
        return False
    return bsym.sym.executor is not None or not (isinstance(bsym.sym.id, tuple) or _is_torchs(bsym))
