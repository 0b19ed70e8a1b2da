"""Values of tensors asked for while a transformed function is traced: refused, with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.levels import active_level
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.data_dependence import data_dependent

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
