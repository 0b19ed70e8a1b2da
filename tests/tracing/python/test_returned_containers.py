"""Lists of the call that a program changes and returns, within what it makes: eager mode's objects in each call."""

import collections
import datetime
import decimal
import fractions
import functools
import operator
import pathlib
import re

import numpy as np
import pytest
import torch

from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

_CHANGES = {
    "append": lambda a, x: a.append(x * 2),
    "extend": lambda a, x: a.extend([x * 2, x]),
    "extended by a generator": lambda a, x: a.extend(t * 2 for t in [x, a[0]]),
    "extended by itself": lambda a, x: a.extend(a),
    "added in place": lambda a, x: a.__iadd__([x * 2]),
    "insert": lambda a, x: a.insert(0, x * 2),
    "pop": lambda a, x: a.pop(),
    "none": lambda a, x: None,
}
_RETURNS = {
    "it": lambda a, x: a,
    "beside an element": lambda a, x: (a, a[-1]),
    "in a list": lambda a, x: [a, a],
    "in a dict": lambda a, x: {"a": a, "x": x},
    "in a dict of lists": lambda a, x: {"a": [a], "b": {"c": (a, x)}},
    "in a dict that is comprehended": lambda a, x: {k: a for k in "ab"},
    "in a dict that is added to": lambda a, x: [d := {"x": x * 3}, d.update(a=a), d][-1],
    "in a list within a dict, later": lambda a, x: [held := [], d := {"a": held}, held.append(a), d][-1],
}


def _described(value: object, a: list) -> object:
    if value is a:
        return "the list"
    if isinstance(value, dict):
        return {k: _described(v, a) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [_described(v, a) for v in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("returned", _RETURNS)
@pytest.mark.parametrize("change", _CHANGES)
def test_lists_of_the_call(change: str, returned: str) -> None:
    def f(a, x):
        _CHANGES[change](a, x)
        return _RETURNS[returned](a, x)

    jf = thunder.jit(f, transforms=[NormTransform()])
    for scale in (1.0, 2.0):
        results = []
        for call in (f, jf):
            a, x = [torch.full((2,), scale), torch.full((3,), scale)], torch.full((2,), scale / 4)
            results.append((_described(call(a, x), a), [t.tolist() for t in a]))
        assert results[0] == results[1]
    assert thunder.cache_misses(jf) == 1


_CHANGES_OF_DICTS = {
    "operator.setitem": lambda d, y: operator.setitem(d, "a", y),
    "operator.setitem, mapped": lambda d, y: list(map(operator.setitem, [d], ["a"], [y])),
    "operator.delitem": lambda d, y: (operator.delitem(d, "a"), operator.setitem(d, "a", y)),
    "of what it holds": lambda d, y: operator.setitem(d, "a", d["a"] + y),
    "update": lambda d, y: d.update(a=y),
    "update by pairs": lambda d, y: d.update([("a", y)]),
    "or": lambda d, y: operator.ior(d, {"a": y}),
    "made anew": lambda d, y: d.__init__(a=y),
    "a chain": lambda d, y: collections.ChainMap(d).__setitem__("a", y),
    "popped": lambda d, y: (d.pop("a"), d.setdefault("a", y)),
    "exchanged": lambda d, y: d.update(a=d["b"], b=d["a"]),
    "nested": lambda d, y: d.setdefault("n", {}).update(z=y),
    "reduced": lambda d, y: functools.reduce(lambda e, k: (e.__setitem__(k, y), e)[1], "ab", d),
}


@pytest.mark.parametrize("change", _CHANGES_OF_DICTS)
def test_dicts_of_the_program(change: str) -> None:
    def f(x, y):
        d = {"a": x, "b": x * 2}
        _CHANGES_OF_DICTS[change](d, y)
        made = {k: x * i for i, k in enumerate("ab", 1)}
        _CHANGES_OF_DICTS[change](made, y)
        return d, {"inside": made}, list(d.values()), d | {"c": 1}

    jf = thunder.jit(f, transforms=[NormTransform()])
    for scale in (1.0, 2.0):
        x, y = torch.full((2,), scale), torch.full((2,), scale * 5)
        assert _described(jf(x, y), []) == _described(f(x, y), [])


_CONSTANTS = {
    "bytes": lambda x: b"ab",
    "ranges": lambda x: range(x.shape[0]),
    "frozenset": lambda x: frozenset([x.shape[0], "a"]),
    "fractions": lambda x: [fractions.Fraction(x.shape[0], 7), decimal.Decimal(x.shape[0]) / 7],
    "times": lambda x: datetime.date(2020, 1, x.shape[0]) + datetime.timedelta(1),
    "paths": lambda x: pathlib.PurePath("a") / str(x.shape[0]),
    "NumPy's numbers": lambda x: [np.int64(x.shape[0]), np.float32(2), np.float64(2.5), np.bool_(True), np.dtype("float32")],
    "types": lambda x: [list[int], int | None, re.compile("a")],
}


@pytest.mark.parametrize("kind", _CONSTANTS)
def test_values_that_never_change_are_returned(kind: str) -> None:
    def f(x):
        value = _CONSTANTS[kind](x)
        return {"x": x * 2, "value": value, "inside": (value, [value])}

    for transform in (NormTransform, SubclassTransform):
        jf = thunder.jit(f, transforms=[transform()])
        for _ in range(2):
            found, wanted = jf(torch.ones(2)), f(torch.ones(2))
            assert torch.equal(found.pop("x"), wanted.pop("x"))
            assert found == wanted
            assert str(_types_of(found)) == str(_types_of(wanted))
    assert thunder.jit(_CONSTANTS[kind], transforms=[SubclassTransform()])(torch.ones(2)) == _CONSTANTS[kind](torch.ones(2))


def _types_of(value: object) -> object:
    return (
        [type(value), [*map(_types_of, value.values())]]
        if isinstance(value, dict)
        else [type(value), [*map(_types_of, value)] if isinstance(value, list | tuple) else ()]
    )


class Row(tuple):
    def __new__(cls, *values):
        made = super().__new__(cls, values)
        made.count = len(values)
        return made


@pytest.mark.parametrize("made", [lambda x: Row(1, 2), lambda x: Row(x, x + 1), lambda x: [Row(x, Row())]])
def test_a_tuple_of_a_class_of_the_program_is_made_anew_with_what_it_has(made):
    jitted, x = thunder.jit(made, transforms=[NormTransform()]), torch.tensor([1.0, 2.0])
    for given in (x, x * 2):
        found, expected = jitted(given), made(given)
        assert repr(found) == repr(expected)
        ours, eagers = (v[0] if isinstance(v, list) else v for v in (found, expected))
        assert type(ours) is Row and vars(ours) == vars(eagers)
