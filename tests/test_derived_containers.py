"""Classes derived from list, dict and tuple, and what is made of functions: programs that make their objects, as eager mode has them."""

from __future__ import annotations

import collections
import functools
import typing

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, NormTransform
import thunder


class Scaled(list):
    made: list[int] = []

    def __new__(cls, *args):
        cls.made.append(1)
        return super().__new__(cls)

    def __init__(self, values):
        super().__init__(v * 2 for v in values)


class Frozen(dict):
    __slots__ = ("_hash",)

    def __new__(cls, *args, **kwargs):
        self = dict.__new__(cls, *args, **kwargs)
        dict.__init__(self, *args, **kwargs)
        object.__setattr__(self, "_hash", -1)
        return self if self else None

    def __init__(self, *args, **kwargs):
        pass


class Doubled(tuple):
    def __new__(cls, values):
        return super().__new__(cls, [2 * v for v in values])


class Pair(tuple):
    def __new__(cls, first, second):
        return tuple.__new__(cls, (first, second))

    @property
    def second(self):
        return self[1]


class Point(collections.namedtuple("Point_", "x y")):
    __slots__ = ()

    def __new__(cls, x, y=None):
        return super().__new__(cls, x, x + 1 if y is None else y)

    def total(self):
        return self.x + self.y


class Base(typing.NamedTuple):
    x: torch.Tensor
    n: int = 2

    def times(self):
        return self.x * self.n


class Derived(Base):
    pass


def scale(k, n):
    return n * k


class Times:
    def __init__(self, k):
        self.k = k

    def __call__(self, n):
        return n * self.k


_twice, _thrice = functools.lru_cache(functools.partial(scale, 2)), functools.cache(Times(3))

PROGRAMS = {
    "a list with a constructor": lambda x: x * Scaled([1, 2.0])[1] * len(Scaled([1, 2])),
    "a list of tensors": lambda x: Scaled([x, x + 1])[1],
    "a dict with a constructor": lambda x: x * len(Frozen({"a": 2.0, "b": 1})) * Frozen(a=3)["a"],
    "a tuple with a constructor": lambda x: Doubled([x, 3])[0] * Doubled([x, 3])[1],
    "a tuple of a generator": lambda x: Doubled(x * i for i in range(3))[2],
    "a tuple of arguments": lambda x: Pair(1, x + 1).second,
    "a class derived from a named tuple": lambda x: Point(x).total() + Point(x, y=2 * x)[1],
    "one that is replaced and unpacked": lambda x: (lambda a, b: a * b)(*Point(x, 3)._replace(y=x)),
    "one from a typed one": lambda x: Derived(x, n=3).times() + Derived(x)._replace(n=5).times(),
    "functions with a cache that have no name": lambda x: x * _twice(4) + _thrice(5),
}


@pytest.mark.parametrize("transform", [NormTransform, CheckpointTransform])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_those_of_eager_mode(name, transform):
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4)
    torch.testing.assert_close(thunder.jit(PROGRAMS[name], transforms=[transform()])(x), PROGRAMS[name](x))


def test_a_constructor_runs_once():
    Scaled.made.clear()
    thunder.jit(lambda x: x * Scaled([1])[0], transforms=[NormTransform()])(torch.ones(2))
    assert len(Scaled.made) == 1


def test_a_result_has_its_class():
    found = thunder.jit(lambda x: Point(x, 2 * x), transforms=[NormTransform()])(torch.ones(2))
    assert type(found) is Point
    torch.testing.assert_close(found.total(), torch.full((2,), 3.0))
