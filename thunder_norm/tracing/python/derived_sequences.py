"""Methods of list and tuple, of objects of classes with methods of their own."""

from __future__ import annotations

import operator
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.python.derived import EXCEPTION_RAISED, done, element, of_builtin
from thunder_norm.tracing.python.lists import first_of, number_of, order_of
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    WrappedValue,
    do_raise,
    interpreter_needs_wrap,
    wrap_binary_subscr,
    wrap_const,
    wrapped_build_tuple,
)


def _base(sequence: WrappedValue) -> type:
    return list if isinstance(sequence.value, list) else tuple


def _name(sequence: WrappedValue) -> str:
    return _base(sequence).__name__


def _elements(sequence: WrappedValue) -> list[WrappedValue]:
    """What stands for the elements that a list or tuple stores."""
    return [element(sequence, i) for i in range(stored.length(sequence.value))]


def _plain(kind: type, wrappers: list[WrappedValue]) -> WrappedValue:
    """A new list or tuple, of exactly this class."""
    if kind is tuple:
        return wrapped_build_tuple(wrappers)
    made = wrap_const([w.value for w in wrappers])
    made.item_wrappers = list(wrappers)
    return made


def _iterated(iterable: WrappedValue) -> Any:
    """What stands for the elements that Python takes from an iterable, or the signal of an error."""
    if stored.base_of(type(iterable.value)) in (list, tuple) and not stored.has_own(type(iterable.value), "__iter__"):
        return _elements(iterable)
    made = wrap_const([])
    made.track_items()
    if thunders._interpret_call(_append_all, made, iterable) is EXCEPTION_RAISED:
        return EXCEPTION_RAISED
    return list(made.item_wrappers)  # type: ignore[arg-type]


def _append_all(made: list, iterable: Any) -> None:
    for value in iterable:
        list.append(made, value)


def _store(sequence: WrappedValue, wrappers: list[WrappedValue]) -> None:
    list.__setitem__(sequence.value, slice(None), [w.value for w in wrappers])
    sequence.item_wrappers[:] = wrappers  # type: ignore[index]


# -- elements -----------------------------------------------------------------------------------------------------------------


@of_builtin(list.__getitem__, tuple.__getitem__)
def _getitem(sequence: WrappedValue, index: WrappedValue) -> Any:
    sequence.track_items()
    if isinstance(index.value, slice):
        found = done(_base(sequence).__getitem__, sequence.value, index.value)
        if found is EXCEPTION_RAISED:
            return found
        wrapped = wrap_binary_subscr(found, sequence, index)
        wrapped.item_wrappers = _elements(sequence)[index.value]
        return wrapped
    place = _place(sequence, index)
    return place if place is EXCEPTION_RAISED else element(sequence, place)


def _place(sequence: WrappedValue, index: WrappedValue) -> Any:
    """An index from 0 on, or the signal of Python's error."""
    if not hasattr(type(index.value), "__index__"):
        return do_raise(TypeError(f"{_name(sequence)} indices must be integers or slices, not {type(index.value).__name__}"))
    length, place = stored.length(sequence.value), operator.index(index.value)
    if not -length <= place < length:
        return do_raise(IndexError(f"{_name(sequence)} index out of range"))
    return place % length


@of_builtin(list.__setitem__)
def _setitem(sequence: WrappedValue, index: WrappedValue, value: WrappedValue) -> Any:
    sequence.track_items()
    new: Any = value
    if isinstance(index.value, slice):
        wrappers = _iterated(value)
        if wrappers is EXCEPTION_RAISED:
            return wrappers
        new = _plain(list, wrappers)
    set_ = done(list.__setitem__, sequence.value, index.value, new.value)
    if set_ is EXCEPTION_RAISED:
        return set_
    sequence.item_wrappers[index.value] = new.item_wrappers if isinstance(index.value, slice) else value  # type: ignore[index]
    return wrap_const(None)


@of_builtin(list.__delitem__)
def _delitem(sequence: WrappedValue, index: WrappedValue) -> Any:
    sequence.track_items()
    deleted = done(list.__delitem__, sequence.value, index.value)
    if deleted is EXCEPTION_RAISED:
        return deleted
    del sequence.item_wrappers[index.value]  # type: ignore[union-attr]
    return wrap_const(None)


