"""What Thunder knows of the compilation at hand."""

from __future__ import annotations

from typing import Any

from thunder.core import compile_data


def current_stats() -> Any:
    """The lists that the current compilation writes its traces into.

    Relies on ``thunder.core.compile_data._compile_data`` holding the pair (compile data, compile stats).
    """
    _, stats = compile_data._compile_data.get()
    return stats


def forget_earlier_traces() -> None:
    """Drop the traces recorded so far for this compilation: they precede the lowering and still mention wrappers.

    Relies on ``jit`` appending what a transform returns to ``cs.last_traces`` after the call.
    """
    current_stats().last_traces.clear()
