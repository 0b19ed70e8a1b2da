"""Attributes that somebody has set on wrappers which a program is given, besides what their classes put them together with."""

from __future__ import annotations

import enum
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import is_equal
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder.core.interpreter import ProvenanceRecord, WrappedValue, unwrap, wrap_attribute

DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_ABSENT = object()


def take_over(acquisition: Acquisition, fake: torch.Tensor, real: torch.Tensor, history: ProvenanceRecord | None) -> None:
    """Give the fake of an input the data that somebody has set on it besides what its class puts it together with.

    The trace serves inputs that have the same.
    """
    known = data_of(fake)
    for name, value in data_of(real).items():
        if not is_equal(known.get(name, _ABSENT), value):
            object.__setattr__(fake, name, value)
            note_data(history, name, value)
    if not is_jagged_class(type(fake)):
        acquisition.wrappers.before[id(fake)] = own_of(fake)


def note_data(history: ProvenanceRecord | None, name: str, value: Any) -> None:
    """Have later calls find the same data in an attribute of an input."""
    if history is not None:
        guards.note_at(history, "own attribute", name, same_as(value))


def data_of(x: torch.Tensor) -> dict[str, Any]:
    """The attributes of a wrapper that are data; none of a nested tensor's, which are torch's."""
    return {name: value for name, value in own_of(x).items() if isinstance(value, DATA)}


def own_of(x: torch.Tensor) -> dict[str, Any]:
    """All attributes of a wrapper, but those in which torch keeps sizes that a class says itself."""
    own = {} if is_jagged_class(type(x)) else getattr(x, "__dict__", {})
    return {name: value for name, value in own.items() if not name.startswith("_sym_")}


def of_user(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> WrappedValue | None:
    """An object or tensor that somebody has set on an input, which its class does not put it together with; None if there is none."""
    found = _found(acquisition, obj, unwrap(name))
    return None if found is _ABSENT else wrap_attribute(found, obj, name)


def is_there(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether there is one of `of_user`."""
    return _found(acquisition, obj, unwrap(name)) is not _ABSENT


def _found(acquisition: Acquisition, obj: WrappedValue, attribute: str) -> Any:
    """It, or that there is none; what is asked is noted."""
    fake, history = obj.value.fake, obj.value.history
    real = acquisition.fakes.real_input(obj.value)
    if real is None or attribute in acquisition.wrappers.attributes.get(id(fake), ()):
        return _ABSENT
    before = acquisition.wrappers.before.get(id(fake), {})
    if attribute in before and isinstance(before[attribute], DATA):
        note_data(history, attribute, before[attribute])
    if attribute in vars(fake) or hasattr(type(fake), attribute) or is_jagged_class(type(fake)):
        return _ABSENT
    found = getattr(real, "__dict__", {}).get(attribute, _ABSENT)
    if history is not None:
        guards.note_at(history, "has", attribute, found is not _ABSENT)
    return found
