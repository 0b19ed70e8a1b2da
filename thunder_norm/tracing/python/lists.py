"""Methods of lists and tuples that Thunder's interpreter lacks, or that look at elements otherwise than Python.

An element is the one that is looked for if it is the same object or equal to it; what a class says of equality and order is the program's
code, and is interpreted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thunder_norm.tracing.guarding.looked_into import look_into
from thunder_norm.tracing.lookasides import instead_of
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, do_raise, wrap_const

_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_COMPARED_BY_VALUE = frozenset({int, float, bool, str, bytes, type(None)})


def is_plain(value: Any) -> bool:
    """Whether Python's C code alone says what a value is equal to and what it is less than."""
    return type(value) in _COMPARED_BY_VALUE or type(value) in (tuple, list) and all(map(is_plain, value))


# -- looking for elements -----------------------------------------------------------------------------------------------------


def first_of(values: Sequence[Any], value: Any, start: int, stop: int) -> int | None:
    """The index of the first element between `start` and `stop` that is `value`."""
    for i in range(start, stop):
        if i < len(values) and (values[i] is value or values[i] == value):
            return i
    return None


def number_of(values: Iterable[Any], value: Any) -> int:
    """How many elements are `value`."""
    found = 0
    for v in values:
        if v is value or v == value:
            found += 1
    return found


def _place(seq: WrappedValue, value: WrappedValue, start: Any = None, stop: Any = None) -> Any:
    """The wrapped index of the first element that is `value`, wrapped None where there is none."""
    seq.track_items()
    try:
        first, last, _ = slice(_unwrapped(start), _unwrapped(stop)).indices(len(seq.value))
    except Exception as e:
        return do_raise(e)
    if is_plain(value.value) and all(map(is_plain, seq.value)):
        look_into((value, seq))
        return wrap_const(first_of(seq.value, value.value, first, last))
    return thunders._interpret_call(first_of, seq, value, wrap_const(first), wrap_const(last))


def _unwrapped(x: Any) -> Any:
    return x.value if isinstance(x, WrappedValue) else x


@instead_of(list.__contains__)
@instead_of(tuple.__contains__)
def _contains(seq: WrappedValue, value: WrappedValue) -> Any:
    found = _place(seq, value)
    return found if found is _EXCEPTION_RAISED else wrap_const(found.value is not None)


@instead_of(list.index)
@instead_of(tuple.index)
def _index(seq: WrappedValue, value: WrappedValue, *bounds: WrappedValue) -> Any:
    found = _place(seq, value, *bounds)
    if found is _EXCEPTION_RAISED or found.value is not None:
        return found
    is_list = isinstance(seq.value, list)
    return do_raise(ValueError(f"{value.value!r} is not in list" if is_list else "tuple.index(x): x not in tuple"))


@instead_of(list.count)
@instead_of(tuple.count)
def _count(seq: WrappedValue, value: WrappedValue) -> Any:
    seq.track_items()
    return thunders._interpret_call(number_of, seq, value)


# -- changing a list ----------------------------------------------------------------------------------------------------------


def _changing(change: Callable[..., Any]) -> Callable:
    """A method that does the same to the list and to what stands for its elements, and returns None."""

    def method(seq: WrappedValue, *args: WrappedValue) -> Any:
        seq.track_items()
        try:
            change(seq, *args)
        except Exception as e:
            return do_raise(e)
        return wrap_const(None)

    return method


@instead_of(list.append)
@_changing
def _append(seq: WrappedValue, value: WrappedValue) -> None:
    """Thunder's makes the list one of the program's own (``LIST_APPEND``), also where it came with the call."""
    list.append(seq.value, value.value)
    seq.item_wrappers.append(value)


@instead_of(list.extend)
def _extend(seq: WrappedValue, iterable: WrappedValue) -> Any:
    """Thunder's makes the list one of the program's own, as `append` does (``LIST_EXTEND``)."""
    seq.track_items()
    if not isinstance(iterable.value, tuple | list):
        return thunders._interpret_call(_append_each, seq, iterable)
    thunders.populate_item_wrappers(iterable)
    list.extend(seq.value, iterable.value)
    seq.item_wrappers.extend(iterable.item_wrappers)
    return wrap_const(None)


