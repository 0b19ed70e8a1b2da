"""Guards of which elements a container has, noted when the interpreter looks into it: how many, or under which keys."""

from __future__ import annotations

import array
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.tracing.guarding import stored, tensor_keys
from thunder_norm.tracing.guarding.guards import CONTAINERS, note
from thunder_norm.tracing.guarding.ways import is_another_key, note_key, path_of
from thunder_norm.tracing.replacement import Replacement, Replacements
from thunder.core import interpreter as thunders
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue

_MOST_KEYS = 256
OF_NUMBERS = (bytes, bytearray, memoryview, array.array)  # sequences in which no tensor is: they are guarded as they are
_with_own_methods: contextvars.ContextVar[list[type] | None] = contextvars.ContextVar("thunder_norm_contents", default=None)


@contextmanager
def noted() -> Iterator[list[type]]:
    """Note it meanwhile; yields a list of the classes that have methods of their own where the builtin class has one."""
    found: list[type] = []
    with setting(_with_own_methods, found), _REPLACEMENTS.in_place(), stored.IN_INTERPRETER.in_place():
        yield found


def _populate_item_wrappers(obj: WrappedValue) -> None:
    if isinstance(obj.value, OF_NUMBERS):  # which Thunder does not know
        obj.item_wrappers = []
        return
    if not obj.has_item_tracking:
        _note(obj)
    if not stored.has_own_methods(type(obj.value)):
        if isinstance(obj.value, dict) and any(isinstance(key, torch.Tensor) for key in obj.value):
            stored.populate(obj)
        else:
            _original_populate(obj)
        return
    found = _with_own_methods.get()
    if found is not None:
        found.append(type(obj.value))
    stored.populate(obj)


def _note(obj: WrappedValue) -> None:
    if type(obj.value) not in CONTAINERS:
        looked_at = stored.as_it_is(obj.value)
        if looked_at is not None:
            note(obj, "stored", None, looked_at)
    elif not isinstance(obj.value, dict):
        note(obj, "length", None, (type(obj.value), len(obj.value)))
    elif not obj.value:
        note(obj, "no keys", None, type(obj.value))
    elif any(isinstance(key, torch.Tensor) for key in obj.value):
        note(obj, "stored", None, stored.as_it_is(obj.value))
    elif len(obj.value) <= _MOST_KEYS:
        note(obj, "keys", None, (type(obj.value), tuple(obj.value)))
    if type(obj.value) in CONTAINERS and isinstance(obj.value, dict):
        for key, value in obj.value.items():
            if is_another_key(key) or isinstance(key, torch.Tensor):
                _populate_item_wrapper(value, obj, key)


def _populate_item_wrapper(value: Any, obj: WrappedValue, key: Any) -> None:
    """Note under which key an item stands that is no number or word: a prologue of Thunder's has no words for it."""
    held = key.value if isinstance(key, WrappedValue) else key
    if isinstance(held, torch.Tensor):
        tensor_keys.populate(obj, held, value)
        return
    if is_another_key(held) and held not in obj.item_wrappers and path_of(obj.provenance) is not None:
        if not isinstance(value, torch.Tensor):
            unknown = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[])
            record = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[obj.provenance, unknown])
            note_key(record, held)
            obj.item_wrappers[held] = thunders.wrap(value, provenance=record)
    _original_populate_one(value, obj, key)


def _args(given: WrappedValue) -> list[WrappedValue]:
    """What ``f(*given)`` takes from a list or tuple, by iteration; native equivalents of the interpreter have an own."""
    if stored.has_own_methods(type(given.value)):
        given = thunders._interpret_call(lambda given: [*given], given)  # type: ignore[assignment]
        if given is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            raise thunders.get_interpreterruntimectx().curexc  # type: ignore[misc]
    return _original_args(given)


_original_args = thunders.wrap_args_from_list
_original_populate = thunders.populate_item_wrappers
_original_populate_one = thunders.populate_single_dict_item_wrapper
_REPLACEMENTS = Replacements(
    (
        Replacement(
            thunders, "populate_item_wrappers", _populate_item_wrappers, "populate_item_wrappers, which looks into a container"
        ),
        Replacement(
            thunders,
            "populate_single_dict_item_wrapper",
            _populate_item_wrapper,
            "populate_single_dict_item_wrapper, which finds the wrapper of a key that is an object seen elsewhere",
        ),
        Replacement(thunders, "wrap_args_from_list", _args, "_call_function_ex_handler: args = wrap_args_from_list(args)"),
    )
)
