"""Methods of dict and OrderedDict, of objects of classes with methods of their own."""

from __future__ import annotations

import collections
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.member_dicts import has_attribute, holds_attributes
from thunder_norm.tracing.python.derived import EXCEPTION_RAISED, done, entry, of_builtin
from thunder_norm.tracing.python.mappings import Items, Keys, Values
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import (
    MappingKeysIterator,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    populate_attribute_wrapper,
    wrap,
    wrap_const,
    wrapped_build_tuple,
)

_NONE = object()
_THERE_BEFORE = (PseudoInst.INPUT_FN, PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS, PseudoInst.CONSTANT)


def _base(mapping: WrappedValue) -> type[dict]:
    return OrderedDict if isinstance(mapping.value, OrderedDict) else dict


def _is_there(mapping: WrappedValue, key: WrappedValue) -> Any:
    """Whether a dict has a key, or the signal of an error of the key's."""
    mapping.track_items()
    return done(dict.__contains__, mapping.value, key.value)


# -- entries ------------------------------------------------------------------------------------------------------------------


@of_builtin(dict.__getitem__)
def _getitem(mapping: WrappedValue, key: WrappedValue) -> Any:
    is_there = _is_there(mapping, key)
    if is_there is EXCEPTION_RAISED:
        return is_there
    if is_there:
        return entry(mapping, key.value)
    missing = getattr(type(mapping.value), "__missing__", None)
    return do_raise(KeyError(key.value)) if missing is None else thunders._interpret_call(missing, mapping, key)


@instead_of(collections.defaultdict.__missing__)
def _default(mapping: WrappedValue, key: WrappedValue) -> Any:
    """What a defaultdict makes of its factory, which is the program's, and stores by ``self[key] = value``, as its C code does."""
    factory = thunders._interpret_call(getattr, mapping, wrap_const("default_factory"))
    if factory is EXCEPTION_RAISED:
        return factory
    return do_raise(KeyError(key.value)) if factory.value is None else thunders._interpret_call(_made, mapping, key, factory)


def _made(mapping: Any, key: Any, factory: Any) -> Any:
    value = factory()
    mapping[key] = value
    return value


def _is_of_new_module(mapping: WrappedValue) -> bool:
    """Whether it has the members of a module that the program has made: Thunder would write into a copy, as of modules that were there."""
    if not mapping.provenance.ext_flag & jit_ext.EXT_FLAG_IS_MODULE_MEMBER_DICT:
        return False
    of = mapping.provenance
    while of.inst in (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR):
        of = of.inputs[0]
    return of.inst not in _THERE_BEFORE


@of_builtin(dict.__setitem__, OrderedDict.__setitem__, also=_is_of_new_module)
def set_item(mapping: WrappedValue, key: WrappedValue, value: WrappedValue) -> Any:
    """``dict.__setitem__``, and what stands for the entry."""
    mapping.track_items()
    stored_ = done(_base(mapping).__setitem__, mapping.value, key.value, value.value)
    if stored_ is EXCEPTION_RAISED:
        return stored_
    mapping.key_wrappers.setdefault(key.value, key)
    mapping.item_wrappers[key.value] = value  # type: ignore[index]
    return wrap_const(None)


@of_builtin(dict.__delitem__, OrderedDict.__delitem__)
def _delitem(mapping: WrappedValue, key: WrappedValue) -> Any:
    mapping.track_items()
    deleted = done(_base(mapping).__delitem__, mapping.value, key.value)
    if deleted is EXCEPTION_RAISED:
        return deleted
    mapping.key_wrappers.pop(key.value, None)
    mapping.item_wrappers.pop(key.value, None)  # type: ignore[union-attr]
    return wrap_const(None)


@of_builtin(dict.__contains__, also=holds_attributes)
def _contains(mapping: WrappedValue, key: WrappedValue) -> Any:
    if (known := has_attribute(mapping, key)) is not None:
        return known
    found = _is_there(mapping, key)
    return found if found is EXCEPTION_RAISED else wrap_const(found)


@of_builtin(dict.__len__)
def _len(mapping: WrappedValue) -> Any:
    mapping.track_items()
    return wrap_const(dict.__len__(mapping.value))


@of_builtin(dict.get)
def _get(mapping: WrappedValue, key: WrappedValue, default: WrappedValue | None = None) -> Any:
    found = _is_there(mapping, key)
    if found is EXCEPTION_RAISED:
        return found
    return entry(mapping, key.value) if found else wrap_const(None) if default is None else default


@of_builtin(dict.pop, OrderedDict.pop)
def _pop(mapping: WrappedValue, key: WrappedValue, default: WrappedValue | None = None) -> Any:
    found = _is_there(mapping, key)
    if found is EXCEPTION_RAISED:
        return found
    if not found:
        return do_raise(KeyError(key.value)) if default is None else default
    value = entry(mapping, key.value)
    deleted = _delitem(mapping, key)
    return deleted if deleted is EXCEPTION_RAISED else value