def _append_each(seq: list, iterable: Iterable) -> None:
    for x in iterable:
        seq.append(x)


@instead_of(list.insert)
@_changing
def _insert(seq: WrappedValue, index: WrappedValue, value: WrappedValue) -> None:
    place = operator.index(index.value)
    list.insert(seq.value, place, value.value)
    seq.item_wrappers.insert(place, value)


@instead_of(list.clear)
@_changing
def _clear(seq: WrappedValue) -> None:
    list.clear(seq.value)
    seq.item_wrappers.clear()


@instead_of(list.remove)
def _remove(seq: WrappedValue, value: WrappedValue) -> Any:
    found = _place(seq, value)
    if found is _EXCEPTION_RAISED:
        return found
    if found.value is None:
        return do_raise(ValueError("list.remove(x): x not in list"))
    del seq.value[found.value]
    del seq.item_wrappers[found.value]
    return wrap_const(None)


@instead_of(list.__imul__)
def _repeat(seq: WrappedValue, times: WrappedValue) -> Any:
    seq.track_items()
    try:
        seq.value[:] = seq.value * times.value
    except Exception as e:
        return do_raise(e)
    seq.item_wrappers[:] = list(seq.item_wrappers or ()) * operator.index(times.value)  # type: ignore[index]
    return seq


# -- order --------------------------------------------------------------------------------------------------------------------


class _RaisedError(Exception):
    """The program has raised an exception, which is under way."""


class _Key:
    """A key of the program's: Python's own sort asks ``<`` of it, as often and in the order that it does in eager mode."""

    def __init__(self, key: WrappedValue):
        self._key = key

    def __lt__(self, other: _Key) -> bool:
        found = thunders._interpret_call(_is_less, self._key, other._key)
        if found is _EXCEPTION_RAISED:
            raise _RaisedError
        return found.value


def _is_less(a: Any, b: Any) -> bool:
    return True if a < b else False  # noqa: SIM210 - of a tensor the value is asked for


@instead_of(list.sort)
def _sort(seq: WrappedValue, *, key: WrappedValue | None = None, reverse: WrappedValue | None = None) -> Any:
    seq.track_items()
    order = order_of(list(seq.item_wrappers), key, reverse)
    if order is _EXCEPTION_RAISED:
        return order
    seq.value[:] = [seq.value[i] for i in order]
    seq.item_wrappers[:] = [seq.item_wrappers[i] for i in order]
    return wrap_const(None)


def order_of(items: list[WrappedValue], key: WrappedValue | None, reverse: WrappedValue | None) -> Any:
    """The places of elements in their order, by what the program says of it, or the signal of its error."""
    keys = items
    if key is not None and key.value is not None:
        keys = []
        for item in items:
            found = thunders._interpret_call(key, item)
            if found is _EXCEPTION_RAISED:
                return found
            keys.append(found)
    is_reversed = reverse is not None and bool(reverse.value)
    values = [k.value for k in keys]
    if all(map(is_plain, values)):
        look_into(keys)
        try:
            return sorted(range(len(values)), key=values.__getitem__, reverse=is_reversed)
        except Exception as e:
            return do_raise(e)
    asked = list(map(_Key, keys))
    try:
        return sorted(range(len(asked)), key=asked.__getitem__, reverse=is_reversed)
    except _RaisedError:
        return _EXCEPTION_RAISED


@instead_of(sorted)
def _sorted(iterable: WrappedValue, *, key: WrappedValue | None = None, reverse: WrappedValue | None = None) -> Any:
    made = thunders._interpret_call(list, iterable)
    if made is _EXCEPTION_RAISED:
        return made
    done = _sort(made, key=key, reverse=reverse)
    return done if done is _EXCEPTION_RAISED else made
