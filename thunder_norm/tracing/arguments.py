"""What Python says of a call whose arguments do not fit the function; Thunder's messages name the function by its address."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from thunder.core.interpreter import INTERPRETER_SIGNALS, do_raise

_NOTHING = (lambda: None).__code__
_NO_FUNCTION_BODY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_NESTED


def as_python_binds(result: Any, runtimectx: Any, function: FunctionType, num_positional: int, names: Iterable[str]) -> Any:
    """The result of a call, with Python's error in the place of Thunder's where it was not even begun."""
    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED or type(runtimectx.curexc) is not TypeError:
        return result
    said = str(runtimectx.curexc)
    if not said.startswith(f"{function}() ") and said != "exceptions must derive from BaseException":  # it raises a string
        return result
    try:
        _without_body(function)(*[None] * num_positional, **dict.fromkeys(names))
    except TypeError as e:
        runtimectx.curexc = None
        return do_raise(e.with_traceback(None))
    return result


def _without_body(function: FunctionType) -> FunctionType:
    """A function that takes what another takes, and does nothing."""
    code = function.__code__.replace(
        co_code=_NOTHING.co_code,
        co_consts=_NOTHING.co_consts,
        co_names=(),
        co_freevars=(),
        co_cellvars=(),
        co_stacksize=_NOTHING.co_stacksize,
        co_linetable=_NOTHING.co_linetable,
        co_exceptiontable=_NOTHING.co_exceptiontable,
        co_flags=function.__code__.co_flags & ~_NO_FUNCTION_BODY,
    )
    found = FunctionType(code, {}, function.__name__, function.__defaults__)
    found.__kwdefaults__ = function.__kwdefaults__
    found.__qualname__ = function.__qualname__
    return found
