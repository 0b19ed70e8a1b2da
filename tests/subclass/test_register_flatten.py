"""Classes that do not say how they are taken apart, and for which somebody else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from thunder_norm import wrapper_classes
from thunder_norm.errors import TransformError, UnsupportedSubclassError
from thunder_norm.transforms import SubclassTransform, register_flatten
import thunder


class Chunks(torch.Tensor):
    """Rows kept as a list of tensors: no attribute is one of them."""

    chunks: list[torch.Tensor]
    unit: str

    @staticmethod
    def __new__(cls, chunks: list[torch.Tensor], unit: str = "m"):
        shape = (sum(len(c) for c in chunks), *chunks[0].shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=chunks[0].dtype)

    def __init__(self, chunks: list[torch.Tensor], unit: str = "m"):
        self.chunks, self.unit = chunks, unit

    def __repr__(self) -> str:
        return f"Chunks({self.chunks}, {self.unit!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        x = next(a for a in args if isinstance(a, cls))
        each = [func(*tree_map_only(cls, lambda a, i=i: a.chunks[i], args), **(kwargs or {})) for i in range(len(x.chunks))]
        return cls(each, x.unit)


def flatten(x: Chunks) -> tuple[dict[str, torch.Tensor], Any]:
    return {f"chunk{i}": c for i, c in enumerate(x.chunks)}, x.unit


def unflatten(inner: dict[str, torch.Tensor], context: Any, shape: torch.Size, stride: tuple[int, ...]) -> Chunks:
    return Chunks(list(inner.values()), context)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(wrapper_classes, "_registered", dict(wrapper_classes._registered))


def chunks(unit: str = "m", sizes: tuple[int, ...] = (2, 3), requires_grad: bool = False) -> Chunks:
    torch.manual_seed(seeded(0))
    return Chunks([torch.randn(n, 4) for n in sizes], unit).requires_grad_(requires_grad)


def jit(function):
    return thunder.jit(function, transforms=[SubclassTransform()])


def assert_chunks(found: Any, expected: Chunks) -> None:
    assert type(found) is Chunks and (found.unit, found.shape, found.dtype) == (expected.unit, expected.shape, expected.dtype)
    assert len(found.chunks) == len(expected.chunks)
    for a, b in zip(found.chunks, expected.chunks, strict=True):
        assert type(a) is torch.Tensor
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("registered")
def test_a_registered_class_is_interpreted():
    register_flatten(Chunks, flatten, unflatten)

    def f(x):
        first = x.chunks[0] if x.unit == "m" else x.chunks[1]
        return (x * 2).sin() + x, first.sum()

    jf = jit(f)
    for x in (chunks(), chunks("km"), chunks(sizes=(1, 4)), chunks(), chunks("km")):
        result, total = jf(x)
        expected, expected_total = f(x)
        assert_chunks(result, expected)
        torch.testing.assert_close(total, expected_total)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (3, 2)


@pytest.mark.usefixtures("registered")
def test_gradients_of_a_registered_class_are_eager_s():
    register_flatten(Chunks, flatten, unflatten)
    x, y = chunks(requires_grad=True), chunks(requires_grad=True)

    def f(x):
        return (x * x).sin()

    f(x).backward(chunks())
    jit(f)(y).backward(chunks())
    assert_chunks(y.grad, x.grad)


@pytest.mark.usefixtures("registered")
def test_what_is_in_lists_of_an_instance_are_its_tensors_in_nested_ones_too():
    register_flatten(Chunks, flatten, unflatten)
    x = Chunks([TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))])
    result = jit(lambda x: x + 1)(x)
    assert type(result) is Chunks and type(result.chunks[0]) is TwoTensor
    assert torch.equal(result.chunks[0].a, torch.full((2, 3), 2.0)) and torch.equal(result.chunks[0].b, torch.ones(2, 3))


@pytest.mark.usefixtures("registered")
def test_a_registered_instance_is_written_into():
    register_flatten(Chunks, flatten, unflatten)
    x, y = chunks(), chunks()
    held = y.chunks[0]
    with torch.no_grad():
        x.mul_(3)
        jit(lambda y: y.mul_(3))(y)
    assert_chunks(y, x)
    assert y.chunks[0] is held


@pytest.mark.usefixtures("registered")
def test_the_class_is_refused_as_long_as_nobody_registers_it():
    jf = jit(lambda x: x + 1)
    with pytest.raises(UnsupportedSubclassError, match="register_flatten"):
        jf(chunks())
    register_flatten(Chunks, flatten, unflatten)
    assert type(jf(chunks())) is Chunks


class Derived(Chunks):
    """Would be put together as its base class."""


@pytest.mark.usefixtures("registered")
def test_a_derived_class_is_another_class():
    register_flatten(Chunks, flatten, unflatten)
    with pytest.raises(UnsupportedSubclassError, match="Derived cannot be interpreted"):
        jit(lambda x: x + 1)(Derived([torch.ones(2, 3)]))


class Dispatching(torch.Tensor):
    """Derived from another class of tensors, and no wrapper of anything."""


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "cls, match",
    [
        (int, "int is no wrapper subclass"),
        ("Chunks", "is no wrapper subclass"),
        (torch.Tensor, "no wrapper subclass"),
        (torch.nn.Parameter, "no wrapper subclass"),
        (Dispatching, "no wrapper subclass"),
        (TwoTensor, "says itself how it is taken apart"),
    ],
)
def test_what_cannot_be_registered(cls: Any, match: str):
    with pytest.raises(UnsupportedSubclassError, match=match):
        register_flatten(cls, flatten, unflatten)


@pytest.mark.usefixtures("registered")
def test_a_second_registration_needs_override():
    register_flatten(Chunks, flatten, unflatten)
    with pytest.raises(TransformError, match="override=True"):
        register_flatten(Chunks, flatten, unflatten)
    jf = jit(lambda x: x + 1)
    jf(chunks())
    register_flatten(Chunks, lambda x: ({f"c{i}": c for i, c in enumerate(x.chunks)}, (x.unit, 1)), renamed, override=True)
    assert_chunks(jf(chunks()), chunks() + 1)
    assert thunder.cache_misses(jf) == 2  # the trace was made for what was registered then


def renamed(inner, context, shape, stride):
    return Chunks(list(inner.values()), context[0])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "own_flatten, own_unflatten, match",
    [
        (lambda x: list(x.chunks), unflatten, "needed"),
        (lambda x: ({"a": x.chunks[0].view_as(x.chunks[0])}, x.unit), unflatten, "other tensors each time"),
        (lambda x: ({"a": 1}, x.unit), unflatten, "'a', which is int"),
        (lambda x: ({"a": x.chunks[0]}, x.chunks[1]), unflatten, "context of Chunks holds a tensor"),
        (flatten, lambda inner, *_: torch.ones(5, 4), "a Chunks was put together as a"),
    ],
)
def test_what_is_registered_wrongly_is_refused(own_flatten, own_unflatten, match: str):
    register_flatten(Chunks, own_flatten, own_unflatten)
    with pytest.raises(UnsupportedSubclassError, match=match):
        jit(lambda x: x + 1)(chunks())