@of_builtin(list.__len__, tuple.__len__)
def _len(sequence: WrappedValue) -> Any:
    sequence.track_items()
    return wrap_const(stored.length(sequence.value))


class _StoredElements:
    """An iterator over the elements of a list or tuple, which may grow meanwhile."""

    def __init__(self, sequence: Any, kind: type):
        self._sequence = sequence
        self._kind = kind
        self._place = 0

    def __iter__(self) -> _StoredElements:
        return self

    def __next__(self) -> Any:
        if self._place < 0 or self._place >= self._kind.__len__(self._sequence):
            self._place = -1
            raise StopIteration
        self._place += 1
        return self._kind.__getitem__(self._sequence, self._place - 1)


class _StoredFromLast(_StoredElements):
    """The same from the last element on."""

    def __init__(self, sequence: Any, kind: type):
        self._sequence = sequence
        self._kind = kind
        self._place = kind.__len__(sequence) - 1

    def __next__(self) -> Any:
        if self._place < 0 or self._place >= self._kind.__len__(self._sequence):
            self._place = -1
            raise StopIteration
        self._place -= 1
        return self._kind.__getitem__(self._sequence, self._place + 1)


@of_builtin(list.__iter__, tuple.__iter__)
def _iter(sequence: WrappedValue) -> Any:
    sequence.track_items()
    return thunders._interpret_call(_StoredElements, sequence, wrap_const(_base(sequence)))


@of_builtin(list.__reversed__)
def _reversed(sequence: WrappedValue) -> Any:
    sequence.track_items()
    return thunders._interpret_call(_StoredFromLast, sequence, wrap_const(list))


# -- looking for elements -----------------------------------------------------------------------------------------------------


def _searched(sequence: WrappedValue) -> WrappedValue:
    return _plain(tuple, _elements(sequence))


def _bounded(sequence: WrappedValue, value: WrappedValue, *bounds: WrappedValue) -> Any:
    try:
        start, stop, _ = slice(*([b.value for b in bounds] + [None] * (2 - len(bounds)))).indices(stored.length(sequence.value))
    except Exception as e:  # noqa: BLE001 - the program's
        return do_raise(e)
    return thunders._interpret_call(first_of, _searched(sequence), value, wrap_const(start), wrap_const(stop))


@of_builtin(list.__contains__, tuple.__contains__)
def _contains(sequence: WrappedValue, value: WrappedValue) -> Any:
    found = _bounded(sequence, value)
    return found if found is EXCEPTION_RAISED else wrap_const(found.value is not None)


@of_builtin(list.index, tuple.index)
def _index(sequence: WrappedValue, value: WrappedValue, *bounds: WrappedValue) -> Any:
    found = _bounded(sequence, value, *bounds)
    if found is EXCEPTION_RAISED or found.value is not None:
        return found
    is_list = isinstance(sequence.value, list)
    return do_raise(ValueError(f"{value.value!r} is not in list" if is_list else "tuple.index(x): x not in tuple"))


@of_builtin(list.count, tuple.count)
def _count(sequence: WrappedValue, value: WrappedValue) -> Any:
    return thunders._interpret_call(number_of, _searched(sequence), value)


# -- changing a list ----------------------------------------------------------------------------------------------------------


@of_builtin(list.append)
def _append(sequence: WrappedValue, value: WrappedValue) -> Any:
    sequence.track_items()
    list.append(sequence.value, value.value)
    sequence.item_wrappers.append(value)  # type: ignore[union-attr]
    return wrap_const(None)


@of_builtin(list.extend)
def _extend(sequence: WrappedValue, iterable: WrappedValue) -> Any:
    sequence.track_items()
    kind = type(iterable.value)
    is_stored = kind in (list, tuple) or iterable.value is sequence.value
    wrappers = _elements(iterable) if is_stored else _iterated(iterable)
    if wrappers is EXCEPTION_RAISED:
        return wrappers
    list.extend(sequence.value, [w.value for w in wrappers])
    sequence.item_wrappers.extend(wrappers)  # type: ignore[union-attr]
    return wrap_const(None)


