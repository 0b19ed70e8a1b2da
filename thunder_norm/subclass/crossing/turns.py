"""What a program returns waits for its operations with effects, see `effects`, and for random numbers that nobody uses.

Else Thunder would run those in the backward of a program that it differentiates, whose forward is what the results need, or leave them
out: what is drawn after them would be other numbers than in eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fallback import fallback_executor
from thunder_norm.subclass.crossing.boundary_passes import of_constants
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import register_grad


def _run(result: torch.Tensor, *awaited: torch.Tensor) -> torch.Tensor:
    return result


def _meta(result: TensorProxy, *awaited: TensorProxy) -> TensorProxy:
    return TensorProxy(like=result)


@functools.cache
def _after_effects() -> Symbol:
    symbol = fallback_executor.register_operator("after_effects", meta=_meta, fn=_run, tags=(prims.OpTags.DONT_DCE,))

    def grad(result: TensorProxy, *awaited: TensorProxy) -> TensorProxy:
        out = symbol(result, *awaited)
        if dtypes.is_inexact_dtype(result.dtype):
            prims.put_grad(result, prims.get_grad(out))
        return out

    register_grad(symbol.id, grad)  # here, as an import of ours changes nothing of Thunder
    return symbol


def after(result: TensorProxy, *awaited: TensorProxy) -> TensorProxy:
    """`result`, once others are computed."""
    return _after_effects()(result, *awaited)


def _unused_draws(trace: TraceCtx) -> list[tuple[BoundSymbol, list[TensorProxy]]]:
    """The operations that draw numbers which neither results nor writes of a computation depend on, and what they draw."""
    *body, returned = trace.bound_symbols
    needed = {p.name for p in tree_flatten(returned.args)[0] if isinstance(p, TensorProxy)}
    found = []
    for bsym in reversed(body):
        used = [p.name in needed for p in bsym.flat_proxy_outs]
        drawn = [] if all(used) or not draws_numbers(bsym) else _drawn_for_nobody(bsym, needed)
        if drawn:
            found.append((bsym, drawn))
            needed.update(p.name for p in drawn)
        if drawn or any(used) or has_any_tag(bsym, {prims.OpTags.DONT_DCE}):
            needed.update(_computed_with(bsym))
    return found[::-1]


def _drawn_for_nobody(bsym: BoundSymbol, needed: Set[str]) -> list[TensorProxy]:
    """Results of an operation that nobody needs and that draw numbers: of a region, which gives out what is in it, by its parts."""
    outs = {p.name: p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
    inside, by_parts = {name for name in outs if name in needed}, []
    for part in reversed(bsym.subsymbols):
        if draws_numbers(part):
            drawn = _drawn_for_nobody(part, inside)
            by_parts += [p for p in drawn if p.name in outs]
            inside |= {p.name for p in drawn}
        if any(p.name in inside for p in part.flat_proxy_outs):
            inside.update(_computed_with(part))
    return by_parts[::-1] or ([] if any(name in needed for name in outs) else list(outs.values())[:1])


def _computed_with(bsym: BoundSymbol) -> Iterator[str]:
    """The tensors whose values an operation takes: ``torch.zeros_like(x)`` is made of numbers alone when it runs."""
    if not bsym.subsymbols:
        yield from (p.name for p in bsym.flat_proxy_args)
    for part in bsym.subsymbols:
        yield from _computed_with(part)


def awaited(acquisition: Acquisition, trace: TraceCtx) -> TraceCtx:
    """A lowered computation, one result of which waits for the last operation with effects and for what draws numbers for nobody."""
    if acquisition.turn is None:
        return with_all_draws(trace)
    return with_all_draws(trace, acquisition.fakes.current(acquisition.fakes.proxy_of(acquisition.turn)))


def with_all_draws(trace: TraceCtx, *others: TensorProxy) -> TraceCtx:
    """A computation, one result of which waits for what draws numbers for nobody, and for others."""
    turns = [*(p for _, drawn in _unused_draws(trace) for p in drawn), *others]
    if not turns:
        return trace
    given = {p.name for p in trace.args}
    results = trace.bound_symbols[-1].args[0]["output"]
    found = next((p for p in results if isinstance(p, TensorProxy) and p.name not in given), None)
    if found is None:
        trace = of_constants(trace, trace.args)  # no result has a gradient: it is not split, and runs as a whole
    *body, returned = trace.bound_symbols
    new = from_trace(trace)
    with tracectx(new):
        new.bound_symbols = list(body)
        new.push_scope(waiting := [])
        later = after(*turns) if found is None else after(found, *turns)
        new.pop_scope()
    values = returned.args[0]
    output: Any = type(values["output"])(later if p is found else p for p in values["output"])
    new.bound_symbols = [*body, *waiting, returned.from_bsym(args=({**values, "output": output},))]
    return new
