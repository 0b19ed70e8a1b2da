"""``match`` in traced programs, and what ``operator`` and ``itertools`` do in C with the program's objects: as in eager mode."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import typing

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform
import thunder


@dataclasses.dataclass
class Box:
    value: typing.Any
    scale: float = 2.0


class Pair(typing.NamedTuple):
    first: typing.Any
    second: float = 3.0


class Strict:
    __match_args__ = ("a", "b")

    def __init__(self, a):
        self.a = a


def by_class(x, subject):
    match subject:
        case bool():
            return x * 2
        case int(n) if n > 3:
            return x * n
        case int() | float():
            return x + subject
        case Box(scale=3.0):
            return subject.value * 5
        case Box(value, 4.0):
            return value * 7
        case Box(value, scale=s):
            return value * s
        case Pair(second=s):
            return subject.first * s
        case Strict(a, b):
            return a * b
        case Strict(a):
            return a * 11
        case str(name):
            return x * len(name)
        case {"a": a, "b": b}:
            return a * b
        case {"a": a}:
            return a * 13
        case [a, int(n)]:
            return a * n
        case _:
            return x * 17


SUBJECTS = {
    "a bool": lambda x: True,
    "an int": lambda x: 5,
    "a small int": lambda x: 2,
    "a float": lambda x: 2.5,
    "by name": lambda x: Box(x, 3.0),
    "by position": lambda x: Box(x, 4.0),
    "by both": lambda x: Box(x, 6.0),
    "a named tuple": lambda x: Pair(x),
    "a missing attribute": lambda x: Strict(x),
    "a word": lambda x: "word",
    "two keys": lambda x: {"a": x, "b": 3.0, "c": 1},
    "one key": lambda x: {"a": x},
    "a list": lambda x: [x, 4],
    "a list of others": lambda x: [x, 4.0],
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("is_given", [False, True])
def test_match_is_pythons(name, is_given):
    torch.manual_seed(seeded(0))
    x = torch.randn(3)
    if is_given:
        jitted, args = thunder.jit(by_class, transforms=[NormTransform()]), (x, SUBJECTS[name](x))
        torch.testing.assert_close(jitted(*args), by_class(*args))
    else:
        jitted = thunder.jit(lambda x: by_class(x, SUBJECTS[name](x)), transforms=[NormTransform()])
        torch.testing.assert_close(jitted(x), by_class(x, SUBJECTS[name](x)))


def too_many(x):
    match Box(x):
        case Box(a, b, c):
            return a * b * c


def twice(x):
    match Box(x):
        case Box(a, value=b):
            return a * b


@pytest.mark.parametrize("f", [too_many, twice])
def test_patterns_that_python_refuses(f):
    x = torch.ones(3)
    with pytest.raises(TypeError) as wanted:
        f(x)
    with pytest.raises(TypeError) as found:
        thunder.jit(f, transforms=[NormTransform()])(x)
    assert str(found.value) == str(wanted.value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.w = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def helper(self, t, *, by=2):
        return t * by * self.w

    def forward(self, x, d, given):
        return [
            operator.attrgetter("w")(self) * x,
            operator.attrgetter("lin.weight", "w")(self)[0] @ x,
            operator.itemgetter("a")(d) * 2,
            operator.itemgetter("a", "b")(d)[1] * 2,
            operator.itemgetter(slice(1, None))(x),
            operator.methodcaller("helper", x, by=3)(self),
            operator.methodcaller("sum")(x),
            *map(operator.itemgetter(0), [given, [x]]),
            *(a * b for a, b in itertools.zip_longest([x, x], given, fillvalue=2.0)),
        ]


def test_getters_ask_the_program():
    torch.manual_seed(seeded(0))
    model, x = Model(), torch.randn(3)
    d, given = {"a": torch.randn(3), "b": torch.randn(3)}, [torch.randn(3)]
    jitted = thunder.jit(model, transforms=[NormTransform()])
    torch.testing.assert_close(jitted(x, d, given), model(x, d, given))
    d["b"], model.w = d["b"] * 2, nn.Parameter(torch.randn(3))
    torch.testing.assert_close(jitted(x, d, given), model(x, d, given))
