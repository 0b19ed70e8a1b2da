"""Whether a Python function may come to construct a wrapper subclass: seen in its code, before it runs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from thunder_norm.wrapper_classes import is_wrapper_class

# How far to look: ``Linear.forward -> matmul.apply -> to_float8_dynamic -> to_float8 -> cast.apply -> Float8Tensor`` is 6 deep.
_MAX_FUNCTIONS = 100
_NOT_FOLLOWED = ("torch", "thunder", "thunder_norm")

_known: weakref.WeakKeyDictionary[types.FunctionType, bool] = weakref.WeakKeyDictionary()


def may_construct_wrappers(fn: Any) -> bool:
    """Whether `fn` names a wrapper class, itself or through the functions and autograd.Functions it names.

    Classes and functions reached through attributes or arguments are not seen.
    """
    if not _is_followed(fn):  # most of what is called is new each time: closures of Thunder's interpreter
        return False
    known = _known.get(fn) if type(fn) is types.FunctionType else None
    return any(_mentions(f) for f in _functions(fn)) if known is None else known


def _is_followed(fn: Any) -> bool:
    return (fn.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED


def _mentions(fn: types.FunctionType) -> bool:
    if fn not in _known:
        _known[fn] = any(_is_class(value) for f in _reachable(fn) for value in _named_in(f))
    return _known[fn]


def _reachable(fn: types.FunctionType) -> Iterator[types.FunctionType]:
    found = {fn: None}  # in order, nearest first
    queue = [fn]
    for f in queue:
        if not _is_followed(f):
            continue
        yield f
        for g in (g for value in _named_in(f) for g in _functions(value)):
            if g not in found and len(found) < _MAX_FUNCTIONS:
                found[g] = None
                queue.append(g)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        yield from _functions(value.forward)
        yield from _functions(value.backward)


def _is_class(value: Any) -> bool:
    # code that only asks for DTensors is common
    return isinstance(value, type) and is_wrapper_class(value) and value.__name__ != "DTensor"


def _named_in(fn: types.FunctionType) -> Iterator[Any]:
    codes = [fn.__code__]
    for code in codes:
        codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for name in code.co_names:
            if name in fn.__globals__:
                yield fn.__globals__[name]
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
