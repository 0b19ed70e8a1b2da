"""Classes of Python's standard library that are given tensors hold them in traces as in eager mode."""

import array
import bisect
import collections
import collections.abc
import functools
import heapq
import itertools
import operator
import re
import types
import typing

import pytest
import torch

from thunder_norm.errors import DataDependentError
from thunder_norm.transforms import SubclassTransform, grad, vmap
import thunder

T = typing.TypeVar("T")


def deque(x):
    d = collections.deque([x], maxlen=2)
    d.append(x * 2)
    d.appendleft(x * 3)
    return d[0] + d[-1] + len(d)


def executed(x):
    names = {"x": x}
    exec(b"y = x * 2\ndef f(v): return v + y", names)  # noqa: S102 - of what stands here
    return names["f"](x) + eval(compile("y * 3", "text", "eval"), names)  # noqa: S307


def generic_alias(x):
    def called(f: collections.abc.Callable[[torch.Tensor], torch.Tensor], t: list[int]) -> collections.abc.Callable[[int], str]:
        return f(x) * t[0]

    return called(torch.sin, typing.cast(list[T][int], [2]))


class _Equal:
    """Has no hash, and can be called."""

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, _Equal) and self.factor == other.factor

    def __call__(self, x):
        return x * self.factor


class _OfMeta(
    torch.distributions.Normal, metaclass=type("Meta", (type,), {"__call__": lambda c, *a: super(type(c), c).__call__(*a)})
):
    """Made by a metaclass's own method, as Pyro's distributions are."""


def _of_tee(a, b, c):
    next(a)
    return next(a) + sum(b) * len([*c]) + next(a)


PROGRAMS = {
    "an object without hash": lambda x: _Equal(2)(x),
    "a metaclass": lambda x: _OfMeta(x, 1.0).log_prob(x * 2),
    "generic alias": generic_alias,
    "deque": deque,
    "operator.call": lambda x: operator.call(torch.sin, x) + operator.call(lambda v, by: v * by, x, by=2),
    "partial": lambda x: (
        functools.partial(torch.mul, x)(x.cos()) + functools.partial(functools.partial(torch.add, x, alpha=2), x)()
    ),
    "chain": lambda x: sum(itertools.chain([x], [x * 2])),
    "chain of what is in a list": lambda x: sum(itertools.chain.from_iterable([x[None], [x * 2], (x * 3 for _ in range(1))])),
    "eval": lambda x: eval(" v * k + sum(u * k for u in [v])", {"v": x, "k": 3}) + eval(b"v", None, {"v": x}),  # noqa: S307
    "exec": executed,
    "product": lambda x: (
        sum(a * b for a, b in itertools.product([x, x + 1], range(1, 3))) + len([*itertools.chain(b"ab", range(2))])
    ),
    "map and filter": lambda x: sum(map(lambda a: a * 2, [x, x])) + list(filter(lambda a: True, [x]))[0],
    "itemgetter": lambda x: operator.itemgetter(1)([1, x]) * 2,
    "accumulate": lambda x: list(itertools.islice(itertools.count(1), 3))[2] * x + list(itertools.accumulate([x, x * x]))[-1],
    "tee": lambda x: _of_tee(*itertools.tee((x * n for n in range(3)), 3)),
    "names that Thunder has": lambda x: [
        d := dict(self=x, fn=x * 2, mapping=1),
        d.update(self=x * 3, args=2),
        d["self"] * len(d),
    ][-1],
    "counter": lambda x: x * collections.Counter("aab")["a"] + collections.OrderedDict(a=x)["a"],
}


@pytest.mark.parametrize("ask", [lambda x: array.array("f", x), lambda x: heapq.heapify([*x])])
def test_values_that_c_asks_for_are_refused(ask):
    with pytest.raises(DataDependentError, match=r"by a function in C(.|\n)*test_standard_library.py"):
        thunder.jit(lambda x: (x, ask(x)), transforms=[SubclassTransform()])(torch.ones(2))


@pytest.mark.parametrize("name", PROGRAMS)
def test_standard_library_as_in_eager_mode(name):
    f, x = PROGRAMS[name], torch.tensor([1.0, -2.0])
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))
    torch.testing.assert_close(vmap(f)(x), torch.func.vmap(f)(x))


