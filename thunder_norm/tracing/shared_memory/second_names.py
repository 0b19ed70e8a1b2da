"""Names that the trace has for what operations hand back: one tensor under two names."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

_KNOWN = "_thunder_norm_second_names"  # of an acquisition


def note(result: TensorProxy, same: TensorProxy | None, guard: Callable[[], None] | None = None) -> None:
    """An operation has handed back its argument, or not, and the trace has another name for what it returned.

    If it would not with an argument that lies otherwise, `guard` lets the trace serve calls alone in which it lies as it does; it is
    called if the program asks.
    """
    vars(get_jit_ctx()).setdefault(_KNOWN, {})[result.name] = same, guard


def is_noted(p: TensorProxy) -> bool:
    """Whether an operation may have handed back its argument under this name."""
    return p.name in getattr(get_jit_ctx(), _KNOWN, ())


def handed_back(p: TensorProxy) -> TensorProxy:
    """What it is another name for, while the inputs lie as they do."""
    known = getattr(get_jit_ctx(), _KNOWN, {})
    while p.name in known:
        same, guard = known[p.name]
        if guard is not None:
            guard()
        if same is None:
            break
        p = same
    return p
