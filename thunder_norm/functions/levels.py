"""Functions under transforms while they are interpreted: which they are, one in the other, and what they cannot ask for.

Values of tensors asked for while a transformed function is traced are refused, with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thunder_norm.tracing import lookasides
from thunder_norm.tracing.data_dependence import data_dependent
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap
from thunder.core.jit_ext import JitCtx, _general_jit_lookaside_map, get_jit_ctx
from thunder.core.proxies import TensorProxy

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


_CONVERSIONS = {"__bool__": "a condition", "__int__": "int()", "__float__": "float()", "__complex__": "complex()"}
_BUILTINS = {float: "float()", int: "int()", complex: "complex()"}


def _converting(builtin: type, what: str) -> Callable:
    """The builtin, which Python runs itself, unless it is called on a tensor of a transformed function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs)

    opaque = interpreter_needs_wrap(call)

    def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        level = active_level()
        if level is None or not any(isinstance(a.value, TensorProxy) for a in args):
            return opaque(*args, **kwargs)
        return do_raise(data_dependent(what, level))

    return lookaside


def _refusing(original: Callable, what: str) -> Callable:
    def lookaside(*args: Any, **kwargs: Any) -> Any:
        level = active_level()
        if level is None:
            return original(*args, **kwargs)
        return do_raise(data_dependent(what, level))

    return lookaside


for _name, _what in _CONVERSIONS.items():  # Thunder's own do not know the user's line
    _method = getattr(TensorProxy, _name)
    lookasides.instead_of(_method)(_refusing(_general_jit_lookaside_map[_method], _what))
for _builtin, _what in _BUILTINS.items():
    if _builtin not in _general_jit_lookaside_map:
        lookasides.instead_of(_builtin)(_converting(_builtin, _what))