@of_builtin(dict.popitem)
def _popitem(mapping: WrappedValue) -> Any:
    return _popped(mapping, next(_base(mapping).__reversed__(mapping.value), _NONE))


@of_builtin(OrderedDict.popitem)
def _popitem_of_ordered(mapping: WrappedValue, last: WrappedValue | None = None) -> Any:
    is_last = last is None or bool(last.value)
    order = OrderedDict.__reversed__ if is_last else OrderedDict.__iter__
    return _popped(mapping, next(order(mapping.value), _NONE))


def _popped(mapping: WrappedValue, key: Any) -> Any:
    if key is _NONE:
        return do_raise(KeyError("popitem(): dictionary is empty"))
    mapping.track_items()
    found = wrapped_build_tuple([mapping.key_wrappers[key], entry(mapping, key)])
    deleted = _delitem(mapping, mapping.key_wrappers[key])
    return deleted if deleted is EXCEPTION_RAISED else found


@of_builtin(dict.setdefault)
def _setdefault(mapping: WrappedValue, key: WrappedValue, default: WrappedValue | None = None) -> Any:
    found = _is_there(mapping, key)
    if found is EXCEPTION_RAISED:
        return found
    if found:
        return entry(mapping, key.value)
    value = wrap_const(None) if default is None else default
    done_ = set_item(mapping, key, value)
    return done_ if done_ is EXCEPTION_RAISED else value


@of_builtin(dict.clear, OrderedDict.clear)
def _clear(mapping: WrappedValue) -> Any:
    mapping.track_items()
    _base(mapping).clear(mapping.value)
    mapping.key_wrappers.clear()
    mapping.item_wrappers.clear()  # type: ignore[union-attr]
    return wrap_const(None)


# -- keys, and views ----------------------------------------------------------------------------------------------------------


def _iterator(mapping: WrappedValue, is_reversed: bool) -> WrappedValue:
    mapping.track_items()
    base = _base(mapping)
    order = (base.__reversed__ if is_reversed else base.__iter__)(mapping.value)
    record = ProvenanceRecord(PseudoInst.GET_ITER, inputs=[mapping.provenance])
    found = wrap(MappingKeysIterator(mapping.value, order), provenance=record)
    populate_attribute_wrapper(found, "_mapping", mapping)
    return found


@of_builtin(dict.__iter__, OrderedDict.__iter__)
def _iter(mapping: WrappedValue) -> Any:
    return _iterator(mapping, False)


@of_builtin(dict.__reversed__, OrderedDict.__reversed__)
def _reversed(mapping: WrappedValue) -> Any:
    return _iterator(mapping, True)


class _StoredKeys(Keys):
    """What ``dict.keys(d)`` is."""

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self._mapping)

    def __reversed__(self) -> Iterator[Any]:
        return dict.__reversed__(self._mapping)


class _Entries:
    """An iterator over the entries of a dict."""

    def __init__(self, mapping: dict, order: Iterator[Any]):
        self._mapping = mapping
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        key = next(self._order)
        return key, dict.__getitem__(self._mapping, key)


class _StoredValues(_Entries):
    """The same over the values alone."""

    def __next__(self) -> Any:
        return dict.__getitem__(self._mapping, next(self._order))


class _ItemsOfStored(Items):
    """What ``dict.items(d)`` is."""

    def __iter__(self) -> Iterator[Any]:
        return _Entries(self._mapping, dict.__iter__(self._mapping))

    def __reversed__(self) -> Iterator[Any]:
        return _Entries(self._mapping, dict.__reversed__(self._mapping))


class _ValuesOfStored(Values):
    """What ``dict.values(d)`` is."""

    def __iter__(self) -> Iterator[Any]:
        return _StoredValues(self._mapping, dict.__iter__(self._mapping))

    def __reversed__(self) -> Iterator[Any]:
        return _StoredValues(self._mapping, dict.__reversed__(self._mapping))


def _view(kind: type, mapping: WrappedValue) -> Any:
    mapping.track_items()
    return thunders._interpret_call(kind, mapping)


@of_builtin(dict.keys, OrderedDict.keys)
def _keys(mapping: WrappedValue) -> Any:
    return _view(_StoredKeys, mapping)


@of_builtin(dict.items, OrderedDict.items)
def _items(mapping: WrappedValue) -> Any:
    return _view(_ItemsOfStored, mapping)


@of_builtin(dict.values, OrderedDict.values)
def _values(mapping: WrappedValue) -> Any:
    return _view(_ValuesOfStored, mapping)
