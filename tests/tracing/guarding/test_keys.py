"""Keys of dicts and elements of sets that come with a call: what is in them is guarded, and results have them."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

X = torch.tensor([1.0, 2.0])
WIDTHS = {("a", (1, 2)): 5.0, ("a", (1, 3)): 7.0, (("a", (1, 2)), "k"): 11.0, (("a", (1, 3)), "k"): 13.0}
KNOWN = {("a", (1, 2)), (("a", (1, 2)), "k")}


class Kind(enum.Enum):
    DATA = 1
    MASK = 2


Named = collections.namedtuple("Named", "x y")


def stored(x: torch.Tensor, key: Any) -> dict:
    made = {}
    made[key] = x * 2
    return made


def updated(x: torch.Tensor, key: Any) -> dict:
    made = {"other": x}
    made.update({key: x + 1})
    made.update([(key, made[key] * 3)])
    return made


def kept(x: torch.Tensor, key: Any) -> list:
    made = {}
    made.setdefault(key, []).append(x)
    return [made, {"inner": {key: (x, {key: 3})}}]


def of_a_default(x: torch.Tensor, key: Any) -> dict:
    made = collections.defaultdict(list)
    made[key].append(x * 2)
    return made


def ordered(x: torch.Tensor, key: Any) -> dict:
    made = collections.OrderedDict()
    made[key] = x
    made[(key, 1)] = x * 2
    return made


RESULTS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "stored": stored,
    "updated": updated,
    "kept": kept,
    "of a defaultdict": of_a_default,
    "of an OrderedDict": ordered,
    "written": lambda x, key: {key: x, (key, 2): x},
    "comprehended": lambda x, key: {k: x * i for i, k in enumerate((key, "b"))},
    "zipped": lambda x, key: dict(zip([key, "b"], [x, x * 2], strict=True)),
    "pairs": lambda x, key: dict([(key, x)]),
    "of keys": lambda x, key: dict.fromkeys([key, "b"], 1.0) | {"x": x},
}
KEYS = ["a", 3, 2.5, None, True, b"q", ("a", (1, 2)), ("a", (1, 3)), Kind.DATA, Kind.MASK, torch.float32, float, frozenset([1])]
KEYS += [frozenset([2]), torch.device("cpu"), torch.strided, torch.sparse_coo, float("inf"), torch.Size([2]), torch.relu]


@pytest.mark.parametrize("name", RESULTS)
def test_dicts_with_keys_that_are_given(name: str):
    f = RESULTS[name]
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for key in (*KEYS, *KEYS):
        got, want = jitted(X, key), f(X, key)
        assert type(got) is type(want) and tree_flatten(got)[1] == tree_flatten(want)[1]
        for a, b in zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True):
            torch.testing.assert_close(a, b)


def test_fields_of_named_tuples_are_keys():
    def f(p: Any) -> dict:
        return {**p._asdict(), "all": dict(zip(p._fields, (p.x * 2, p.y), strict=True))}

    for transform in (SubclassTransform, NormTransform):
        jitted = thunder.jit(f, transforms=[transform()])
        assert tree_flatten(jitted(Named(X, X * 3)))[1] == tree_flatten(f(Named(X, X)))[1]


USES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "looked up": lambda x, key: x * WIDTHS[key],
    "looked up in a pair": lambda x, key: x * WIDTHS[key, "k"],
    "got": lambda x, key: x * WIDTHS.get(key, 3.0),
    "in a dict": lambda x, key: x * (2 if key in WIDTHS and (key, "k") in {(("a", (1, 2)), "k"): 1} else 3),
    "in a set": lambda x, key: x * (2 if key in KNOWN else 3),
    "a pair in a set": lambda x, key: x * (2 if (key, "k") in KNOWN else 3),
    "index": lambda x, key: x * [("a", (1, 2)), ("a", (1, 3))].index(key),
    "index of another": lambda x, key: x * [0, key, ("a", (1, 2))].index(("a", (1, 2))),
    "count": lambda x, key: x * [("a", (1, 2)), ("a", (1, 3)), ("a", (1, 3))].count(key),
    "written set": lambda x, key: x * len({key, ("a", (1, 2))}),
    "comprehended set": lambda x, key: x * len({k for k in (key, ("a", (1, 2)))}),
    "set": lambda x, key: x * len(set([key, ("a", (1, 2))])),
    "frozenset": lambda x, key: x * len(frozenset([key, ("a", (1, 2))])),
    "difference": lambda x, key: x * len(KNOWN - {key}),
    "counted": lambda x, key: x * collections.Counter([key, ("a", (1, 2))])["a", (1, 2)],
    "sorted": lambda x, key: x * sorted([key, ("a", (1, 2, 0))]).index(("a", (1, 2, 0))),
    "least": lambda x, key: x * len(min([key, ("a", (1, 2, 0))])[1]),
    "popped": lambda x, key: x * {("a", (1, 2)): 5.0}.pop(key, 3.0),
    "by default": lambda x, key: x * {("a", (1, 2)): 5.0}.setdefault(key, 3.0),
    "compared": lambda x, key: x * (2 if key == ("a", (1, 2)) else 3),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_in_a_key_is_guarded(name: str):
    f = USES[name]
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    assert not torch.equal(f(X, ("a", (1, 2))), f(X, ("a", (1, 3))))
    for n in (2, 3, 2, 3):
        torch.testing.assert_close(jitted(X, ("a", (1, n))), f(X, ("a", (1, n))))


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda: collections.defaultdict(int)])
def test_keys_of_other_types_stay_what_they_are(kind: Callable[[], dict]):
    """`float` is no dtype as a key, and a number of NumPy none of Python's."""

    def f(x: torch.Tensor) -> Any:
        made = kind()
        made[float], made[np.int64(3)] = x, x * 2
        return [str(type(k)) + str(k) for k in made], x

    assert thunder.jit(f, transforms=[SubclassTransform()])(X)[0] == f(X)[0]
