"""Calls whose arguments do not fit the function raise what they raise in eager mode, and those that fit are made, whatever the names."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import sys
import types
from typing import Any

import pytest
import torch

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
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


# each beside what it is called with: functions and methods in C, of which the interpreter calls others instead
MISFITS: list[tuple[Any, ...]] = [
    *((list, 1, 2), (tuple, 1, 2), (dict, 1, 2), (set, 1, 2), (zip, 1), (zip, [1], 2), (map,), (map, len, 1), (filter, None, 3)),
    *((itertools.accumulate, 3), (itertools.starmap, len, 3), (itertools.zip_longest, [1], 2), (collections.namedtuple, "A")),
    *(({}.get,), ({}.pop,), ({}.update, 1, 2), ({}.setdefault,), ({}.items, 1), ([].sort, 1), ([].append,), ([].insert, 1)),
    *(
        ([1].index,),
        ([].reverse, 1),
        ([].copy, 1),
        ([].remove,),
        ([].count,),
        (list.append, []),
        (dict.get, {}),
        (dict.fromkeys,),
    ),
    *((sorted,), (sum,), (reversed,), (iter,), (next,), (len, [], []), (functools.partial, 1), ("a".join,), (str.upper,)),
    *(([1].__getitem__,), ([1].__getitem__, slice(None, None, 0)), ((1,).__getitem__, slice(None, None, 0))),
]


def test_a_program_can_catch_what_functions_in_c_say_of_their_arguments():
    def caught(fn, args):
        try:
            fn(*args)
        except Exception as e:  # noqa: BLE001 - whichever Python raises
            return type(e).__name__
        return None

    def f(x):
        found = [caught(fn, args) for fn, *args in MISFITS]
        found += [caught(x, (1,)), caught(x.requires_grad_, (1, 2, 3)), caught(lambda: [*x.shape][::0], ())]
        return x * 2, found

    x = torch.ones(2)
    expected, found = f(x)[1], thunder.jit(f, transforms=[SubclassTransform()])(x)[1]
    assert None not in expected
    assert found == expected


COMPARED: list[Any] = [
    *(operator.lt, lambda a, b: a < b, lambda a, b: a >= b, lambda a, b: a == b, lambda a, b: a != b[:2], lambda a, b: a < "b"),
    *(lambda a, b: a >= None, lambda a, b: a < [1], lambda a, b: (1,) > a, lambda a, b: a == "b", lambda a, b: a <= b[:1]),
]


def test_a_program_can_catch_what_torch_says_of_what_it_cannot_compare():
    def f(x, y):
        found: list[Any] = []
        for compare in COMPARED:
            try:
                found.append(compare(x, y))
            except Exception as e:  # noqa: BLE001 - whichever torch raises
                found.append(type(e).__name__)
        return x * 2, found

    x, y = torch.ones(3), torch.zeros(4)
    expected, (_, found) = f(x, y)[1], thunder.jit(f, transforms=[SubclassTransform()])(x, y)
    assert [v for v in expected if isinstance(v, str)] == ["RuntimeError"] * 5 + ["TypeError"] * 4
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def _without_name(x):
    from math import nothing  # type: ignore[attr-defined]  # noqa: F401

    return x


def _lazily_without_name(x):
    from lazy_package_of_a_test import eight  # type: ignore[import-not-found]  # noqa: F401

    return x


def _lazily(x):
    from lazy_package_of_a_test import seven  # type: ignore[import-not-found]

    return x * seven


def _a_module_on_its_way(x):
    from lazy_package_of_a_test import inside  # type: ignore[import-not-found]

    return x * inside.value


def _without_module(x):
    import no_such_module_of_a_test  # type: ignore[import-not-found]  # noqa: F401

    return x


@pytest.mark.parametrize("f", (_without_name, _lazily_without_name, _lazily, _a_module_on_its_way, _without_module))
def test_an_import_inside_finds_or_raises_what_python_does(f, monkeypatch):
    package, inside = types.ModuleType("lazy_package_of_a_test"), types.ModuleType("lazy_package_of_a_test.inside")

    def of_package(name):
        if name == "seven":
            return 7
        raise AttributeError(name)

    package.__getattr__, package.__path__, inside.value = of_package, [], 3  # type: ignore[method-assign,attr-defined]
    for module in (package, inside):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(g):
        try:
            return "", g(torch.ones(2)).tolist()
        except ImportError as e:
            return type(e).__name__, str(e)

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    assert run(jitted) == run(jitted) == run(f)


def _taking_any(x, fn=None, args=(), kwargs=None, self=1, cls=2, name=3):
    return x * (fn if isinstance(fn, int) else 2) + self


class _Given:
    def __init__(self, fn, name="a"):
        self.fn, self.name = fn, name

    def __call__(self, x, **given):
        return self.fn(x) * len(given)


_NAMED = {
    "a function": lambda x: _taking_any(x, fn=3, args=1, kwargs=2, self=4, cls=5, name=6),
    "a class": lambda x: _Given(fn=torch.sin, name="b")(x, fn=1, args=2, name=3),
    "a partial function": lambda x: functools.partial(_taking_any, fn=2)(x),
    "a dict": lambda x: dict(fn=x, args=x, cls=x)["fn"] * 2,  # noqa: C408 - which is called
    "text": lambda x: x * len("{fn}{name}".format(fn="ab", name="c")),
}


@pytest.mark.parametrize("name", _NAMED)
def test_arguments_may_have_the_names_that_the_interpreter_has_for_its_own(name):
    x = torch.arange(3.0)
    for transform in (SubclassTransform, NormTransform, CheckpointTransform):
        assert torch.equal(thunder.jit(_NAMED[name], transforms=[transform()])(x), _NAMED[name](x))


def test_defaults_that_the_program_gives_its_own_functions():
    def f(x):
        def inner(a=1, *, k=2):
            return a, k

        inner.__defaults__, inner.__kwdefaults__ = (x * 2,), {"k": 5}
        return inner(), inner.__defaults__

    x = torch.tensor([1.0, 2.0])
    assert repr(thunder.jit(f, transforms=[NormTransform()])(x)) == repr(f(x))


def test_defaults_of_what_was_there_before_are_not_replaced():
    def f(x):
        positional.__defaults__ = (5,)
        return positional(x, 2)

    with pytest.raises(UnsupportedOpError, match="gives positional another __defaults__"):
        thunder.jit(f, transforms=[NormTransform()])(torch.ones(2))
    assert positional.__defaults__ == (3,)
