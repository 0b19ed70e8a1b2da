"""Attributes that somebody has set on wrappers which a program is given, besides what their classes put them together with."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Iterator
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.wrapper_classes import flattened
from thunder.core.interpreter import ProvenanceRecord, WrappedValue, unwrap, wrap_attribute

DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_ABSENT = object()
_MOST_LEVELS = 8  # of data in data: what goes deeper may hold itself


def take_over(acquisition: Acquisition, fake: torch.Tensor, real: torch.Tensor, history: ProvenanceRecord | None) -> None:
    """Give the fake of an input the data that somebody has set on it besides what its class puts it together with.

    That may be the class itself, whose ``__tensor_flatten__`` leaves it out: operations read it all the same.  The trace serves inputs that
    have the same, whatever is not in the context.
    """
    known, told = own_of(fake), None
    for name, value in own_of(real).items():
        what = contents(value)
        if what is None:
            continue
        if contents(known.get(name, _ABSENT)) != what:
            object.__setattr__(fake, name, value if isinstance(value, DATA) else copy.deepcopy(value))
            note_data(history, name, value)
            continue
        told = set(_parts(flattened(real)[1])) if told is None else told
        if what not in told:
            note_data(history, name, value)
    for name in known.keys() - own_of(real).keys():
        object.__delattr__(fake, name)
        if history is not None:
            guards.note_at(history, "has", name, False)
    if not is_jagged_class(type(fake)):
        acquisition.wrappers.before[id(fake)] = own_of(fake)


def contents(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """What data is, with all that is in it, to be compared; None for what is no data: tensors, functions, and all that holds some."""
    kind = type(value)
    if isinstance(value, float | complex):
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    if isinstance(value, DATA):
        return kind, value
    if not levels:
        return None
    if isinstance(value, tuple | list):
        parts = [contents(v, levels - 1) for v in value]
    elif isinstance(value, set | frozenset):
        parts = [contents(v, levels - 1) for v in value]
        return None if None in parts else (kind, frozenset(parts))
    elif isinstance(value, dict):
        parts = [contents(v, levels - 1) for entry in value.items() for v in entry]
    elif _is_plain_object(value):
        parts = [contents(v, levels - 1) for entry in vars(value).items() for v in entry]
    else:
        return None
    return None if None in parts else (kind, tuple(parts))


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a class of Python's, which is what its attributes are."""
    own = getattr(value, "__dict__", None)
    return type(own) is dict and not isinstance(value, type | torch.Tensor | torch.nn.Module) and not callable(value)


def _parts(value: Any, levels: int = _MOST_LEVELS) -> Iterator[Any]:
    """The description of a context, and of all that is in it."""
    yield contents(value)
    if isinstance(value, DATA) or not levels:
        return
    if isinstance(value, tuple | list | set | frozenset):
        held: list[Any] = list(value)
    elif isinstance(value, dict):
        held = list(value.values())
    else:
        held = list(vars(value).values()) if _is_plain_object(value) else []
    for v in held:
        yield from _parts(v, levels - 1)


def _has_contents(what: Any, value: Any) -> bool:
    return contents(value) == what


def note_data(history: ProvenanceRecord | None, name: str, value: Any) -> None:
    """Have later calls find the same data in an attribute of an input."""
    if history is not None:
        is_same = same_as(value) if isinstance(value, DATA) else functools.partial(_has_contents, contents(value))
        guards.note_at(history, "own attribute", name, is_same)


def data_of(x: torch.Tensor) -> dict[str, Any]:
    """The attributes of a wrapper that are data; none of a nested tensor's, which are torch's."""
    return {name: value for name, value in own_of(x).items() if isinstance(value, DATA)}


def own_of(x: torch.Tensor) -> dict[str, Any]:
    """All attributes of a wrapper, but those in which torch keeps sizes that a class says itself."""
    own = {} if is_jagged_class(type(x)) else getattr(x, "__dict__", {})
    return {name: value for name, value in own.items() if not name.startswith("_sym_")}


def of_user(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> WrappedValue | None:
    """An object or tensor of an input, which its class does not put it together with; None if there is none."""
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
    if hasattr(type(fake), attribute) or is_jagged_class(type(fake)):
        return _ABSENT
    found = getattr(real, "__dict__", {}).get(attribute, _ABSENT)
    if attribute in vars(fake) and (found is vars(fake)[attribute] or isinstance(found, DATA) or contents(found) is None):
        return _ABSENT  # what a class is put together with is the same for both, or a tensor
    if attribute in vars(fake):
        object.__setattr__(fake, attribute, found)  # what the program puts into it, operations find there
        if _is_plain_object(found):
            acquisition.wrappers.handed_out[id(vars(found))] = (found, attribute)
    if history is not None:
        guards.note_at(history, "has", attribute, found is not _ABSENT)
    return found


def check_left_alone(acquisition: Acquisition, ctx: Any) -> None:
    """Refuse a program that sets attributes of an object that a class leaves out of its context: operations would not find them there.

    Raises:
        UnsupportedOpError: says which.
    """
    for changed, settings in ctx._additional_outputs.items():
        found = acquisition.wrappers.handed_out.get(id(changed.original_value))
        if found is not None and settings:
            raise UnsupportedOpError(
                with_details(
                    f"attribute {settings[-1][2].value!r} of a {type(found[0]).__name__} is set, which is {found[1]!r} of a wrapper",
                    why="the class leaves it out of what __tensor_flatten__ says, and operations may read it",
                    instead="set another object, or have __tensor_flatten__ name it in the context",
                )
            )
