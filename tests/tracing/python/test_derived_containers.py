"""Classes derived from list, dict and tuple, and what is made of functions: programs that make their objects, as eager mode has them."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import random
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.tracing import native
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


class Mapped:
    """What Python takes for a mapping: it has keys and items."""

    def __init__(self, **items):
        self.items_of = items

    def keys(self):
        return self.items_of.keys()

    def __getitem__(self, key):
        return self.items_of[key]


def _refused(f):
    try:
        return f()
    except TypeError:
        return 2.0


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
    "objects that are mappings": lambda x: (
        {"c": x, **Mapped(a=x, b=2)}["a"] * dict(Mapped(a=3, b=2), d=1)["a"] + (lambda a, b: a * b)(**Mapped(a=x, b=2))
    ),
    "what is no mapping": lambda x: (
        x * _refused(lambda: {**5})
        + _refused(lambda: dict(**5))
        + _refused(lambda: dict(**Mapped(a=1), a=2))
        + _refused(lambda: dict(**{"a": 1}, **{"a": 2}))
    ),
    "operators in place": lambda x: (lambda y, held: operator.iadd(held, [operator.imul(y, 2)])[1] + held[1] * y)(x * 1, [x]),
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


# -- methods of the program's own: one at a time, in pairs, all at once -------------------------------------------------------
#
# Each does something that would show if it ran once more, or in place of the builtin class's.

OF_MAPPINGS = {
    "__setitem__": lambda base: lambda s, k, v: base.__setitem__(s, k, v * 2),
    "__getitem__": lambda base: lambda s, k: base.__getitem__(s, k) * 3,
    "__delitem__": lambda base: lambda s, k: base.__delitem__(s, next(iter(base.keys(s)))),
    "__contains__": lambda base: lambda s, k: not base.__contains__(s, k),
    "__iter__": lambda base: lambda s: iter(list(base.keys(s))[::-1]),
    "__len__": lambda base: lambda s: base.__len__(s) + 10,
    "__missing__": lambda base: lambda s, k: (base.__setitem__(s, k, 7), 11)[1],
    "keys": lambda base: lambda s: list(base.keys(s))[:1],
    "items": lambda base: lambda s: [(k, v + 1) for k, v in base.items(s)],
    "values": lambda base: lambda s: [v * 5 for v in base.values(s)],
    "get": lambda base: lambda s, k, d=None: base.get(s, k, 2) * 5,
    "pop": lambda base: lambda s, k, *d: base.pop(s, k, *d) * 7,
    "update": lambda base: lambda s, *o, **kw: base.update(s, {k + "x": v for k, v in dict(*o, **kw).items()}),
    "setdefault": lambda base: lambda s, k, d: base.setdefault(s, k, d * 2),
}
OF_LISTS = {
    "append": lambda base: lambda s, v: base.append(s, v * 2),
    "__setitem__": lambda base: lambda s, i, v: base.__setitem__(s, i, v * 3),
    "__getitem__": lambda base: lambda s, i: base.__getitem__(s, i) * 5,
    "__delitem__": lambda base: lambda s, i: base.__delitem__(s, i + 1),
    "__contains__": lambda base: lambda s, v: not base.__contains__(s, v),
    "__iter__": lambda base: lambda s: iter([v * 7 for v in base.__iter__(s)]),
    "__len__": lambda base: lambda s: base.__len__(s) + 10,
    "extend": lambda base: lambda s, v: base.extend(s, [i * 7 for i in v]),
    "pop": lambda base: lambda s, *i: base.pop(s, *i) * 2,
    "insert": lambda base: lambda s, i, v: base.insert(s, i, v * 2),
    "index": lambda base: lambda s, v: base.index(s, v) + 5,
    "reverse": lambda base: lambda s: (base.reverse(s), base.append(s, 9))[0],
}


def _use_of_mapping(x, d):
    d["a"], d["b"] = 2, x
    found = [d["a"], d["b"], d.get("a"), "a" in d, len(d), [*d], list(d.keys()), list(d.items()), list(d.values())]
    found += [dict(d), {**d}, d.setdefault("c", 3), (lambda **named: named)(**d)]
    d.update({"q": 3}, r=4)
    found += [d.pop("a"), len(d), list(d)]
    del d["b"]
    return found


def _use_of_list(x, made):
    made.append(x)
    made[0] = 4
    made.extend([1, 2])
    made.insert(1, 5)
    found = [
        made[0],
        made[1],
        len(made),
        [v for v in made],
        list(made),
        (lambda *given: given)(*made),
        tuple(made),
        4 in made[:0:1] + [4],
        made.pop(),
    ]
    del made[0]
    made.reverse()
    return [*found, made[-1], [*made], sum(made[1:2] + [1])]


def _stored(value):
    """What is held, by the builtin classes' methods, as lists."""
    if isinstance(value, dict):
        of_base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return [(k, _stored(v)) for k, v in of_base.items(value)]
    if isinstance(value, list | tuple):
        base = list if isinstance(value, list) else tuple
        return [_stored(v) for v in base.__iter__(value)]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _class(base, methods, names):
    return type("Own", (base,), {name: methods[name](base) for name in names})


