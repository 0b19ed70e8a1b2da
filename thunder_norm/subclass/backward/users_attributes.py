"""Attributes that somebody has set on wrappers which a program is given, besides what their classes put them together with."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.snapshots import same_as
from thunder_norm.tracing.torch_functions.tensor_attributes import place_of_attribute
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import flattened, is_wrapper, keeps_to_itself
from thunder.core.interpreter import ProvenanceRecord, WrappedValue, unwrap, wrap, wrap_attribute
from thunder.core.jit_ext import get_jit_ctx

DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
# Of these data that are equal and of one type are the same.
_COMPARED = tuple(kind for kind in DATA if kind not in (float, complex))
_CONTAINERS = (list, dict, set)  # which the program may write into
_ABSENT = object()
_OF_SIZES = "_sym_"  # the names of those in which torch keeps sizes that a class says itself
_MOST_LEVELS = 8  # of data in data: what goes deeper may hold itself


def take_over(acquisition: Acquisition, fake: torch.Tensor, real: torch.Tensor, history: ProvenanceRecord | None) -> None:
    """Give the fake of an input the data that somebody has set on it besides what its class puts it together with.

    That may be the class itself, whose ``__tensor_flatten__`` leaves it out: operations read it all the same.  The trace serves inputs that
    have the same, whatever is not in the context.
    """
    own, known = own_of(real), own_of(fake)
    parts, is_read = flattened(real)[0], not keeps_to_itself(type(real))
    given, simple = {}, {}
    for name, value in own.items():
        what = contents(value)
        if what is None:
            if name in parts:
                _take_over_of_part(acquisition, known.get(name), value, history, name)
            elif is_read and (name not in known or contents(known[name]) is not None):
                if history is not None and flat_tensors(value):
                    given[name] = value, history
                elif callable(value):
                    object.__setattr__(fake, name, value)
                else:
                    continue
                _note_own(history, name, value)
            continue
        if contents(known.get(name, _ABSENT)) != what:
            object.__setattr__(fake, name, value if isinstance(value, DATA) else copy.deepcopy(value))
        if isinstance(value, _COMPARED):
            simple[name] = value
        else:
            note_data(history, name, value)
    for name in known.keys() - own.keys():
        object.__delattr__(fake, name)
    if is_jagged_class(type(fake)):
        return
    if history is not None and is_read:
        guards.note_at(history, "own state", "attributes", _have(len(own), simple))
    acquisition.wrappers.before[id(fake)] = own_of(fake)
    if given:
        acquisition.wrappers.beside[id(fake)] = given


def _have(number: int, expected: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Whether a wrapper has so many attributes, and these among them: a further one would go before what its class says."""
    values, kinds = list(expected.values()), list(map(type, expected.values()))

    def have(own: dict[str, Any]) -> bool:
        if len(own) != number and sum(not name.startswith(_OF_SIZES) for name in own) != number:
            return False
        found = [own.get(name) for name in expected]
        return found == values and list(map(type, found)) == kinds

    return have


def _take_over_of_part(acquisition: Acquisition, fake: Any, real: Any, history: ProvenanceRecord | None, name: str) -> None:
    """The same for a wrapper inside of one."""
    if isinstance(fake, torch.Tensor) and is_wrapper(real) and history is not None:
        history = place_of_attribute(history, name)
        acquisition.wrappers.parts[id(fake)] = real, history
        take_over(acquisition, fake, real, history)


def give_tensors(acquisition: Acquisition, given: Any) -> list[Any]:
    """Give the fakes among what an operation is given the tensors that somebody has set on their inputs: the program has these too, then."""
    return [v for p in tree_leaves(given) if isinstance(p, SubclassProxy) for v in _give_tensors(acquisition, p.fake)]


def _give_tensors(acquisition: Acquisition, fake: torch.Tensor) -> Iterator[Any]:
    beside = acquisition.wrappers.beside.get(id(fake), {})
    for name, (value, history) in list(beside.items()):
        if not isinstance(value, list | dict):  # which the program may write into
            del beside[name]
        if name in acquisition.wrappers.attributes.get(id(fake), ()):
            continue  # the program has set another
        wrapped = acquisition.wrappers.taken.get((id(fake), name))
        if wrapped is None:
            wrapped = acquisition.wrappers.taken[id(fake), name] = wrap(value, provenance=place_of_attribute(history, name))
        held = _with_proxies(wrapped)
        now = acquisition.to_fake(held)
        object.__setattr__(fake, name, now)
        acquisition.wrappers.before[id(fake)][name] = now
        yield held
    if not beside:
        acquisition.wrappers.beside.pop(id(fake), None)
    for part in flattened(fake)[0].values():
        if is_wrapper(part):
            yield from _give_tensors(acquisition, part)


