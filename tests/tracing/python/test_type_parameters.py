"""Functions, classes and aliases with parameters of types (PEP 695) that a traced function makes, as in eager mode."""

from __future__ import annotations

import sys

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder

# As text: Python 3.11 cannot read it
PROGRAMS = {
    "a function": """
def f(x):
    def first[T](of: list[T], times: T = 2) -> T:
        return of[0] * times
    return first([x]), first.__type_params__[0].__name__, first.__annotations__["return"] is first.__type_params__[0]
""",
    "a bound that is known later": """
def f(x):
    def first[T: later, U: (int, str)](of: T) -> U:
        return of * 2
    later = float
    t, u = first.__type_params__
    return first(x), t.__bound__, u.__constraints__, t.__module__, t.__infer_variance__
""",
    "a class": """
def f(x):
    class Box[T, *Ts, **P](dict):
        def __init__(self, v: T):
            self.v = v
        def then[U](self, fn) -> U:
            return Box(fn(self.v))
    return Box(x).then(lambda v: v * 3).v, [str(p) for p in Box.__type_params__], Box[int, str, [int]].__origin__ is Box
""",
    "an alias": """
def f(x):
    type Pair[T] = tuple[T, "Pair[T]"]
    type Plain = list[later]
    later = int
    return x * 2, str(Pair[int]), str(Pair.__value__), Plain.__value__, Pair.__name__
""",
    "an error in one": """
def f(x):
    class Odd:
        def __class_getitem__(cls, params):
            raise ValueError("none")
    try:
        class Box[T](Odd[int]):
            pass
    except ValueError as e:
        return x * 2, str(e)
""",
}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is Python 3.12's")
@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_of_types_are_those_of_eager_mode(name):
    names = {"__name__": "of_a_program"}
    exec(PROGRAMS[name], names)
    f, x = names["f"], torch.tensor([1.0, 2.0])
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for given in (x, x + 1):
        found, expected = jitted(given), f(given)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        assert found[1:] == expected[1:]
    assert thunder.cache_misses(jitted) == 1
