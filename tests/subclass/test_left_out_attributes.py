"""Attributes that a class's ``__tensor_flatten__`` leaves out: the program, methods and operations read those of the object that is given."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


@dataclasses.dataclass(frozen=True)
class Notes:
    names: tuple[str, ...] = ()


@dataclasses.dataclass
class Count:
    n: int = 1


class Plain:
    """Compared by identity: each is another."""

    def __init__(self, n: int = 1):
        self.n = n


def size_of(notes: Any) -> int:
    if isinstance(notes, int):
        return notes
    if isinstance(notes, tuple | list | dict | set):
        return len(notes) + 1
    return len(notes.names) + 1 if isinstance(notes, Notes) else notes.n


def class_of(default: Callable[[], Any]) -> type:
    """A wrapper class whose notes are `default()` wherever one is put together."""

    class Forgetful(torch.Tensor):
        @staticmethod
        def __new__(cls, inner, notes=None):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner, notes=None):
            self.inner, self.notes = inner, default() if notes is None else notes

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            return cls(inner["inner"])

        def size_of_notes(self):
            return size_of(self.notes)

        def like(self, inner):
            return type(self)(inner, notes=self.notes)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            by = size_of(args[0].notes) if func is torch.ops.aten.sin.default else 1
            args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
            return tree_map_only(torch.Tensor, lambda t: cls(t * by), func(*args, **kwargs))

    return Forgetful


NOTES: dict[str, tuple[Callable[[], Any], Any]] = {
    "number": (lambda: 1, 5),
    "text in a tuple": (tuple, ("a", "b")),
    "list": (list, [1, 2]),
    "dict": (dict, {"a": 1}),
    "set": (set, {1, 2}),
    "frozen dataclass": (Notes, Notes(("a", "b"))),
    "dataclass": (Count, Count(4)),
    "object": (Plain, Plain(4)),
}
READ: dict[str, Callable] = {
    "the program": lambda x, y: y * size_of(x.notes),
    "a method": lambda x, y: y * x.size_of_notes(),
    "an operation": lambda x, y: x.sin().inner + y,
}


@pytest.mark.parametrize("reader", READ)
@pytest.mark.parametrize("kind", NOTES)
def test_what_is_read_is_that_of_the_object_of_each_call(kind: str, reader: str):
    (default, other), f = NOTES[kind], READ[reader]
    cls, y = class_of(default), torch.tensor([0.5, 2.0])
    for first, second in ((default(), other), (other, default())):
        jf = thunder.jit(f, transforms=[SubclassTransform()])
        for notes in (first, first, second, second, first):
            x = cls(torch.tensor([1.0, 3.0]), copy.deepcopy(notes))
            assert torch.allclose(jf(x, y), f(x, y))
        assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (2, 3)


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("make", [lambda x, y: x.like(y), lambda x, y: [x.like(y).like(y * 2)], lambda x, y: type(x)(y, x.notes)])
def test_what_is_made_of_it_holds_that_object(make: Callable, kind: str):
    default, other = NOTES[kind]
    cls, y = class_of(default), torch.tensor([0.5, 2.0])
    jf = thunder.jit(make, transforms=[SubclassTransform()])
    for notes in (other, other, default()):
        x = cls(torch.tensor([1.0, 3.0]), copy.deepcopy(notes))
        got, want = ((r[0] if isinstance(r, list) else r) for r in (jf(x, y), make(x, y)))
        assert torch.equal(got.inner, want.inner) and type(got) is cls
        assert size_of(got.notes) == size_of(want.notes) and type(got.notes) is type(want.notes)
        assert got.notes is x.notes or isinstance(x.notes, tuple) or size_of(x.notes) == size_of(default())


def _append(x, y):
    x.notes.append(3)
    return y * len(x.notes), x.sin().inner


def _set_item(x, y):
    x.notes["k"] = 3
    return y * len(x.notes), x.sin().inner


@pytest.mark.parametrize(
    ("f", "default", "values"),
    [
        (_append, list, ([], [], [1, 2], [1, 2])),
        (_set_item, dict, ({}, {}, {"a": 1})),
    ],
)
def test_what_the_program_changes_in_them_is_changed_in_each_call(f: Callable, default: Callable, values: tuple):
    cls, jf = class_of(default), thunder.jit(f, transforms=[SubclassTransform()])
    for notes in values:
        found = []
        for function in (f, jf):
            x = cls(torch.tensor([1.0, 3.0]), copy.deepcopy(notes))
            results = function(x, torch.ones(2))
            found.append(([t.tolist() for t in results], x.notes))
        (got, own), (want, eagers) = found[1], found[0]
        assert torch.allclose(torch.tensor(got), torch.tensor(want)) and own == eagers
    assert thunder.cache_misses(jf) == 2


def test_an_object_without_the_attribute_has_another_trace():
    cls = class_of(tuple)

    def f(x, y):
        return x.sin().inner + y if hasattr(x, "notes") else y * 2

    jf, y = thunder.jit(f, transforms=[SubclassTransform()]), torch.ones(2)
    for has_notes in (True, False, True):
        x = cls(torch.ones(2), ("a",))
        if not has_notes:
            del x.notes
        assert torch.allclose(jf(x, y), f(x, y))


def test_attributes_of_objects_in_them_that_a_program_sets_are_refused():
    def f(x):
        x.notes.n = 7
        return x.sin()

    x = class_of(Count)(torch.ones(2), Count(3))
    with pytest.raises(UnsupportedOpError, match=r"attribute 'n' of a Count is set, which is 'notes' of a wrapper"):
        thunder.jit(f, transforms=[SubclassTransform()])(x)
    assert x.notes == Count(3)
