"""What a list, a tuple or a dict stores, whatever methods its class has: by those of the builtin class.

A class derived from one may answer ``len(d)``, ``k in d``, ``d[k]`` and iteration by code of its own, which is the program's: it runs where
the program asks, and nowhere else.
"""

from __future__ import annotations

import builtins
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, wrap_binary_subscr

_OF_MAPPINGS = "__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __reversed__ __missing__ __or__ __ior__ __ror__"
_OF_SEQUENCES = (
    "__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __reversed__ __add__ __iadd__ __mul__ __imul__ __rmul__"
)
_MAPPING = (*_OF_MAPPINGS.split(), *"clear copy get items keys pop popitem setdefault update values".split())
_SEQUENCE = (*_OF_SEQUENCES.split(), *"append clear copy count extend index insert pop remove reverse sort".split())


@functools.lru_cache(maxsize=4096)
def base_of(kind: type) -> type | None:
    """The builtin class that stores what an instance of `kind` holds; None if it is no list, tuple or dict."""
    return next((base for base in (OrderedDict, dict, list, tuple) if issubclass(kind, base)), None)


@functools.lru_cache(maxsize=4096)
def is_container(kind: type) -> bool:
    """Whether instances of a class are lists, tuples or dicts whose elements may be looked at one by one."""
    return base_of(kind) is not None and kind is not torch.Size


@functools.lru_cache(maxsize=4096)
def has_own_methods(kind: type) -> bool:
    """Whether a class derived from list, tuple or dict has a method of its own where the builtin class has one, or ``__missing__``."""
    base = base_of(kind)
    if base is None or kind is base:
        return False
    names = _MAPPING if issubclass(base, dict) else _SEQUENCE
    return any(in_classes(kind.__mro__, name, None) is not in_classes(base.__mro__, name, None) for name in names)


@functools.lru_cache(maxsize=4096)
def has_own(kind: type, name: str) -> bool:
    """Whether `kind`, derived from list, tuple or dict, has another method of this name than the builtin class."""
    base = base_of(kind)
    return (
        base is not None and kind is not base and in_classes(kind.__mro__, name, None) is not in_classes(base.__mro__, name, None)
    )


def length(value: Any) -> int:
    """How many elements or entries there are."""
    base = base_of(type(value))
    return builtins.len(value) if base is None else base.__len__(value)


def elements(value: Any) -> Iterator[Any]:
    """The elements of a list or tuple in order, the keys of a dict."""
    base = base_of(type(value))
    return iter(value) if base is None else base.__iter__(value)


def keys(value: dict) -> tuple[Any, ...]:
    """The keys of a dict in order."""
    return tuple(elements(value))


def same_keys(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether dicts have equal keys in one order; a tensor is the same key as itself alone, though it says of each entry what is equal."""
    return len(now) == len(then) and all(
        n is t or (not isinstance(n, torch.Tensor) and not isinstance(t, torch.Tensor) and n == t)
        for n, t in zip(now, then, strict=True)
    )


def item(value: Any, key: Any) -> Any:
    """The element at an index, or the entry of a key that is there."""
    base = base_of(type(value))
    if base is not None and issubclass(base, dict) and not dict.__contains__(value, key):
        raise KeyError(key)
    return value[key] if base is None else base.__getitem__(value, key)


def reader(kind: type) -> str | None:
    """How code asks for what is stored under a key, where ``value[key]`` asks a method of the class's own; None where it does not."""
    base = base_of(kind)
    return (
        None
        if base is None or not has_own(kind, "__getitem__")
        else f"{next(b for b in (dict, list, tuple) if issubclass(base, b)).__name__}.__getitem__"
    )


def contains(value: dict, key: Any) -> bool:
    """Whether a dict has a key."""
    return dict.__contains__(value, key)


# -- what stands for it in the interpreter ------------------------------------------------------------------------------------


def populate(wrapped: WrappedValue) -> None:
    """Have something stand for each element or entry: ``populate_item_wrappers`` of Thunder's iterates by the class's own methods."""
    value = wrapped.value
    if isinstance(value, dict):
        for key in keys(value):
            if key not in wrapped.item_wrappers:  # type: ignore[operator]
                thunders.populate_single_dict_item_wrapper(item(value, key), wrapped, key)
        return
    if wrapped.item_wrappers is None:
        wrapped.item_wrappers = [None] * length(value)  # type: ignore[list-item]
    for i, v in enumerate(elements(value)):
        if wrapped.item_wrappers[i] is None:  # type: ignore[index]
            wrapped.item_wrappers[i] = wrap_binary_subscr(v, wrapped, i)  # type: ignore[index]


def as_it_is(value: Any) -> Callable[[Any], bool] | None:
    """Whether another has the class, and as many elements or the same keys; None where the class says all of it."""
    kind = type(value)
    if isinstance(value, dict):
        return functools.partial(_has_keys, kind, keys(value))
    if isinstance(value, tuple) and (kind is torch.Size or hasattr(kind, "_fields") or kind.__module__ == "torch.return_types"):
        return None
    return functools.partial(_has_length, kind, length(value)) if isinstance(value, list | tuple) else None


def _has_keys(kind: type, then: tuple[Any, ...], now: Any) -> bool:
    return type(now) is kind and same_keys(keys(now), then)


def _has_length(kind: type, then: int, now: Any) -> bool:
    return type(now) is kind and length(now) == then


def _zip(*iterables: Iterable[Any], strict: bool = False) -> Iterator[tuple[Any, ...]]:
    return builtins.zip(*map(elements, iterables), strict=strict)


IN_INTERPRETER = Replacements(
    (
        Replacement(
            thunders, "len", length, "WrappedValue.__init__, wrap, _call_dispatch: len(value), of a list beside its item_wrappers"
        ),
        Replacement(thunders, "zip", _zip, "InterpreterStack.append: for u, v in zip(val.value, val.item_wrappers)"),
    )
)