def _with_proxies(wrapped: WrappedValue) -> Any:
    """What is wrapped, with proxies for its tensors; a list or a dict stays what the program writes into."""
    value = wrapped.value
    if isinstance(value, torch.Tensor):
        get_jit_ctx().proxify(wrapped)
        return wrapped.value
    if not isinstance(value, list | tuple | dict):
        return value
    wrapped.track_items()
    if isinstance(value, dict):
        return {key: _with_proxies(v) for key, v in wrapped.item_wrappers.items()}
    items = [_with_proxies(v) for v in wrapped.item_wrappers]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


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


def with_own_data(given: Any, mapped: Any) -> Any:
    """What a program gives a class, as operations see it, with the program's own lists and dicts where they are data."""
    if isinstance(given, _CONTAINERS) and contents(given) is not None:
        return given
    if type(given) is tuple or type(given) is list:
        return type(given)(map(with_own_data, given, mapped))
    return {k: with_own_data(given[k], v) for k, v in mapped.items()} if type(given) is dict else mapped


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a class of Python's, which is what its attributes are."""
    own = getattr(value, "__dict__", None)
    return type(own) is dict and not isinstance(value, type | torch.Tensor | torch.nn.Module) and not callable(value)


def _has_contents(what: Any, value: Any) -> bool:
    return contents(value) == what


def _note_own(history: ProvenanceRecord | None, name: str, value: Any) -> None:
    """Have later calls find in an attribute what holds tensors alike, or the same function."""
    if history is not None:
        guards.note_at(history, "own attribute", name, same_as(value))


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
    return {name: value for name, value in own.items() if not name.startswith(_OF_SIZES)}


def of_user(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> WrappedValue | None:
    """An object or tensor of an input, which its class does not put it together with; None if there is none."""
    fake, attribute = obj.value.fake, unwrap(name)
    if attribute in acquisition.wrappers.attributes.get(id(fake), ()):
        return _set_by_program(acquisition, fake, attribute)
    place = id(fake), attribute
    if place not in acquisition.wrappers.taken:
        found = _found(acquisition, obj, attribute)
        if found is _ABSENT:
            return None
        _, history = acquisition.wrappers.parts.get(id(fake), (None, obj.value.history))
        acquisition.wrappers.taken[place] = (
            wrap_attribute(found, obj, name)
            if history is None
            else wrap(found, provenance=place_of_attribute(history, attribute))
        )
    return acquisition.wrappers.taken[place]


def _set_by_program(acquisition: Acquisition, fake: torch.Tensor, attribute: str) -> WrappedValue | None:
    """The object that the program has set, which it may write into; None where it is a tensor or data, or operations have set another."""
    new, wrapped = acquisition.wrappers.attributes[id(fake)][attribute]
    is_object = wrapped is not None and not isinstance(new, (torch.Tensor, *DATA))
    return wrapped if is_object and vars(fake).get(attribute, _ABSENT) is new else None


def is_there(acquisition: Acquisition, obj: WrappedValue, name: WrappedValue) -> bool:
    """Whether there is one of `of_user`."""
    return _found(acquisition, obj, unwrap(name)) is not _ABSENT


def _found(acquisition: Acquisition, obj: WrappedValue, attribute: str) -> Any:
    """It, or that there is none; what is asked is noted."""
    fake = obj.value.fake
    real, history = acquisition.wrappers.parts.get(id(fake)) or (acquisition.fakes.real_input(obj.value), obj.value.history)
    if real is None or attribute in acquisition.wrappers.attributes.get(id(fake), ()):
        return _ABSENT
    before = acquisition.wrappers.before.get(id(fake), {})
    if attribute in before and isinstance(before[attribute], DATA):
        note_data(history, attribute, before[attribute])
    if is_jagged_class(type(fake)) or _goes_first(type(fake), attribute):
        return _ABSENT
    found, own = own_of(real).get(attribute, _ABSENT), vars(fake).get(attribute, _ABSENT)
    if own is not _ABSENT:
        is_changed = own is not before.get(attribute, _ABSENT)  # by an operation
        is_data = contents(found) is not None
        is_known = found is own and not (is_data and isinstance(found, _CONTAINERS))
        if is_changed or is_known or isinstance(found, DATA) or attribute in flattened(real)[0]:
            return _ABSENT
        if is_data:
            object.__setattr__(fake, attribute, found)  # what the program puts into it, operations find there
            before[attribute] = found
            if _is_plain_object(found):
                acquisition.wrappers.handed_out[id(vars(found))] = (found, attribute)
    elif found is _ABSENT and hasattr(type(fake), attribute):
        return _ABSENT
    if history is not None:
        guards.note_at(history, "has", attribute, found is not _ABSENT)
    return found


def _goes_first(cls: type, attribute: str) -> bool:
    """Whether what a class has under a name goes before what the instance holds."""
    found = next((vars(base)[attribute] for base in cls.__mro__ if attribute in vars(base)), None)
    return hasattr(type(found), "__set__")


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
