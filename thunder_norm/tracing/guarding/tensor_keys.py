"""Tensors of a model as keys of dicts that were there before the call: ``self.state[parameter]``.

A dict holds the tensors themselves, and what stands for one in a trace is another object.  So a key is looked up as the tensor that it is,
and what iterates over the keys is given what stands for it, which it may compute with.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards, stored
from thunder_norm.tracing.guarding.ways import note_key
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.provenances import Member, member_of_module, place_in_module
from thunder.core import interpreter as thunders
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue


def as_key(key: WrappedValue, real: torch.Tensor) -> WrappedValue:
    """What stands for a key where the tensor itself is looked up."""
    found = copy.copy(key)
    found.value, found.original_value = real, found.nothing
    return found


def populate(mapping: WrappedValue, key: torch.Tensor, value: Any) -> None:
    """Have something stand for the entry of a key; a tensor under one that nobody knows yet waits until the program looks it up."""
    member = _in_root(key)
    if member is not None or not isinstance(value, torch.Tensor):
        _enter(
            mapping, key, value, ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]) if member is None else place_in_module(member)
        )
        mapping.key_wrappers.setdefault(key, as_key(thunders.wrap_const(None), key))


def note_looked_up(mapping: WrappedValue, key: WrappedValue, real: torch.Tensor) -> None:
    """Note what stands for a key that the program looks up, and where a prologue finds it."""
    if not stored.contains(mapping.value, real):
        return
    history = key.value.history
    member = member_of_module(history)
    by = history if member is None else place_in_module(member)
    _enter(mapping, real, stored.item(mapping.value, real), by)
    mapping.key_wrappers[real] = key
    record = mapping.item_wrappers[real].provenance  # type: ignore[index]
    if record.inst is PseudoInst.BINARY_SUBSCR and record.inputs[1].inst is PseudoInst.LOOKASIDE:
        record.inputs[1] = by


def _enter(mapping: WrappedValue, key: torch.Tensor, value: Any, by: ProvenanceRecord) -> None:
    if key not in mapping.item_wrappers:  # type: ignore[operator]
        record = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[mapping.provenance, by])
        note_key(record, key)
        mapping.item_wrappers[key] = thunders.wrap(value, provenance=record)  # type: ignore[index]


def standing_for(mapping: WrappedValue, key: Any) -> Any:
    """What a program that iterates over the keys of a dict is given for one."""
    known = mapping.key_wrappers.get(key)
    if known is not None and not isinstance(known.value, torch.Tensor):
        return known
    member = _in_root(key)
    if member is None:
        return thunders.do_raise(_unknown())
    root = thunders.wrap(guards.roots()["fn"], provenance=member.root)
    return thunders._interpret_call(_member, root, thunders.wrap_const(".".join(member.names)))


def _in_root(key: torch.Tensor) -> Member | None:
    """Which parameter or buffer of the jitted module a tensor is."""
    root = guards.roots().get("fn")
    if not isinstance(root, torch.nn.Module):
        return None
    for table, members in (("_parameters", root.named_parameters()), ("_buffers", root.named_buffers())):
        name = next((name for name, member in members if member is key), None)
        if name is not None:
            return Member(table, name.split("."), ProvenanceRecord(PseudoInst.INPUT_FN, inputs=[]))
    return None


def _member(module: torch.nn.Module, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _unknown() -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            "the keys of a dict that was there before the call are iterated over, and one is a tensor",
            at=location_of_user(),
            why="it is no parameter or buffer of the jitted module, and the program has not looked it up before",
            instead="iterate over the parameters, and look each up",
        )
    )