def _drawn():
    draw = random.Random(seeded(0))
    for base, methods, use in (
        (dict, OF_MAPPINGS, _use_of_mapping),
        (collections.OrderedDict, OF_MAPPINGS, _use_of_mapping),
        (collections.defaultdict, OF_MAPPINGS, _use_of_mapping),
        (list, OF_LISTS, _use_of_list),
    ):
        pairs = draw.sample(list(itertools.combinations(methods, 2)), 4)
        for names in [*((name,) for name in methods), *pairs, tuple(methods)]:
            yield pytest.param(base, methods, use, names, id=f"{base.__name__} {' '.join(names) if len(names) < 3 else 'all'}")


def _outcome(fn, *args):
    try:
        return _stored(fn(*args))
    except (KeyError, IndexError, TypeError, ValueError) as e:
        return type(e)


@pytest.mark.parametrize(("base", "methods", "use", "names"), _drawn())
def test_methods_of_their_own_run_where_the_program_asks(base, methods, use, names):
    cls = _class(base, methods, names)

    def program(x):
        made = cls() if base is not list else cls([6, 8])
        return use(x, made), made

    x = torch.tensor([1.0, 2.0])
    assert _outcome(thunder.jit(program, transforms=[CheckpointTransform()]), x) == _outcome(program, x)


def test_and_without_native_equivalents_of_the_interpreter():
    cls = _class(list, OF_LISTS, ("__getitem__", "__iter__"))

    def program(x):
        made = cls([6, 8])
        return _use_of_list(x, made), made

    x = torch.tensor([1.0, 2.0])
    with native.switched_off():
        assert _outcome(thunder.jit(program, transforms=[CheckpointTransform()]), x) == _outcome(program, x)


class Odd(set):
    def add(self, v):
        super().add(v * 2)

    def __contains__(self, v):
        return not super().__contains__(v)

    def __iter__(self):
        return iter([v * 3 for v in super().__iter__()])


def test_sets():
    def program(x, s):
        s.add(2)
        return x * len(s) + (4 in s) + sum(s) + len({*s}) + sum([v for v in s])

    jitted, x = thunder.jit(program, transforms=[CheckpointTransform()]), torch.ones(2)
    for v in (1, 5):
        mine, theirs = Odd([v]), Odd([v])
        torch.testing.assert_close(jitted(x, mine), program(x, theirs))
        assert set.__eq__(mine, theirs)


class AttrDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


def _by_attributes(x, d):
    d.b = 3
    found = x * d.b * d.a * ("b" in d)
    del d.a
    return found * len(d) * (1 if "a" in d else 2)


