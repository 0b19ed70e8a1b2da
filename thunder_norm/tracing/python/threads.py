"""Threads that a program starts: a trace has one order of operations, and nobody follows what another thread does."""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from typing import Any

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.user_code import is_installed
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap


def _refusing(start: Callable) -> Callable:
    """What to call for a function of `_thread` that starts a thread: those of installed packages' own classes (a progress bar's) may run."""

    def call(function: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        thread = getattr(function.value, "__self__", None)
        module = sys.modules.get(type(thread).__module__)
        if is_installed(getattr(module, "__file__", None)):
            return interpreter_needs_wrap(start)(function, *args, **kwargs)
        return do_raise(
            UnsupportedOpError(
                with_details(
                    "a thread is started inside a jitted function",
                    at=location_of_user(),
                    why="what it computes, and what it puts into lists and attributes, would be missing in the trace",
                    instead="call what it runs, or start it outside of the jitted function",
                )
            )
        )

    return call


for _name in ("start_new_thread", "start_new", "start_joinable_thread"):
    if hasattr(_thread, _name):  # the last one from Python 3.13 on
        instead_of(getattr(_thread, _name))(_refusing(getattr(_thread, _name)))
