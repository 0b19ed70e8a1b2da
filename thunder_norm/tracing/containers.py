"""Lists and dicts of a program: what it does to one after an operation took it, and classes of dicts with items of their own making.

Thunder writes a list that an operation is given into the trace itself: what the program appends or puts there afterwards changes the
operation (``fs = [x]; y = torch.cat(fs); fs.append(y)``).
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thunder_norm.tracing import guards
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder_norm.tracing.snapshots import same_as
from thunder_norm.tracing.ways import is_another_key, note_key, path_of
from thunder.core import interpreter
from thunder.core.interpreter import MutMappingWrapperMethods, ProvenanceRecord, PseudoInst, SequenceIter, WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.symbol import BoundSymbol, Symbol

_MOST_KEYS = 256

_original_bind = Symbol.bind
_original_populate = interpreter.populate_item_wrappers
_original_populate_one = interpreter.populate_single_dict_item_wrapper
_thunders_item = MutMappingWrapperMethods.__getitem__
_thunders_deletion = MutMappingWrapperMethods.__delitem__
_thunders_reversed = interpreter._reversed_lookaside


def _bind(self: Symbol, *args: Any, output: Any, **kwargs: Any) -> BoundSymbol:
    """The bound symbol, with lists and dicts of its own."""
    kwargs = {name: value if name == "subsymbols" else _copied(value) for name, value in kwargs.items()}
    return _original_bind(self, *map(_copied, args), output=_copied(output), **kwargs)


def _copied(x: Any) -> Any:
    kind = type(x)
    if kind is list or kind is tuple:
        return kind(map(_copied, x))
    return {k: _copied(v) for k, v in x.items()} if kind is dict else x


def _populate_item_wrappers(obj: WrappedValue) -> None:
    if not obj.has_item_tracking and type(obj.value) in guards.CONTAINERS:
        if not isinstance(obj.value, dict):
            guards.note(obj, "length", None, (type(obj.value), len(obj.value)))
        elif not obj.value:
            guards.note(obj, "no keys", None, type(obj.value))
        elif len(obj.value) <= _MOST_KEYS:
            guards.note(obj, "keys", None, (type(obj.value), tuple(obj.value)))
        if isinstance(obj.value, dict):
            for key, value in obj.value.items():
                if is_another_key(key):
                    _populate_item_wrapper(value, obj, key)
    _original_populate(obj)


def _populate_item_wrapper(value: Any, obj: WrappedValue, key: Any) -> None:
    """Note under which key an item stands that is no number or word: a prologue of Thunder's has no words for it."""
    held = key.value if isinstance(key, WrappedValue) else key
    if is_another_key(held) and held not in obj.item_wrappers and path_of(obj.provenance) is not None:
        if not isinstance(value, torch.Tensor):
            unknown = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[])
            record = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[obj.provenance, unknown])
            note_key(record, held)
            obj.item_wrappers[held] = interpreter.wrap(value, provenance=record)
    _original_populate_one(value, obj, key)


KEPT = Replacements(
    (
        Replacement(Symbol, "bind", _bind, "Symbol.__call__: bsym = self.bind(*args, **kwargs, output=result"),
        Replacement(
            interpreter, "populate_item_wrappers", _populate_item_wrappers, "populate_item_wrappers, which looks into a container"
        ),
        Replacement(
            interpreter,
            "populate_single_dict_item_wrapper",
            _populate_item_wrapper,
            "populate_single_dict_item_wrapper, which finds the wrapper of a key that is an object seen elsewhere",
        ),
    )
)


@instead_of(vars)
def _vars(*objects: WrappedValue) -> Any:
    """``vars(obj)``: Thunder calls it natively, so that nothing guards what is in it."""
    if not objects:
        return interpreter._interpret_call(locals)
    return interpreter._interpret_call(getattr, objects[0], interpreter.wrap_const("__dict__"))


@instead_of(dict.__getitem__)
def _item(mapping: WrappedValue, key: WrappedValue) -> Any:
    """``super().__getitem__(key)`` in the ``__getitem__`` of a dict's subclass: Thunder calls that once more, and not as a program.

    Neither can the prologue look there as the program does; a guard compares what the dict itself has.
    """
    has_own = isinstance(getattr(type(mapping.value), "__getitem__", None), types.FunctionType)
    if not has_own or type(key.value) not in (str, int):
        return _thunders_item(mapping, key)
    try:
        value = dict.__getitem__(mapping.value, key.value)
    except Exception as e:
        return interpreter.do_raise(e)
    if not _is_constant(value):
        return _thunders_item(mapping, key)
    guards.note(mapping, "own item", key.value, same_as(value))
    return interpreter.wrap_const(value)


@instead_of(dict.__delitem__)
@instead_of(OrderedDict.__delitem__)
def _delete(mapping: WrappedValue, key: WrappedValue) -> Any:
    """``super().__delitem__(key)`` in the ``__delitem__``, or another method, of a dict's subclass: not the subclass's own."""
    if not isinstance(getattr(type(mapping.value), "__delitem__", None), types.FunctionType):
        return _thunders_deletion(mapping, key)
    mapping.track_items()
    try:
        (OrderedDict if isinstance(mapping.value, OrderedDict) else dict).__delitem__(mapping.value, key.value)
    except Exception as e:
        return interpreter.do_raise(e)
    for wrappers in (mapping.key_wrappers, mapping.item_wrappers):
        wrappers.pop(key.value, None)
    return interpreter.wrap_const(None)


@instead_of(reversed)
def _reversed(sequence: WrappedValue) -> Any:
    """``reversed(module_list)``: Thunder asks for a Sequence or a method, Python for a length and items alone."""
    kind = type(sequence.value)
    is_like_a_sequence = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if isinstance(sequence.value, Sequence | Mapping) or hasattr(kind, "__reversed__") or not is_like_a_sequence:
        return _thunders_reversed(sequence)
    return interpreter._interpret_call(lambda s: SequenceIter(s, is_reversed=True), sequence)


def take_proxies(*args: WrappedValue, **kwargs: WrappedValue) -> None:
    """Have proxies stand for the tensors among arguments, and for the lists and dicts that hold some.

    Thunder's own (``recursively_proxy``) looks into a dict's keys for its items.
    """
    for v in (*args, *kwargs.values()):
        _take_proxies(v)


def _take_proxies(v: WrappedValue) -> bool:
    """Whether one stands for it now."""
    is_container = isinstance(v.value, Sequence | dict) and not isinstance(v.value, str)
    if is_container:
        v.track_items()
        items = v.item_wrappers.values() if isinstance(v.item_wrappers, dict) else v.item_wrappers
        needs_one = any([_take_proxies(item) for item in items])
    else:
        needs_one = isinstance(v.value, torch.Tensor)
    if needs_one:
        get_jit_ctx().proxify(v)
    return v.original_value is not v.nothing


def _is_constant(x: Any) -> bool:
    if isinstance(x, list | tuple | dict):
        return all(map(_is_constant, x.values() if isinstance(x, dict) else x))
    return x is None or isinstance(x, type | types.FunctionType | types.BuiltinFunctionType | str | int | float)
