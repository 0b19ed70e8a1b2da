"""Where in the user's program something came from."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from thunder_norm.user_code import shown_line
import thunder
from thunder.core.interpreter import get_interpreterruntimectx, unwrap
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_THUNDER = os.path.dirname(thunder.__file__) + os.sep
_NOT_USER = (sys.stdlib_module_names | {"thunder", "torch", "thunder_norm"}) - {"__main__"}


def location_of(bsym: BoundSymbol) -> str | None:
    """``file.py:line:  text`` of the statement a bound symbol was recorded for, if known (Thunder gives some a line of its own)."""
    positions = bsym.source_positions
    if bsym.source_filename is None or positions is None or positions.lineno is None:
        return None
    if bsym.source_filename.startswith(_THUNDER):
        return None
    return shown_line(bsym.source_filename, positions.lineno)


def location_of_user() -> str | None:
    """``file.py:line:  text`` of the innermost statement being interpreted that is the user's."""
    try:
        runtime = get_interpreterruntimectx()
    except LookupError:
        return None
    for frame in reversed(runtime.frame_stack):
        module = unwrap(frame.globals).get("__name__", "")
        if module.split(".")[0] not in _NOT_USER and frame.positions is not None and frame.positions.lineno is not None:
            return shown_line(frame.code.co_filename, frame.positions.lineno)
    return None


def with_users_line(error: Exception) -> Exception:
    """The error, with the line of the user's that is being interpreted if its message has none."""
    location = location_of_user()
    if location is not None and "\n  at " not in str(error):
        error.args = (f"{error}\n  at  {location}", *error.args[1:])
    return error


@contextlib.contextmanager
def at_line_of(trace: TraceCtx, bsym: BoundSymbol) -> Iterator[None]:
    """What is written to `trace` meanwhile comes from the statement that `bsym` came from."""
    saved = trace._current_source_filename, trace._current_source_positions
    trace.set_current_source_location(bsym.source_filename, bsym.source_positions)
    try:
        yield
    finally:
        trace.set_current_source_location(*saved)
