"""State that a program reads and moves on by itself: counters in variables, iterators; each call has eager PyTorch's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

import thunder_norm
from thunder_norm.errors import AcquiredAnewWarning
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


def in_a_closure() -> Callable:
    times = 0

    def f(x):
        nonlocal times
        times += 1
        return x * times

    return f


def in_a_global() -> Callable:
    scope = {"times": 0}
    exec("def f(x):\n    global times\n    times = times + 1\n    return x * times", scope)
    return scope["f"]


def of_words() -> Callable:
    name = "a"

    def f(x):
        nonlocal name
        name += "b"
        return x * len(name)

    return f


def iterates(iterator) -> Callable:
    def f(x):
        return x * next(iterator)

    return f


def sums(iterator) -> Callable:
    def f(x):
        return x * sum(itertools.islice(iterator, 2))

    return f


MAKES = {
    "a counter in a closure": in_a_closure,
    "a counter in a global": in_a_global,
    "a word in a closure": of_words,
    "an iterator of a list": lambda: iterates(iter([2, 3, 4])),
    "a generator": lambda: iterates(n * n for n in range(2, 5)),
    "numbers without an end": lambda: iterates(itertools.count(1)),
    "a cycle": lambda: iterates(itertools.cycle([2, 3])),
    "pairs": lambda: iterates(map(sum, zip([1, 2, 3], [4, 5, 6], strict=True))),
    "a generator that another function asks": lambda: sums(n for n in range(9)),
}
WAYS = {
    "NormTransform": lambda f: thunder.jit(f, transforms=[NormTransform()]),
    "SubclassTransform": lambda f: thunder.jit(f, transforms=[SubclassTransform()]),
    "CheckpointTransform": lambda f: thunder.jit(f, transforms=[CheckpointTransform()]),
    "inductor": lambda f: thunder.jit(f, executors=[thunder_norm.executors.inductor]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKES)
def test_each_call_moves_on(make, way):
    eager, jitted = MAKES[make](), WAYS[way](MAKES[make]())
    x = torch.arange(3.0)
    with pytest.warns(AcquiredAnewWarning, match="anew in each call"):
        results = [jitted(x) for _ in range(3)]
    for result in results:
        torch.testing.assert_close(result, eager(x))


def test_what_asks_an_iterator_for_nothing_is_acquired_once():
    given = iter([1, 2])
    jitted = thunder.jit(
        lambda x, o: x * 2 if isinstance(o, list) or callable(o) or hasattr(o, "k") else x * 3, transforms=[NormTransform()]
    )
    x = torch.ones(2)
    assert all(torch.equal(jitted(x, given), x * 3) for _ in range(3))
    assert thunder.cache_misses(jitted) == 1 and next(given) == 1


def test_what_a_program_makes_and_uses_up_is_acquired_once():
    jitted = thunder.jit(
        lambda x: functools.reduce(lambda a, b: a * b, (n for n in iter([2, 3])), x), transforms=[NormTransform()]
    )
    x = torch.ones(2)
    assert all(torch.equal(jitted(x), x * 6) for _ in range(3))
    assert thunder.cache_misses(jitted) == 1
