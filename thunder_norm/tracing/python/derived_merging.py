"""One dict into another, and copies, where one of the two is of a class with methods of its own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.python.derived import EXCEPTION_RAISED, entry, of_builtin
from thunder_norm.tracing.python.derived_mappings import set_item
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, do_raise, interpreter_needs_wrap, wrap_const


def _set_from_keys(mapping: dict, other: Any) -> None:
    for key in other.keys():  # noqa: SIM118 - which is what C asks for
        dict.__setitem__(mapping, key, other[key])


def _set_from_pairs(mapping: dict, other: Any) -> None:
    for key, value in other:
        dict.__setitem__(mapping, key, value)


def _put_from_keys(mapping: Any, other: Any) -> None:
    for key in other.keys():  # noqa: SIM118 - the same
        mapping[key] = other[key]


def _put_from_pairs(mapping: Any, other: Any) -> None:
    for key, value in other:
        mapping[key] = value


def _put(mapping: Any, key: Any, value: Any) -> None:
    mapping[key] = value


def _asks(value: Any, name: str) -> bool:
    return hasattr(type(value), name) or hasattr(value, name)


def _given(other: WrappedValue) -> list[tuple[WrappedValue, WrappedValue]]:
    """Keys and values of a dict, as C takes them from what it stores."""
    other.track_items()
    return [(other.key_wrappers[k], entry(other, k)) for k in stored.keys(other.value)]


def _merge(mapping: WrappedValue, other: WrappedValue | None, named: dict[str, WrappedValue]) -> Any:
    """``dict.update``: it stores by itself, and takes from a dict that iterates as a dict what that stores."""
    if other is not None:
        kind = type(other.value)
        if issubclass(kind, dict) and kind.__iter__ is dict.__iter__:
            for key, value in _given(other):
                if set_item(mapping, key, value) is EXCEPTION_RAISED:
                    return EXCEPTION_RAISED
        else:
            way = _set_from_keys if _asks(other.value, "keys") else _set_from_pairs
            if thunders._interpret_call(way, mapping, other) is EXCEPTION_RAISED:
                return EXCEPTION_RAISED
    for name, value in named.items():
        if set_item(mapping, wrap_const(name), value) is EXCEPTION_RAISED:
            return EXCEPTION_RAISED
    return wrap_const(None)


def _put_all(mapping: WrappedValue, other: WrappedValue | None, named: dict[str, WrappedValue]) -> Any:
    """``OrderedDict.update``: it stores by ``self[key] = value``."""
    if other is not None and type(other.value) is dict:
        for key, value in _given(other):
            if thunders._interpret_call(_put, mapping, key, value) is EXCEPTION_RAISED:
                return EXCEPTION_RAISED
    elif other is not None:
        way = _put_from_keys if _asks(other.value, "keys") else _put_from_pairs
        if thunders._interpret_call(way, mapping, other) is EXCEPTION_RAISED:
            return EXCEPTION_RAISED
    for name, value in named.items():
        if thunders._interpret_call(_put, mapping, wrap_const(name), value) is EXCEPTION_RAISED:
            return EXCEPTION_RAISED
    return wrap_const(None)


def _updating(way: Any, name: str) -> Any:
    def update(mapping: WrappedValue, *other: WrappedValue, **named: WrappedValue) -> Any:
        if len(other) > 1:
            return do_raise(TypeError(f"{name} expected at most 1 argument, got {len(other)}"))
        mapping.track_items()
        return way(mapping, other[0] if other else None, named)

    return update


of_builtin(dict.update, dict.__init__)(_updating(_merge, "update"))
of_builtin(OrderedDict.update, OrderedDict.__init__)(_updating(_put_all, "update"))


@of_builtin(OrderedDict.setdefault)
def _setdefault_of_ordered(mapping: WrappedValue, key: WrappedValue, default: WrappedValue | None = None) -> Any:
    return thunders._interpret_call(_default_put, mapping, key, wrap_const(None) if default is None else default)


def _default_put(mapping: Any, key: Any, default: Any) -> Any:
    if key in mapping:
        return mapping[key]
    mapping[key] = default
    return default


# -- copies -------------------------------------------------------------------------------------------------------------------


@of_builtin(dict.copy)
def _copy(mapping: WrappedValue) -> Any:
    made = thunders._interpret_call(dict)
    if _merge_stored(made, mapping) is EXCEPTION_RAISED:
        return EXCEPTION_RAISED
    return made


def _merge_stored(made: WrappedValue, mapping: WrappedValue) -> Any:
    made.track_items()
    for key, value in _given(mapping):
        if set_item(made, key, value) is EXCEPTION_RAISED:
            return EXCEPTION_RAISED
    return None


@of_builtin(OrderedDict.copy)
def _copy_of_ordered(mapping: WrappedValue) -> Any:
    return thunders._interpret_call(_copied, mapping)


def _copied(mapping: Any) -> Any:
    made = type(mapping)()
    for key in OrderedDict.__iter__(mapping):
        made[key] = mapping[key]
    return made


def _not_implemented(a: WrappedValue, b: WrappedValue) -> bool:
    return not isinstance(a.value, dict) or not isinstance(b.value, dict)


def _union(first: WrappedValue, second: WrappedValue) -> Any:
    made = _copy(first)
    if made is EXCEPTION_RAISED or _merge(made, second, {}) is EXCEPTION_RAISED:
        return EXCEPTION_RAISED
    return made


@of_builtin(dict.__or__)
def _or(mapping: WrappedValue, other: WrappedValue) -> Any:
    return wrap_const(NotImplemented) if _not_implemented(mapping, other) else _union(mapping, other)


@of_builtin(dict.__ror__)
def _ror(mapping: WrappedValue, other: WrappedValue) -> Any:
    return wrap_const(NotImplemented) if _not_implemented(mapping, other) else _union(other, mapping)


def _union_of_ordered(kind: type, first: Any, second: Any) -> Any:
    made = kind(first)
    OrderedDict.update(made, second)
    return made


@of_builtin(OrderedDict.__or__)
def _or_of_ordered(mapping: WrappedValue, other: WrappedValue) -> Any:
    if _not_implemented(mapping, other):
        return wrap_const(NotImplemented)
    return thunders._interpret_call(_union_of_ordered, wrap_const(type(mapping.value)), mapping, other)


@of_builtin(OrderedDict.__ror__)
def _ror_of_ordered(mapping: WrappedValue, other: WrappedValue) -> Any:
    if _not_implemented(mapping, other):
        return wrap_const(NotImplemented)
    return thunders._interpret_call(_union_of_ordered, wrap_const(type(mapping.value)), other, mapping)


@of_builtin(dict.__ior__)
def _ior(mapping: WrappedValue, other: WrappedValue) -> Any:
    return mapping if _merge(mapping, other, {}) is not EXCEPTION_RAISED else EXCEPTION_RAISED


@of_builtin(OrderedDict.__ior__)
def _ior_of_ordered(mapping: WrappedValue, other: WrappedValue) -> Any:
    return mapping if _put_all(mapping, other, {}) is not EXCEPTION_RAISED else EXCEPTION_RAISED


for _comparison in (dict.__eq__, dict.__ne__, OrderedDict.__eq__, OrderedDict.__ne__):
    of_builtin(_comparison)(interpreter_needs_wrap(_comparison))