@of_builtin(list.__init__)
def _init(sequence: WrappedValue, iterable: WrappedValue | None = None) -> Any:
    sequence.track_items()
    _store(sequence, [])
    return wrap_const(None) if iterable is None else _extend(sequence, iterable)


@of_builtin(list.__iadd__)
def _iadd(sequence: WrappedValue, iterable: WrappedValue) -> Any:
    extended = _extend(sequence, iterable)
    return extended if extended is EXCEPTION_RAISED else sequence


@of_builtin(list.insert)
def _insert(sequence: WrappedValue, index: WrappedValue, value: WrappedValue) -> Any:
    sequence.track_items()
    inserted = done(list.insert, sequence.value, index.value, value.value)
    if inserted is EXCEPTION_RAISED:
        return inserted
    sequence.item_wrappers.insert(operator.index(index.value), value)  # type: ignore[union-attr]
    return wrap_const(None)


@of_builtin(list.pop)
def _pop(sequence: WrappedValue, index: WrappedValue | None = None) -> Any:
    sequence.track_items()
    index = wrap_const(-1) if index is None else index
    if not stored.length(sequence.value):
        return do_raise(IndexError("pop from empty list"))
    place = _place(sequence, index)
    if place is EXCEPTION_RAISED:
        return place
    found = element(sequence, place)
    _delitem(sequence, wrap_const(place))
    return found


@of_builtin(list.remove)
def _remove(sequence: WrappedValue, value: WrappedValue) -> Any:
    found = _bounded(sequence, value)
    if found is EXCEPTION_RAISED:
        return found
    if found.value is None:
        return do_raise(ValueError("list.remove(x): x not in list"))
    return _delitem(sequence, found)


@of_builtin(list.clear)
def _clear(sequence: WrappedValue) -> Any:
    sequence.track_items()
    _store(sequence, [])
    return wrap_const(None)


@of_builtin(list.reverse)
def _reverse(sequence: WrappedValue) -> Any:
    _store(sequence, _elements(sequence)[::-1])
    return wrap_const(None)


@of_builtin(list.sort)
def _sort(sequence: WrappedValue, *, key: WrappedValue | None = None, reverse: WrappedValue | None = None) -> Any:
    wrappers = _elements(sequence)
    order = order_of(wrappers, key, reverse)
    if order is EXCEPTION_RAISED:
        return order
    _store(sequence, [wrappers[i] for i in order])
    return wrap_const(None)


# -- new ones -----------------------------------------------------------------------------------------------------------------


@of_builtin(list.copy)
def _copy(sequence: WrappedValue) -> Any:
    return _plain(list, _elements(sequence))


def _is_no_tuple(sequence: WrappedValue) -> bool:
    """Whether it is a list or a named tuple, which Thunder joins without ways to tensors that one held before the call, or makes again."""
    return type(sequence.value) is not tuple


@of_builtin(list.__add__, tuple.__add__, also=_is_no_tuple)
def _add(sequence: WrappedValue, other: WrappedValue) -> Any:
    base = _base(sequence)
    if not isinstance(other.value, base):
        return do_raise(
            TypeError(f'can only concatenate {base.__name__} (not "{type(other.value).__name__}") to {base.__name__}')
        )
    return _plain(base, [*_elements(sequence), *_elements(other)])


@of_builtin(list.__mul__, list.__rmul__, tuple.__mul__, tuple.__rmul__, also=_is_no_tuple)
def _mul(sequence: WrappedValue, times: WrappedValue) -> Any:
    if not hasattr(type(times.value), "__index__"):
        return wrap_const(NotImplemented)
    return _plain(_base(sequence), _elements(sequence) * operator.index(times.value))


@of_builtin(list.__imul__)
def _imul(sequence: WrappedValue, times: WrappedValue) -> Any:
    if not hasattr(type(times.value), "__index__"):
        return wrap_const(NotImplemented)
    _store(sequence, _elements(sequence) * operator.index(times.value))
    return sequence


@instead_of(stored.length)
def _length(value: WrappedValue) -> Any:
    """``len`` as functions of Thunder's that are interpreted have it meanwhile."""
    return thunders._interpret_call(len, value)


for _base_ in (list, tuple):
    for _name_ in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
        of_builtin(getattr(_base_, _name_))(interpreter_needs_wrap(getattr(_base_, _name_)))
