"""Functions with a cache, `functools.lru_cache`, that return tensors: masks, grids of positions, tables of rotary embeddings.

Thunder calls such a function natively, and a tensor from such a call is none that a prologue could find.  So the function inside is
interpreted, like one without a cache: what it makes of the same arguments is the same, unless the program writes into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of, location_of_user
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, do_raise, unwrap
from thunder.core.jit_ext import JitCtx, get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx

_MADE = "_thunder_norm_made_by_cached"  # of an acquisition: the names, and the operations before each


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is a function with a cache that takes or returns tensors; None for all others."""
    if not isinstance(fn, functools._lru_cache_wrapper):
        return None
    positional, named = [unwrap(a) for a in args], {k: unwrap(v) for k, v in kwargs.items()}
    if not _holds(TensorProxy, (positional, named)):
        try:
            found = fn(
                *positional, **named
            )  # Thunder's own call, which comes next if there are no tensors in it, finds it in the cache
        except Exception:  # noqa: BLE001 - which Thunder's own call meets again, and raises in the program
            return None
        if not _holds(torch.Tensor, found):
            return None
    return functools.partial(_interpreted, fn)


def _holds(kind: type, values: Any) -> bool:
    return any(isinstance(v, kind) for v in tree_leaves(values))


def _interpreted(fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    recorded = get_tracectx().bound_symbols
    before = len(recorded)
    found = _interpret_call(fn.__wrapped__, *args, **kwargs)
    if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return found
    if any(map(draws_numbers, recorded[before:])):
        return do_raise(
            UnsupportedOpError(
                with_details(
                    "a function with a cache (functools.lru_cache) draws random numbers",
                    at=location_of_user(),
                    why="in eager mode it draws them once, in a traced program it would in each call",
                    instead="draw them outside of the traced function, or without the cache",
                )
            )
        )
    _note(found.value)
    return found


def _note(made: Any) -> None:
    """Note what such a function has returned, and which operations come before that: its own, which may write into what they make."""
    names = {p.name for p in tree_leaves(made) if isinstance(p, TensorProxy)}
    known: dict[str, set[int]] = vars(get_jit_ctx()).setdefault(_MADE, {})
    known.update(dict.fromkeys(names, {id(b) for scope in get_jit_ctx().computation_trace.scopes for b in scope}))


def check_unwritten(ctx: JitCtx) -> None:
    """Refuse a program, gone through, that writes into what a function with a cache has returned.

    Raises:
        UnsupportedOpError: it does.
    """
    made = getattr(ctx, _MADE, {})
    for bsym in ctx.computation_trace.bound_symbols if made else ():
        for target in targets(bsym):
            if id(bsym) not in made.get(target.name, {id(bsym)}):
                raise UnsupportedOpError(
                    with_details(
                        "the program writes into what a function with a cache (functools.lru_cache) has returned",
                        at=location_of(bsym),
                        why="in eager mode the cache keeps it, and later calls find there what was written",
                        instead="write into a clone of it, or keep the tensor in a module or a dict",
                    )
                )
        if bsym.flat_proxy_args and (known := made.get(bsym.flat_proxy_args[0].name)) is not None:
            if makes_view(bsym) or targets(bsym):
                made.update(dict.fromkeys((p.name for p in bsym.flat_proxy_outs), known))