HELD = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])]
OF_HELD = {
    "sum": lambda x: sum(HELD) + sum(HELD, x) + sum(t * x for t in HELD),
    "joined": lambda x: (HELD + [x])[1] * ([x] + HELD)[2] * (HELD * 2)[3],
    "chain and islice": lambda x: sum(itertools.chain(HELD, [x])) * next(itertools.islice(HELD, 1, None)),
    "pairs": lambda x: (
        x * sum(a * b for a, b in itertools.pairwise(HELD)) + sum(a * b for a, b in itertools.combinations(HELD, 2))
    ),
    "tee": lambda x: x * sum(a * b for a, b in zip(*itertools.tee(HELD), strict=True)),
    "cycle and groups": lambda x: (
        x * next(itertools.cycle(HELD)) + sum(sum(g) for _, g in itertools.groupby(HELD, key=lambda t: 0))
    ),
    "deque": lambda x: x * collections.deque(HELD, maxlen=1)[0],
    "words are not added": lambda x: x * sum([1, 2], 3) + sum([x]) + sum([1.5, x, 2]),
}


@pytest.mark.parametrize("name", OF_HELD)
def test_what_was_there_before_is_seen_in_each_call(name, monkeypatch):
    f, x = OF_HELD[name], torch.tensor([1.0, -2.0])
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jitted(x), f(x))
    monkeypatch.setattr(HELD[1], "data", torch.tensor([5.0, 7.0]))
    torch.testing.assert_close(jitted(x), f(x))


LIMIT = types.SimpleNamespace(value=3)
PATTERN = re.compile("a*")
CALLED_IN_C = {
    "groups": lambda: [(k, list(g)) for k, g in itertools.groupby([1, 2, 5, 6, 1], key=lambda v: v < LIMIT.value)],
    "groups that are left": lambda: [k for k, _ in itertools.groupby([1, 2, 5, 1], lambda v: v < LIMIT.value)],
    "groups and no key": lambda: [(k, len(list(g)) * LIMIT.value) for k, g in itertools.groupby("aabc")],
    "substitution": lambda: re.sub("a(.)", lambda m: m[1] * LIMIT.value, "abacxa"),
    "some substitutions": lambda: PATTERN.sub(lambda m: f"<{m[0]}{LIMIT.value}>", "xaaab", count=2),
    "no function": lambda: re.sub("(a)", r"\1b", "aa") * LIMIT.value,
    "place": lambda: bisect.bisect([1, 4, 5], 9, key=lambda v: v * LIMIT.value),
    "order": lambda: sorted([1, 7, 5], key=functools.cmp_to_key(lambda a, b: (a - b) * (LIMIT.value - 50))),
    "left place": lambda: bisect.bisect_left([1, 2, 2, 3], 2, 1) * LIMIT.value,
}


@pytest.mark.parametrize("name", CALLED_IN_C)
def test_functions_that_c_calls_are_asked_in_each_call(name, monkeypatch):
    jitted = thunder.jit(lambda x: (x * 2, CALLED_IN_C[name]()), transforms=[SubclassTransform()])
    for value in (3, 3, 100, 2):
        monkeypatch.setattr(LIMIT, "value", value)
        assert jitted(torch.ones(2))[1] == CALLED_IN_C[name]()
    assert thunder.cache_misses(jitted) == (2 if name == "left place" else 3)  # which calculates with the number, and no more


def test_what_patterns_others_have_compiled_is_no_part_of_a_trace(monkeypatch):
    def f(x, word):
        return x * (2 if re.match(r"fresh\d", word) else 3), re.sub("a", "b", word)

    monkeypatch.setattr(re, "_cache", {(str, f"other{n}", 0): re.compile(f"other{n}") for n in range(re._MAXCACHE)})  # type: ignore[attr-defined]
    jitted, x = thunder.jit(f, transforms=[SubclassTransform()]), torch.ones(2)
    for word in ("fresh1", "stale", "fresh1", "stale"):
        (found, text), (expected, same_text) = jitted(x, word), f(x, word)
        assert torch.equal(found, expected) and text == same_text
        re._cache.clear()  # type: ignore[attr-defined]
    assert thunder.cache_misses(jitted) == 2
