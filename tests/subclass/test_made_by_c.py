"""Iterators and exceptions that a program makes and hands out, or keeps: as in eager mode in each call, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class WithTensor(Exception):
    def __init__(self, text, tensor):
        super().__init__(text)
        self.tensor = tensor


def raised(x):
    try:
        try:
            raise WithTensor("first", x * 3)
        except WithTensor as first:
            raise ValueError("second") from first
    except ValueError as second:
        return second


def advanced(made, times=1):
    for _ in range(times):
        next(made, None)
    return made


MADE = {
    "a list": lambda x: iter([1, x * 2]),
    "a tuple, advanced": lambda x: advanced(iter((x, x * 2))),
    "a list, reversed": lambda x: advanced(reversed([1, x, 2])),
    "exhausted": lambda x: advanced(iter([x]), 2),
    "over what torch returns": lambda x: iter(x),
    "exceptions": lambda x: [ValueError("a", x * 2), KeyError("k"), StopIteration(3)],
    "a raised one": raised,
    "in a dict": lambda x: {"error": TypeError(x), "items": iter([x])},
}
NOT_MADE = {
    "zip": lambda x: zip([1], [2], strict=True),
    "a generator": lambda x: (i for i in [1]),
    "a view of a dict": lambda x: {"a": 1}.items(),
    "of a dict": lambda x: iter({"a": 1}),
}


class Keeping(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.kept = make, None

    def forward(self, x):
        self.kept = self.make(x)
        return x + 1


def described(value: Any) -> Any:
    """What a value is, and what is in it; an iterator is used up."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, BaseException):
        parts = value.args, vars(value), value.__cause__, value.__context__, getattr(value, "value", None)
        return type(value), value.__suppress_context__, value.__traceback__ is None, *map(described, parts)
    if isinstance(value, dict):
        return {k: described(v) for k, v in value.items()}
    if isinstance(value, list | tuple) or hasattr(value, "__next__"):
        return type(value), [described(v) for v in value]
    return value


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize("name", MADE)
def test_returned_ones_are_made_in_each_call(name: str, transform: type) -> None:
    def program(x):
        return x, MADE[name](x)

    jitted = thunder.jit(program, transforms=[transform()])
    for n in range(3):
        x = torch.ones(2) * n
        assert described(jitted(x)) == described(program(x))
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("name", MADE)
def test_kept_ones_are_made_in_each_call(name: str) -> None:
    model, plain = Keeping(MADE[name]), Keeping(MADE[name])
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for n in range(3):
        for m in (jitted, plain):
            m(torch.ones(2) * n)
        assert described(model.kept) == described(plain.kept)


@pytest.mark.parametrize("name", NOT_MADE)
def test_other_iterators_are_refused(name: str) -> None:
    jitted = thunder.jit(Keeping(NOT_MADE[name]), transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match=r"attribute 'kept' holds a .* which cannot be made anew in each call"):
        jitted(torch.ones(2))
    assert jitted.kept is None
    with pytest.raises(UnsupportedOpError, match="the result holds a .* which cannot be made anew in each call"):
        thunder.jit(lambda x: (x, NOT_MADE[name](x)), transforms=[NormTransform()])(torch.ones(2))
