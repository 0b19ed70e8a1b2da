"""Defaults of parameters that hold tensors, modules and what else is no constant: found in their function, as what it closes over is.

Thunder 0.2.6 takes each for a constant (`thunder.core.interpreter._setup_frame_and_run_python_function`), and has none for a tensor.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from typing import Any

import torch

from thunder.core.interpreter import WrappedValue, _interpret_call, wrap, wrap_const
from thunder.core.proxies import Proxy

_COMMON = frozenset({types.NoneType, bool, int, float, str})
_CONSTANTS = (
    *_COMMON,
    *(complex, bytes, type, types.EllipsisType, types.ModuleType, types.BuiltinFunctionType, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Proxy),
)


def found_in(fn: WrappedValue, args: tuple, kwargs: dict[str, Any]) -> tuple[WrappedValue, tuple, dict[str, Any]]:
    """A call that is given the defaults of its function, of a function that has none.

    Args:
        fn: a function of Python's that is about to be interpreted.
        args: the positional arguments that it is called with.
        kwargs: those by name.

    Returns:
        The call as it is, if all of the defaults are constants.
    """
    function = fn.value
    if not (function.__defaults__ or function.__kwdefaults__):
        return fn, args, kwargs
    code, defaults, by_name = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
    if _are_constants(defaults) and _are_constants(by_name.values()):
        return fn, args, kwargs
    positional, named = list(args), dict(kwargs)
    first = code.co_argcount - len(defaults)
    if len(args) < min(first, code.co_posonlyargcount):  # one is missing that has no default and no name, as Python says
        return fn, args, kwargs
    for i in range(max(first, len(args)), code.co_argcount):
        name = code.co_varnames[i]
        if i < code.co_posonlyargcount:
            positional.append(_found(fn, "__defaults__", i - first, defaults[i - first]))
        elif name not in kwargs:
            named[name] = _found(fn, "__defaults__", i - first, defaults[i - first])
    for name, value in by_name.items():
        if name not in kwargs:
            named[name] = _found(fn, "__kwdefaults__", name, value)
    return wrap(_without_defaults(function), provenance=fn.provenance), tuple(positional), named


def _found(fn: WrappedValue, table: str, key: Any, value: Any) -> Any:
    if _is_constant(value):
        return wrap_const(value)
    return _interpret_call(lambda found, key: found[key], _interpret_call(getattr, fn, wrap_const(table)), wrap_const(key))


def _without_defaults(function: types.FunctionType) -> types.FunctionType:
    other = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    other.__qualname__, other.__module__ = function.__qualname__, function.__module__
    return other


def _are_constants(values: Iterable[Any]) -> bool:
    return _COMMON.issuperset(map(type, values)) or all(map(_is_constant, values))


def _is_constant(value: Any) -> bool:
    """Whether a value is what it is, without anything in it that a program could look for."""
    if type(value) in (tuple, frozenset):
        return _are_constants(value)
    if isinstance(value, types.FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return isinstance(value, _CONSTANTS)
