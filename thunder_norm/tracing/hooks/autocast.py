"""``thunder.transforms.autocast``: where a trace leaves autocast out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder_norm.tracing.torch_functions import autocast as precision
from thunder.core.symbol import Symbol
from thunder.transforms import autocast

_original_rule = autocast.maybe_apply_autocast
_original_disable = autocast.disable_autocast
_original_is_enabled = autocast.is_autocast_enabled
_of_thread = threading.local()


@contextlib.contextmanager
def disable_autocast() -> Iterator[None]:
    """Have symbols called by this thread ignore the autocast that is on where they are called.

    Thunder's has one flag for the process: of two threads that trace at once, the one that leaves last would restore what the other had
    switched off, and no program would know of autocast any more.
    """
    before = getattr(_of_thread, "is_off", False)
    _of_thread.is_off = True
    try:
        yield
    finally:
        _of_thread.is_off = before


@replaces(autocast, "disable_autocast", lines="maybe_apply_autocast: with disable_autocast()")
def _disable_autocast() -> AbstractContextManager[None]:
    """While the rule of a symbol converts its arguments."""
    return disable_autocast() if has_part() else _original_disable()


@replaces(autocast, "is_autocast_enabled", lines="maybe_apply_autocast: and is_autocast_enabled()")
def _is_autocast_enabled() -> bool:
    """Whether symbols look at autocast, in this thread."""
    return _original_is_enabled() and not getattr(_of_thread, "is_off", False)


@replaces(autocast, "maybe_apply_autocast", "sym", lines="Symbol.__call__: maybe_apply_autocast(self)")
def _rule(sym: Symbol) -> Callable | None:
    """What is called in place of a symbol where autocast is on: Thunder knows products, convolutions and attention alone."""
    own = precision.rule_for(sym) if has_part() and _is_autocast_enabled() and precision.is_on_somewhere() else None
    if own is None:
        return _original_rule(sym)

    def called(*args: Any, **kwargs: Any) -> Any:
        dtype = precision.dtype_for((args, kwargs))
        with disable_autocast():
            return sym(*args, **kwargs) if dtype is None else own(dtype, args, kwargs)

    return called
