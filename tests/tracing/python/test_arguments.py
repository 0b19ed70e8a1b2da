"""Calls whose arguments do not fit the function raise what they raise in eager mode."""

from __future__ import annotations

import pytest
import torch

from thunder_norm.transforms import SubclassTransform
import thunder


def positional(a, b, c=3):
    return a


def by_name(a, *, k, other):
    return a


def positional_only(a, /, b):
    return a


def generator(a):
    yield a


def closure():
    z = 3

    def inner(a, b=z):
        return a + z

    return inner


class Taking:
    def __init__(self, a):
        self.a = a

    def method(self, b):
        return b


CALLS = [
    *(lambda: positional(1), lambda: positional(), lambda: positional(1, 2, 3, 4), lambda: positional(1, 2, z=3)),
    *(lambda: positional(1, 2, a=3), lambda: positional(*[1, 2], **{"b": 3}), lambda: by_name(1), lambda: by_name(1, k=2)),
    *(lambda: by_name(1, 2), lambda: positional_only(a=1, b=2), lambda: positional_only(1), lambda: generator()),
    *(lambda: closure()(), lambda: closure()(1, b=2, c=3), lambda: (lambda: 1)(2), lambda: Taking(), lambda: Taking(1).method()),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_fit_is_said_as_python_says_it(call):
    def f(x):
        try:
            call()
        except TypeError as e:
            return x * 2, str(e)

    x = torch.ones(2)
    expected, said = f(x)
    result, found = thunder.jit(f, transforms=[SubclassTransform()])(x)
    assert found == said
    assert torch.equal(result, expected)


def test_what_a_function_raises_itself_stays():
    def raises(said):
        raise TypeError(said)

    def f(x):
        try:
            raises(f"{raises}() takes nothing")
        except TypeError as e:
            return x * 2, str(e) == f"{raises}() takes nothing"

    assert thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(2))[1]
