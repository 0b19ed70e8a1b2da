"""Which functions under function transforms are being interpreted, one in the other."""

from __future__ import annotations

from dataclasses import dataclass

from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import JitCtx, get_jit_ctx

_STATE = "_thunder_norm_levels"


@dataclass
class Levels:
    """Which transformed functions are being acquired, and the proxies of those that are done."""

    names: list[str]
    closed: dict[str, str]  # proxies that mean something in one transformed function only, and its name
    kept: list[WrappedValue]  # what the interpreter knows of transformed functions made while it runs
    replaced: set[str]  # the proxies of parameters that others stood for

    @staticmethod
    def of(ctx: JitCtx) -> Levels:
        """The state of the acquisition at hand; it lives and dies with it."""
        found = getattr(ctx, _STATE, None)
        if found is None:
            found = Levels([], {}, [], set())
            setattr(ctx, _STATE, found)
        return found


def active_level() -> str | None:
    """The innermost transform whose function is being interpreted, if any."""
    try:
        ctx = get_jit_ctx()
    except LookupError:
        return None
    names = Levels.of(ctx).names
    return names[-1] if names else None
