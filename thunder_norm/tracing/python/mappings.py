"""Dicts: their views, keys, and methods of which Thunder's interpreter has others.

Its views of a dict know how to iterate and nothing else: ``if d.keys()`` was always true, and two views were never equal.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import operator
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from typing import Any

from thunder_norm.tracing import lookasides
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.member_dicts import work_on_copy
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core import jit_ext
from thunder.core.interpreter import (
    InterpreterStack,
    MappingItemsIterator,
    MappingItemsWrapper,
    MappingKeysView,
    MappingValuesIterator,
    MappingValuesWrapper,
    MutMappingWrapperMethods,
    WrappedValue,
    do_raise,
    unwrap,
    wrap_const,
    wrapped_build_tuple,
)


class _SetOfView(Set):
    """A view that is a set; what operations on it return are sets."""

    _mapping: Mapping
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set:  # type: ignore[override]
        return set(it)

    def __len__(self) -> int:
        return dict.__len__(self._mapping)  # type: ignore[arg-type]


class Keys(MappingKeysView, _SetOfView):
    """What ``d.keys()`` is: iterates as Thunder's does, and is a set as Python's is."""

    def __iter__(self) -> Iterator[Any]:  # as Python's own functions in C call it; the interpreter calls Thunder's
        return iter(self._mapping)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self._mapping, key)  # type: ignore[arg-type]


class Items(MappingItemsWrapper, _SetOfView):
    """What ``d.items()`` is."""

    def __contains__(self, item: Any) -> bool:
        key, value = item
        if not dict.__contains__(self._mapping, key):  # type: ignore[arg-type]
            return False
        found = dict.__getitem__(self._mapping, key)  # type: ignore[arg-type]
        return found is value or found == value

    def __reversed__(self) -> Iterator[Any]:
        return MappingItemsIterator(self._mapping, True)


class Values(MappingValuesWrapper):
    """What ``d.values()`` is."""

    def __len__(self) -> int:
        return dict.__len__(self._mapping)  # type: ignore[arg-type]

    def __contains__(self, value: object) -> bool:
        return any(v is value or v == value for v in self)

    def __reversed__(self) -> Iterator[Any]:
        return MappingValuesIterator(self._mapping, True)


instead_of(Keys.__iter__)(MappingKeysView.__iter__)
# not bases of theirs: `_mapping` is a slot there, which what Thunder does to objects that were there before leaves unset
KeysView.register(Keys)
ItemsView.register(Items)
ValuesView.register(Values)

_handlers = thunders._default_opcode_handler_map
_CONST_KEYS = ("BUILD_CONST_KEY_MAP",)  # which Python 3.14 has no more
_thunders_const_key_map: Any = _handlers.get("BUILD_CONST_KEY_MAP")
# where the keys lie on the stack, or the elements of a set, counted from its top; the value of a key lies on it
_HASHED = {
    "BUILD_MAP": lambda count: range(2 * count, 1, -2),
    "BUILD_SET": lambda count: range(1, count + 1),
    "MAP_ADD": lambda _: (2,),
    "SET_ADD": lambda _: (1,),
    "SET_UPDATE": lambda _: (1,),
}


def _hashing(opname: str) -> Any:
    """The handler of ``{key: value}``, ``{element}`` and the like, which Thunder makes natively."""
    build = _handlers[opname]

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
        places = _HASHED[opname](inst.arg)
        if (known := guards.known_numbers()) is not None:  # of a tensor's number Thunder would hash what stands for it
            try:
                for place in places:
                    value = stack.getitem_wrapped(-place).value
                    if (number := known(value)) is not value:
                        stack[-place] = number
            except Exception as e:  # noqa: BLE001 - why it is refused
                return thunders.do_raise(e)
        guards.look_at_keys([stack.getitem_wrapped(-place) for place in places])
        items = [(_key_on(stack, -place), stack.getitem_wrapped(1 - place)) for place in places] if "MAP" in opname else []
        try:
            is_there = opname == "MAP_ADD" and unwrap(items[0][0]) in stack[-inst.arg - 2]
            build(inst, stack=stack, **state)
        except TypeError as e:  # a key that cannot be hashed
            return thunders.do_raise(e)
        if items:
            _note_items(stack.getitem_wrapped(-inst.arg if opname == "MAP_ADD" else -1), items, is_there)
        return None

    return handler


def _build_const_key_map(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> None:
    assert inst.arg is not None
    items = [(key, stack.getitem_wrapped(place - inst.arg - 1)) for place, key in enumerate(stack[-1])]
    _thunders_const_key_map(inst, stack=stack, **state)
    _note_items(stack.getitem_wrapped(-1), items)


def _note_items(mapping: WrappedValue, items: Iterable[tuple[Any, WrappedValue]], is_there: bool = False) -> None:
    """Have a dict know of what its values are: of one that holds a list of the call, which list to return.

    Args:
        mapping: the dict.
        items: what was put into it, as `_key_on` has the keys.
        is_there: whether it had the key before: the first of equal keys is kept.
    """
    first: dict[Any, Any] = {}
    for key, value in items:
        mapping.item_wrappers[unwrap(key)] = value  # type: ignore[index]
        first.setdefault(unwrap(key), key)
    for found, key in () if is_there else first.items():
        mapping.key_wrappers[found] = wrap_const(key)


def _key_on(stack: InterpreterStack, place: int) -> Any:
    """A key that lies on the stack: an object that the program has made, which may hold tensors, with what is known of it."""
    key = stack.getitem_wrapped(place)
    is_constant = isinstance(key.value, type | enum.Enum) or not hasattr(key.value, "__dict__")
    return stack[place] if is_constant or guards.path_of(key.provenance) is not None else key


REPLACEMENTS = (
    *(Replacement(_handlers, name, _hashing(name), "_build_map_handler and its likes: {k: v for ...}") for name in _HASHED),
    *(
        Replacement(_handlers, name, _build_const_key_map, "_build_const_key_map_handler")
        for name in _CONST_KEYS
        if name in _handlers
    ),
    Replacement(thunders, "MappingKeysView", Keys, "MutMappingWrapperMethods.keys"),
    Replacement(thunders, "MappingValuesWrapper", Values, "MutMappingWrapperMethods.values"),
    Replacement(thunders, "MappingItemsWrapper", Items, "MutMappingWrapperMethods.items"),
)


@instead_of(dict.__init__)
@instead_of(dict.update)
@instead_of(OrderedDict.__init__)
@instead_of(OrderedDict.update)
def _update(mapping: WrappedValue, /, *other: WrappedValue, **named: WrappedValue) -> Any:
    """Thunder's drops errors of what a new dict is given, and takes no key ``self``."""
    updated = MutMappingWrapperMethods.update(mapping, *other)
    if updated is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return updated
    for key, value in named.items():
        set_item = thunders._interpret_call(operator.setitem, mapping, wrap_const(key), value)
        if set_item is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return set_item
    return wrap_const(None)


