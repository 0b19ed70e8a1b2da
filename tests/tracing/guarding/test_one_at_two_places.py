"""One value at two places in the first call, and two in the next: each place is looked at, whatever the value is."""

from __future__ import annotations

import enum
import fractions
import functools
import math
import operator
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.seeds import crossed
from thunder_norm.transforms import SubclassTransform
import thunder


class Side(enum.Enum):
    LEFT = 2
    RIGHT = 3


class Scale:
    def __init__(self, by: float):
        self.by = by

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


# what the program does with each of the two, and two values
CASES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Any, Any]] = {
    "dtype": (lambda v, x: x.to(v), torch.float32, torch.float64),
    "memory format": (lambda v, x: x.clone(memory_format=v), torch.channels_last, torch.contiguous_format),
    "layout": (lambda v, x: x * (2 if v is torch.strided else 3), torch.strided, torch.sparse_coo),
    "member of an enum": (lambda v, x: x * v.value, Side.LEFT, Side.RIGHT),
    "class": (lambda v, x: x * v(2.5), int, float),
    "complex number": (lambda v, x: x * v, 2j, 3j),
    "number": (lambda v, x: x * v, 2.5, 3.5),
    "word": (lambda v, x: x * len(v), "ab", "abc"),
    "bytes": (lambda v, x: x * v[0], b"ab", b"cb"),
    "slice": (lambda v, x: x[0, 0, v], slice(0, 1), slice(0, 2)),
    "device": (lambda v, x: x * len(str(v)), torch.device("cpu"), torch.device("cpu", 0)),
    "function": (lambda v, x: v(x), torch.sin, torch.cos),
    "function in Python": (lambda v, x: v(x), lambda x: x + 1, lambda x: x * 2),
    "method of tensors": (lambda v, x: v(x), torch.Tensor.sin, torch.Tensor.cos),
    "operator of aten": (lambda v, x: v(x), torch.ops.aten.sin, torch.ops.aten.cos),
    "overload of aten": (lambda v, x: v(x), torch.ops.aten.sin.default, torch.ops.aten.cos.default),
    "method": (lambda v, x: v(x), Scale(2.0).times, Scale(3.0).times),
    "partial": (lambda v, x: v(x), functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
    "itemgetter": (lambda v, x: x * v((5, 7)), operator.itemgetter(0), operator.itemgetter(1)),
    "Python module": (lambda v, x: x * v.pi, math, SimpleNamespace(pi=3)),
    "object": (lambda v, x: x * v.by, Scale(2.0), Scale(3.0)),
    "fraction": (lambda v, x: x * float(v), fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "number of NumPy": (lambda v, x: x * float(v), np.float32(1), np.float32(2)),
    "dtype of NumPy": (lambda v, x: x * np.zeros(1, v).nbytes, np.dtype("f4"), np.dtype("f8")),
    "array": (lambda v, x: x * float(v[0]), np.array([1, 2]), np.array([3, 4])),
    "set": (lambda v, x: x * sum(v), {1, 2}, {1, 3}),
    "range": (lambda v, x: x * sum(v), range(3), range(4)),
    "deque": (lambda v, x: x * v[0], deque([1]), deque([2])),
    "tuple in a tuple": (lambda v, x: x * v[0][1], ((0, 1),), ((0, 2),)),
    "dict": (lambda v, x: x * len(v), {"a": 1}, {"a": 1, "b": 2}),
    "tensor": (lambda v, x: x * v, torch.ones(2), torch.zeros(2)),
    "module": (lambda v, x: v(x), nn.Softplus(), nn.Softplus(beta=2.0)),
    "None": (lambda v, x: x if v is None else x * v, None, 3),
}


class Holder(nn.Module):
    """A module that holds both."""

    def __init__(self, use: Callable):
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.first, x), self.use(self.second, x)


def of_arguments(use: Callable) -> tuple[Callable, Callable]:
    jitted = thunder.jit(lambda a, b, x: (use(a, x), use(b, x)), transforms=[SubclassTransform()])
    return lambda a, b, x: (use(a, x), use(b, x)), jitted


def of_an_object(use: Callable) -> tuple[Callable, Callable]:
    def f(o, x):
        return use(o.a, x), use(o.held["b"], x)

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    return tuple(lambda a, b, x, g=g: g(SimpleNamespace(a=a, held={"b": b}), x) for g in (f, jitted))  # type: ignore[return-value]


def of_a_module(use: Callable) -> tuple[Callable, Callable]:
    module = Holder(use)
    jitted = thunder.jit(module, transforms=[SubclassTransform()])

    def call(a, b, x, run):
        for name, value in (("first", a), ("second", b)):
            module._modules.pop(name, None)
            module.__dict__.pop(name, None)
            setattr(module, name, value)
        return run(x)

    return functools.partial(call, run=module), functools.partial(call, run=jitted)


HOLDING = (of_arguments, of_an_object, of_a_module)


# a module holds no other modules after it was jitted
@pytest.mark.parametrize(("name", "holding"), [(n, h) for n, h in crossed(CASES, HOLDING) if (n, h) != ("module", of_a_module)])
def test_each_of_two_places_is_looked_at(name: str, holding: Callable):
    use, one, other = CASES[name]
    eager, jitted = holding(use)
    x = torch.arange(8.0).view(1, 2, 2, 2)
    for a, b in ((one, one), (one, other), (other, one), (other, other), (one, one)):
        got, want = jitted(a, b, x), eager(a, b, x)
        assert [(t.dtype, t.stride()) for t in got] == [(t.dtype, t.stride()) for t in want]
        torch.testing.assert_close(*(tree_map_only(torch.Tensor, torch.Tensor.detach, list(r)) for r in (got, want)))


def test_an_argument_that_is_a_memory_format_or_an_operator_is_guarded():
    jitted = thunder.jit(lambda x, m, f: f(x.contiguous(memory_format=m)), transforms=[SubclassTransform()])
    x = torch.randn(1, 2, 3, 3)
    for m in (torch.channels_last, torch.contiguous_format):
        for f in (torch.Tensor.neg, torch.Tensor.abs, torch.ops.aten.sin):
            got, want = jitted(x, m, f), f(x.contiguous(memory_format=m))
            assert got.stride() == want.stride() and torch.equal(got, want)
    assert thunder.cache_misses(jitted) == 6


def test_one_list_as_two_attributes_of_a_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.first = [1, 2]
            self.second = self.first

        def forward(self, x):
            second = self.second
            return x * self.weight * (2 if second is self.first else 3)

    model, x = Model(), torch.arange(3.0)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    torch.testing.assert_close(jitted(x), model(x))
    model.second = list(model.first)
    torch.testing.assert_close(jitted(x), model(x))
