"""What a value that is read natively was: Thunder knows nothing of sets, ranges, arrays and partials, and looks into none of them."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import operator
import re
import types
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from thunder_norm.tracing.guarding import stored

# Of these no one looks into the items one by one, and what is in them may change.
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_COLLECTIONS = (set, frozenset, collections.deque, *_VIEWS)
# Equal values of one of these types are the same.
_DATA = (
    bytes,
    range,
    fractions.Fraction,
    decimal.Decimal,
    datetime.date,
    datetime.timedelta,
    np.generic,
    np.dtype,
    re.Pattern,
)
_BUFFERS = (bytearray, array.array, memoryview)
GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
DATA = (*_COLLECTIONS, *_DATA, *_BUFFERS, *GETTERS, np.ndarray, functools.partial, MappingProxyType)
# Objects that only torch's own code looks into, and that equal ones stand for; the modules take long to import.
_PLACES = ("torch.distributed.tensor.placement_types", "torch.distributed.device_mesh")
_LOOKED_INTO = (list, tuple, dict, torch.Tensor, types.CellType, types.CodeType, property, staticmethod, classmethod)


def is_place(value: Any) -> bool:
    """Whether a value says where the parts of a DTensor are: a placement, or a mesh of devices."""
    return type(value).__module__ in _PLACES


@functools.lru_cache(maxsize=4096)
def is_closed(kind: type) -> bool:
    """Whether no Python code sees what is in instances of a class, and nothing else here knows it: one written in C, as pybind11's enums."""
    if kind.__module__ in _PLACES:
        return True
    if kind.__dictoffset__ or issubclass(kind, _LOOKED_INTO) or hasattr(kind, "__next__") or hasattr(kind, "__get__"):
        return False
    parts = [v for base in kind.__mro__[:-1] for v in vars(base).items()]
    return not any(name == "__slots__" or isinstance(v, types.FunctionType) for name, v in parts)


def same_as(value: Any) -> Callable[[Any], bool]:
    """A function that says whether a value is what `value` is now, with all that is in it.

    Numbers that are equal are not the same if one has another sign (0.0 and -0.0) or another type (1 and True); anything that is no
    container and no data is the same only if it is the same object.  Of a tensor class, shape and dtype are compared: a trace does not hold
    what is in it.
    """
    kind = type(value)
    if kind in (int, str, bool, torch.Size):
        return functools.partial(_is_equal, kind, value)
    if kind in (float, complex):
        return functools.partial(_is_written_alike, kind, repr(value))
    if kind in (set, frozenset):
        return functools.partial(_is_equal, kind, frozenset(value))
    if kind in (tuple, list, collections.deque, *_VIEWS):
        return functools.partial(_has_items, kind, [same_as(v) for v in value])
    if isinstance(value, dict | MappingProxyType):
        return functools.partial(_has_entries, kind, tuple(value), [same_as(v) for v in value.values()])
    if isinstance(value, functools.partial):
        parts = (value.func, same_as(value.args), same_as(value.keywords))
        return functools.partial(_calls, kind, *parts)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return functools.partial(_has_bytes, kind, value.dtype, value.shape, value.tobytes())
    if isinstance(value, np.ndarray):
        return functools.partial(_has_objects, kind, value.shape, same_as(value.ravel().tolist()))
    if isinstance(value, _BUFFERS):
        return functools.partial(_is_of_bytes, kind, bytes(value))
    if kind is slice or isinstance(value, GETTERS):
        return functools.partial(_is_made_of, kind, same_as(value.__reduce__()))
    is_equal_alike = is_closed(kind) and kind.__eq__ is not object.__eq__ and kind.__hash__ is not None
    if isinstance(value, (*_DATA, torch.device)) or is_equal_alike:
        return functools.partial(_is_equal, kind, value)
    if isinstance(value, torch.Tensor):
        return functools.partial(_is_a_tensor_like, kind, value.shape, value.dtype)
    return functools.partial(_is, value)


def array_like(array: np.ndarray) -> Callable[[Any], bool]:
    """A function that says whether a value is an array of the class, shape and dtype of another."""
    return functools.partial(_is_an_array_like, type(array), array.shape, array.dtype)


def is_of_array(is_same: Any) -> bool:
    """Whether a function that `same_as` has made is about a numpy array, or one of its numbers."""
    return isinstance(is_same, functools.partial) and is_same.func in (_has_bytes, _has_objects)


def _is(then: Any, now: Any) -> bool:
    return now is then


def _is_a_tensor_like(kind: type, shape: torch.Size, dtype: torch.dtype, now: Any) -> bool:
    return type(now) is kind and now.shape == shape and now.dtype == dtype


def _is_an_array_like(kind: type, shape: tuple[int, ...], dtype: np.dtype, now: Any) -> bool:
    return type(now) is kind and now.shape == shape and now.dtype == dtype and now.flags.writeable


def _is_equal(kind: type, then: Any, now: Any) -> bool:
    return type(now) is kind and now == then


def _is_written_alike(kind: type, then: str, now: Any) -> bool:
    return type(now) is kind and repr(now) == then


def _has_items(kind: type, then: Sequence[Callable[[Any], bool]], now: Any) -> bool:
    return type(now) is kind and len(now) == len(then) and all(is_same(v) for is_same, v in zip(then, now, strict=True))


def _has_entries(kind: type, keys: tuple, then: Sequence[Callable[[Any], bool]], now: Any) -> bool:
    is_alike = type(now) is kind and stored.same_keys(tuple(now), keys)
    return is_alike and all(is_same(v) for is_same, v in zip(then, now.values(), strict=True))


def _calls(kind: type, function: Any, args: Callable[[Any], bool], keywords: Callable[[Any], bool], now: Any) -> bool:
    return type(now) is kind and now.func is function and args(now.args) and keywords(now.keywords)


def _has_bytes(kind: type, dtype: np.dtype, shape: tuple[int, ...], then: bytes, now: Any) -> bool:
    return type(now) is kind and now.dtype == dtype and now.shape == shape and now.tobytes() == then


def _has_objects(kind: type, shape: tuple[int, ...], are_same: Callable[[Any], bool], now: Any) -> bool:
    return type(now) is kind and now.shape == shape and are_same(now.ravel().tolist())


def _is_of_bytes(kind: type, then: bytes, now: Any) -> bool:
    return type(now) is kind and bytes(now) == then


def _is_made_of(kind: type, are_same: Callable[[Any], bool], now: Any) -> bool:
    return type(now) is kind and are_same(now.__reduce__())