def _with_keys(cls: type[dict], keys: Iterable, value: Any = None) -> dict:
    made = cls()
    for key in keys:
        made[key] = value
    return made


for _cls in (dict, OrderedDict, collections.defaultdict):
    instead_of(_cls.fromkeys)(
        lambda *args, _cls=_cls, **named: thunders._interpret_call(_with_keys, wrap_const(_cls), *args, **named)
    )


@instead_of(dict.clear)
@instead_of(OrderedDict.clear)
def _clear(mapping: WrappedValue) -> Any:
    MutMappingWrapperMethods.clear(mapping)
    return wrap_const(None)


@instead_of(dict.popitem)
def _popitem(mapping: WrappedValue) -> Any:
    return _popped(mapping, next(reversed(mapping.value), None))


@instead_of(OrderedDict.popitem)
def _popitem_of_ordered(mapping: WrappedValue, last: WrappedValue | None = None) -> Any:
    is_last = last is None or bool(last.value)
    return _popped(mapping, next(reversed(mapping.value) if is_last else iter(mapping.value), None))


def _popped(mapping: WrappedValue, key: Any) -> Any:
    if not mapping.value:
        return do_raise(KeyError("popitem(): dictionary is empty"))
    mapping.track_items()
    found = wrapped_build_tuple([mapping.key_wrappers[key], mapping.item_wrappers[key]])
    (OrderedDict if isinstance(mapping.value, OrderedDict) else dict).__delitem__(mapping.value, key)
    del mapping.key_wrappers[key], mapping.item_wrappers[key]
    return found


@instead_of(OrderedDict.move_to_end)
def _move_to_end(mapping: WrappedValue, key: WrappedValue, last: WrappedValue | None = None) -> Any:
    mapping.track_items()
    try:
        OrderedDict.move_to_end(mapping.value, key.value, last is None or bool(last.value))
    except Exception as e:
        return do_raise(e)
    return wrap_const(None)


def _taking_out(own: Any, mapping: WrappedValue, *args: WrappedValue) -> Any:
    work_on_copy(mapping)
    return own(mapping, *args)


for _name in ("__delitem__", "pop", "popitem", "clear"):
    _method = getattr(dict, _name)
    _own = lookasides.of_others(_method) or getattr(MutMappingWrapperMethods, _name)
    instead_of(_method)(functools.partial(_taking_out, _own))


def _set_item(own: Any, mapping: WrappedValue, key: WrappedValue, value: WrappedValue) -> Any:
    """Python keeps the first of equal keys (``d[1]``, then ``d[True]``), Thunder's the last for what it iterates over."""
    mapping.track_items()
    try:
        first = mapping.key_wrappers.get(key.value)
    except Exception as e:  # noqa: BLE001 - of its ``__hash__`` or ``__eq__``
        return do_raise(e)
    done = own(mapping, key, value)
    if first is not None and done is not thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        mapping.key_wrappers[key.value] = first
    return done


for _method in (dict.__setitem__, OrderedDict.__setitem__):
    instead_of(_method)(functools.partial(_set_item, jit_ext._general_jit_lookaside_map[_method]))


@instead_of(dict.fromkeys)
def _from_keys(keys: WrappedValue, value: WrappedValue | None = None) -> Any:
    return thunders._interpret_call(_made_from_keys, keys, wrap_const(None) if value is None else value)


def _made_from_keys(keys: Iterable[Any], value: Any) -> dict[Any, Any]:
    return {key: value for key in keys}  # noqa: C420 - which is what this does


@instead_of(collections._count_elements)  # type: ignore[attr-defined]
def _count(mapping: WrappedValue, elements: WrappedValue) -> Any:
    """What `collections.Counter` counts with, in C: items that it makes are unknown to the interpreter."""
    return thunders._interpret_call(_count_elements, mapping, elements)


def _count_elements(mapping: collections.Counter, elements: Iterable[Any]) -> None:
    for element in elements:
        mapping[element] = mapping.get(element, 0) + 1
