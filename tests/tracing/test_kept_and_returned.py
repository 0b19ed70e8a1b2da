"""What a program puts at two places, kept and returned, is one object in each call, whatever it is and wherever it stands."""

import collections
import itertools
import random
import types
from dataclasses import dataclass

import pytest
import torch

from tests.seeds import named_seed
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

GLOBAL = {}
Pair = collections.namedtuple("Pair", ["t", "u"])


@dataclass
class Held:
    t: object


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t):
        self.t = t


class Keeping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = self.two = None
        self.sub = torch.nn.Module()
        self.table, self.places, self.space = {}, [None, None], types.SimpleNamespace()


_KINDS = {
    "list": lambda x: [x * 2],
    "dict": lambda x: {"k": x * 2},
    "nested": lambda x: {"k": [[x * 2]]},
    "deque": lambda x: collections.deque([x * 2]),
    "object": lambda x: Held([x * 2]),
    "slots": lambda x: Slotted(x * 2),
    "tuple": lambda x: (x * 2, [x + 1]),
    "named tuple": lambda x: Pair(x * 2, [x + 1]),
    "tensor": lambda x: x * 2,
    "closure": lambda x: _closing_over(x * 2),
}


def _closing_over(y):
    return lambda: y


def _set_item(place, key):
    return lambda env, v: place(env).__setitem__(key, v)


def _set(place, name):
    return lambda env, v: setattr(place(env), name, v)


# for each place: how a value is put there, and where it is after the call
_PLACES = {
    "attribute": (_set(lambda e: e.model, "one"), lambda e: e.model.one),
    "another attribute": (_set(lambda e: e.model, "two"), lambda e: e.model.two),
    "submodule": (_set(lambda e: e.model.sub, "one"), lambda e: e.model.sub.one),
    "dict of a module": (_set_item(lambda e: e.model.table, "k"), lambda e: e.model.table["k"]),
    "list of a module": (_set_item(lambda e: e.model.places, 1), lambda e: e.model.places[1]),
    "object of a module": (_set(lambda e: e.model.space, "one"), lambda e: e.model.space.one),
    "global": (lambda env, v: GLOBAL.__setitem__("k", v), lambda e: GLOBAL["k"]),
    "dict given": (_set_item(lambda e: e.given, "k"), lambda e: e.given["k"]),
    "list given": (lambda env, v: env.items.append(v), lambda e: e.items[-1]),
    "object given": (_set(lambda e: e.space, "one"), lambda e: e.space.one),
    "result": (_set_item(lambda e: e.result, "one"), lambda e: e.result["one"]),
    "result again": (_set_item(lambda e: e.result, "two"), lambda e: e.result["two"]),
    "in the result": (lambda env, v: env.result.__setitem__("in", [v]), lambda e: e.result["in"][0]),
    "object in the result": (lambda env, v: env.result.__setitem__("held", Held(v)), lambda e: e.result["held"].t),
}
_PAIRS = [*itertools.combinations(_PLACES, 2)]


def _tensors(v):
    if isinstance(v, torch.Tensor):
        return [v.tolist()]
    if isinstance(v, types.FunctionType):
        return _tensors(v())
    held = v.values() if isinstance(v, dict) else v if isinstance(v, list | tuple | collections.deque) else [v.t]
    return [t for item in held for t in _tensors(item)]


def _observed(kind, places, jit):
    make, puts = _KINDS[kind], [_PLACES[p][0] for p in places]
    model, found = Keeping(), []
    GLOBAL.clear()

    def program(x, given, items, space):
        env = types.SimpleNamespace(model=model, given=given, items=items, space=space, result={})
        made = make(x)
        for put in puts:
            put(env, made)
        return env.result

    f = jit(program)
    for i in range(2):
        env = types.SimpleNamespace(model=model, given={}, items=[], space=types.SimpleNamespace())
        env.result = f(torch.ones(2) + i, env.given, env.items, env.space)
        ends = [_PLACES[p][1](env) for p in places]
        found.append([ends[0] is end for end in ends] + [(type(end).__name__, _tensors(end)) for end in ends])
    return found


@pytest.mark.parametrize("kind", _KINDS)
def test_what_stands_at_two_places_is_one_object(kind):
    for places in random.Random(named_seed(kind)).sample(_PAIRS, 5):
        found = _observed(kind, places, lambda f: thunder.jit(f, transforms=[SubclassTransform()]))
        assert found == _observed(kind, places, lambda f: f), (kind, places)


def test_a_tuple_of_what_is_kept_is_returned():
    model = Keeping()

    def program(x):
        model.table["cache"] = cache = [x * 2, {"y": x}]
        return x + 1, cache, (cache[1], cache)

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        _, cache, (y, again) = jitted(torch.ones(2))
        assert cache is again is model.table["cache"] and y is cache[1]


def test_what_is_kept_has_no_norms_and_what_is_returned_has():
    class Remembers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = self.again = None

        def forward(self, x):
            self.seen = self.again = made = [x * 2]
            return made

    model = Remembers()
    (y,) = thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(torch.ones(2)))
    assert type(y) is RMSTensor and model.seen is model.again
    assert type(model.seen[0]) is torch.Tensor and model.seen[0].tolist() == [2.0, 2.0]


def test_code_without_a_module_keeps_tensors():
    names = {"model": Keeping()}
    exec("def f(x):\n    model.table['k'] = [x * 2]", names)  # noqa: S102
    jitted = thunder.jit(names["f"], transforms=[SubclassTransform()])
    for i in range(2):
        jitted(torch.ones(2) + i)
        assert names["model"].table["k"][0].tolist() == [2.0 + 2 * i] * 2


class Counted(list):
    def __iter__(self):
        for value in super().__iter__():
            GLOBAL["iterations"] += 1
            yield value


class CountedDict(dict):
    def items(self):
        GLOBAL["iterations"] += 1
        return super().items()


@pytest.mark.parametrize("make", [lambda x: Counted([x, 2]), lambda x: CountedDict(a=x, b=2)], ids=["list", "dict"])
def test_to_look_at_what_is_kept_runs_nothing_of_its_class(make):
    def f(x):
        held = make(x * 2)
        held["a" if isinstance(held, dict) else 0] = x + 1
        GLOBAL["kept"] = held
        return x

    jitted = thunder.jit(f, transforms=[NormTransform()])
    GLOBAL["iterations"] = 0
    for given in (torch.ones(2), torch.ones(2) * 3, torch.ones(2)):
        jitted(given)
        kept = GLOBAL["kept"]
        assert torch.equal(dict.get(kept, "a") if isinstance(kept, dict) else list.__getitem__(kept, 0), given + 1)
    assert GLOBAL.pop("iterations") == 0
    del GLOBAL["kept"]
