"""What classes derived from list, tuple and dict share: methods of the builtin class are asked of what is stored.

Thunder does what ``super().__setitem__(k, v)`` asks by ``self[k] = v``: the method of the derived class runs once more, behind the
interpreter's back.  Where a class has methods of its own, each of the builtin class's methods is done as its C code does it.
"""

from __future__ import annotations

import collections
import collections.abc
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.tracing import lookasides
from thunder_norm.tracing.guarding import stored
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import (
    WrappedValue,
    do_raise,
    wrap_binary_subscr,
    wrapped_build_tuple,
)
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map

EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED


def of_builtin(*methods: Callable, also: Callable[[WrappedValue], bool] = lambda _: False) -> Callable[[Callable], Callable]:
    """Register what does the work of methods of a builtin class where an operand is of a class with methods of its own.

    It is called with the first of the methods' arguments wrapped. `also` says of that one where else it is wanted.
    """

    def enter(own: Callable) -> Callable:
        for method in methods:
            _register(method, own, also)
        return own

    return enter


def _register(method: Callable, own: Callable, also: Callable[[WrappedValue], bool]) -> None:
    tables = (jit_ext._general_jit_lookaside_map, thunders._default_provenance_tracking_lookaside_map)
    before = lookasides.of_others(method) or next((t[method] for t in tables if method in t), None)
    before = before or thunders.interpreter_needs_wrap(method)
    if method.__name__ in ("__setitem__", "setdefault"):  # Thunder's set a key as it is: an index out of range, what has no hash
        before = functools.partial(done, before)

    @lookasides.instead_of(method)
    def choose(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        is_own = any(stored.has_own_methods(type(a.value)) for a in args) or bool(args) and also(args[0])
        chosen = own if is_own else before
        return chosen(*args, **kwargs)


def done(action: Callable[..., Any], *args: Any) -> Any:
    """What C code returns, or the signal of its error."""
    try:
        return action(*args)
    except Exception as e:  # noqa: BLE001 - the program's
        return do_raise(e)


def entry(mapping: WrappedValue, key: Any) -> WrappedValue:
    """What stands for the entry of a key, which is there."""
    value = dict.__getitem__(mapping.value, key)
    known = mapping.item_wrappers.get(key)  # type: ignore[union-attr]
    if known is None or (known.value is not value and known.original_value is not value):
        mapping.item_wrappers.pop(key, None)  # type: ignore[union-attr]
        thunders.populate_single_dict_item_wrapper(value, mapping, key)
    if key not in mapping.key_wrappers:
        mapping.key_wrappers[key] = thunders.wrap_const(key)
    return mapping.item_wrappers[key]  # type: ignore[index]


def element(sequence: WrappedValue, index: int) -> WrappedValue:
    """What stands for an element, at an index that is there and not negative."""
    sequence.track_items()
    value = stored.item(sequence.value, index)
    known = sequence.item_wrappers[index]  # type: ignore[index]
    if known is None or (known.value is not value and known.original_value is not value):
        known = sequence.item_wrappers[index] = wrap_binary_subscr(value, sequence, index)  # type: ignore[index]
    return known


# -- functions in C -----------------------------------------------------------------------------------------------------------

_OF_SETS = (
    *"update union difference intersection symmetric_difference issubset issuperset isdisjoint".split(),
    *"difference_update intersection_update symmetric_difference_update".split(),
)
_ITERATE = dict.fromkeys(
    (
        *(sum, math.prod, math.fsum, any, all, set.__init__, frozenset.__new__, collections.deque.__init__, str.join),
        *(getattr(kind, name) for kind in (set, frozenset) for name in _OF_SETS if hasattr(kind, name)),
    ),
    True,
)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of a function in C that iterates over a container by a method of the program's, or over one of given tensors.

    These are not what stands for them until the program has taken them out.
    """
    if lookasides.look_up(_ITERATE, fn) is None or not any(map(_is_interpreted, args)):
        return None
    return functools.partial(_iterating, fn)


def _is_interpreted(a: WrappedValue) -> bool:
    value, kind = a.value, type(a.value)
    if stored.has_own(kind, "__iter__"):
        return True
    if isinstance(value, list | tuple):
        return any(isinstance(v, torch.Tensor) for v in stored.elements(value))
    is_of_interpreter = kind.__module__ == thunders.__name__ and hasattr(kind, "__iter__")  # iterators of lists
    return is_of_interpreter or isinstance(value, collections.abc.MappingView)


def _taken_out(iterable: Any) -> list:
    return [value for value in iterable]  # noqa: C416 - a list of what the interpreter finds


def _iterating(fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    given = []
    for a in args:
        found = thunders._interpret_call(_taken_out, a) if _is_interpreted(a) else a
        if found is EXCEPTION_RAISED:
            return found
        given.append(found)
    return thunders._interpret_call(fn, *given, **kwargs)


def as_torch_reads(found: Callable | None, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
    """`found`, called instead of a function of torch, with what lists and tuples of tensors store: torch's C code reads that."""
    if found is None or not any(map(_is_of_tensors, (*args, *kwargs.values()))):
        return found
    if not isinstance(fn, Symbol) and lookasides.look_up(_torch_to_thunder_function_map, fn) is None:
        return found
    return lambda *a, **k: found(*map(_plain, a), **{name: _plain(v) for name, v in k.items()})


def _is_of_tensors(wrapped: WrappedValue) -> bool:
    value = wrapped.value
    if not isinstance(value, list | tuple) or not stored.has_own_methods(type(value)):
        return False
    return any(isinstance(v, torch.Tensor | TensorProxy) for v in stored.elements(value))


def _plain(wrapped: WrappedValue) -> WrappedValue:
    if not _is_of_tensors(wrapped):
        return wrapped
    elements = [element(wrapped, i) for i in range(stored.length(wrapped.value))]
    if isinstance(wrapped.value, tuple):
        return wrapped_build_tuple(elements)
    made = thunders.wrap_const([e.value for e in elements])
    made.item_wrappers = elements
    return made
