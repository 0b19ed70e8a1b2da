"""Results that nobody differentiates have no gradient for torch's formulas, where Thunder gives them zeros.

``torch.linalg.eigh(x).eigenvalues.sum()`` has a gradient at the identity: the formula for eigenvectors, which divides by differences of
eigenvalues, is not run.  With zeros for them it is, and 0 / 0 is NaN.  That of ``svd(x).S`` with all singular vectors is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import thunder.torch as ltorch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.extend import OperatorExecutor

# Never in an executor list: only what is written here carries it.
_executor = OperatorExecutor("thunder_norm_gradients", version="1")


def gradients_by_torch(
    run: Callable,
    arguments: tuple[tuple, dict],
    cotangents: Sequence[torch.Tensor | None],
    without_history: Sequence[torch.Tensor] = (),
    moving: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Vector-Jacobian products of `run` by torch's autograd, one for each differentiable tensor in `arguments`, in order.

    Args:
        run: what returns tensors, in a tuple.
        arguments: what it is called with.
        cotangents: for each of its results that is floating or complex, None where it has none.
        without_history: arguments that torch has no derivative for; theirs are zeros.
        moving: for each differentiable tensor in `arguments`, whether its gradient is asked for; others are zeros. None for all.
    """
    inputs: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())):
            return value
        is_asked_for = moving is None or moving[len(inputs)]
        inputs.append(value.detach().requires_grad_(is_asked_for and all(value is not t for t in without_history)))
        return inputs[-1]

    args, kwargs = tree_map(leaf, arguments)
    with torch.enable_grad():
        results = [t for t in run(*args, **kwargs) if t.is_floating_point() or t.is_complex()]
    pairs = [(t, g) for t, g in zip(results, cotangents, strict=True) if t.requires_grad and g is not None]
    leaves = [t for t in inputs if t.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(t) for t in inputs)
    gradients = torch.autograd.grad([t for t, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    found = dict(zip(map(id, leaves), gradients, strict=True))
    return tuple(torch.zeros_like(t) if (g := found.get(id(t))) is None else g for t in inputs)


@functools.cache
def _of_some(function: Callable) -> Symbol:
    """As Thunder's symbol for torch's formula of a function, for cotangents of which some are None."""

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [t for t in tree_flatten(function(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]

    def vjp(saved: tuple[tuple, dict], *cotangents: torch.Tensor | None) -> Any:
        args, kwargs = saved
        leaves, spec = tree_flatten(args)
        found = iter(gradients_by_torch(run, (args, kwargs), cotangents))
        is_floating = (isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in leaves)
        return tree_unflatten([next(found) if f else None for f in is_floating], spec)

    return _executor.register_operator(f"{function.__name__}_vjp_of_some", meta=vjp, fn=vjp)


def leave_undefined(trace: TraceCtx) -> TraceCtx:
    """A program with its derivatives in which torch's formulas are told which results have no gradient."""
    zeros = {b.output.name for b in trace.bound_symbols if b.sym is ltorch.zeros and isinstance(b.output, Proxy)}
    if not zeros:
        return trace
    new = from_trace(trace)
    new.bound_symbols = [_with_undefined(b, zeros) for b in trace.bound_symbols]
    return new


def _with_undefined(bsym: BoundSymbol, zeros: set[str]) -> BoundSymbol:
    called = (bsym._call_ctx or {}).get(bsym.sym.name)
    if isinstance(called, functools.partial) and called.func is ltorch._vjp_impl:
        saved, *cotangents = bsym.args
        given = _none_for(cotangents, zeros)
        is_changed = any(g is None for g in given)
        return _of_some(called.args[0]).bind(saved, *given, output=bsym.output) if is_changed else bsym
    if getattr(called, "takes_undefined", False):
        arguments, cotangents, *moving = bsym.args
        return bsym.from_bsym(args=(arguments, tuple(_none_for(cotangents, zeros)), *moving))
    return bsym


def _none_for(cotangents: Sequence[Any], zeros: set[str]) -> list[Any]:
    return [None if isinstance(g, Proxy) and g.name in zeros else g for g in cotangents]
