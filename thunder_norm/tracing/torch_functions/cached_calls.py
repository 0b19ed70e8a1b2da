"""Functions with a cache, `functools.lru_cache`, that return tensors: masks, grids of positions, tables of rotary embeddings.

Thunder calls such a function natively, and a tensor from such a call is none that a prologue could find.  So the function inside is
interpreted, like one without a cache: what it makes of the same arguments is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise, unwrap
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx


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
    return found