All, AllOfLists = (_class(base, methods, methods) for base, methods in ((dict, OF_MAPPINGS), (list, OF_LISTS)))


def _dict(cls, **entries):
    made = cls()
    dict.update(made, entries)
    return made


def _list(cls, *entries):
    made = cls()
    list.extend(made, entries)
    return made


GIVEN = {
    "an entry": (lambda x, d: x * d["a"], [_dict(All, a=2), _dict(All, a=3)]),
    "a tensor": (lambda x, d: x * d["a"], [_dict(All, a=torch.ones(2)), _dict(All, a=torch.zeros(2))]),
    "one inside another": (lambda x, d: x * d["c"]["a"], [{"c": _dict(All, a=torch.full((2,), v))} for v in (2.0, 3.0)]),
    "how many": (lambda x, d: x * len(d), [_dict(All, a=2), _dict(All, a=2, b=2)]),
    "iteration": (lambda x, d: x * len("".join(d)), [_dict(All, a=2), _dict(All, abc=2)]),
    "an element": (lambda x, made: x * made[0], [_list(AllOfLists, 2), _list(AllOfLists, 3)]),
    "an element that is a tensor": (lambda x, made: x * made[0], [_list(AllOfLists, torch.full((2,), v)) for v in (2.0, 3.0)]),
    "a sum": (lambda x, made: x * sum(made), [_list(AllOfLists, 2), _list(AllOfLists, 3), _list(AllOfLists, 3, 4)]),
    "what torch reads": (lambda x, made: torch.cat(made) + x.sum(), [_list(AllOfLists, torch.full((2,), v)) for v in (2.0, 3.0)]),
    "a write": (lambda x, made: (made.append(4), x * made[0])[1], [_list(AllOfLists, 2), _list(AllOfLists, 3)]),
    "attributes": (_by_attributes, [_dict(AttrDict, a=1), _dict(AttrDict, a=2)]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_given_ones_are_read_as_they_are_stored_and_guarded(name):
    program, given = GIVEN[name]
    jitted, x = thunder.jit(program, transforms=[CheckpointTransform()]), torch.tensor([1.0, 2.0])
    for value in given:
        mine, theirs = _copied(value), _copied(value)
        torch.testing.assert_close(jitted(x, mine), program(x, theirs))
        assert _stored(mine) == _stored(theirs)


def _copied(value):
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return _dict(type(value), **dict(dict.items(value))) if isinstance(value, dict) else _list(type(value), *list.__iter__(value))


class Another:
    def __new__(cls, value):
        return value

    def __init__(self, value):
        raise AssertionError("what is made is no instance")


def test_what_is_made_of_another_class_is_not_initialized():
    assert thunder.jit(lambda x: x * Another(3), transforms=[CheckpointTransform()])(torch.ones(1)).item() == 3


def test_a_key_that_compares():
    def program(x):
        return x * sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))[0]

    assert thunder.jit(program, transforms=[CheckpointTransform()])(torch.ones(1)).item() == 3


NAMED: dict[str, Callable] = {
    "repeated": lambda p: p * 2,
    "repeated, on the left": lambda p: 2 * p,
    "repeated never": lambda p: p * 0,
    "repeated, made inside": lambda p: Named(p.u * 2, 4) * 2,
    "joined": lambda p: p + (1, p.u),
}


class Named(typing.NamedTuple):
    """A named tuple with no method of its own."""

    u: Any
    v: Any


@pytest.mark.parametrize("name", NAMED)
def test_what_is_made_of_named_tuples_is_a_tuple(name):
    jitted = thunder.jit(NAMED[name], transforms=[NormTransform()])
    for v in (1, 2):
        given = Named(torch.ones(2) * v, v)
        found, expected = jitted(given), NAMED[name](given)
        assert type(found) is type(expected) is tuple
        torch.testing.assert_close(found, expected)
