"""Programs of objects that Thunder's interpreter meets: attributes, descriptors, subclasses of containers, and what changes these."""

import collections
import functools

import torch

from tests.tracing.native_programs import program


class Odd:
    """Asks of attributes what few do."""

    kinds = ("a", "b")
    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.slot = 3
        self.own = 4

    @property
    def fails(self):
        raise AttributeError("on purpose")

    @property
    def doubled(self):
        return 2 * self.own

    @classmethod
    def made(cls):
        return cls()

    @staticmethod
    def triple(n):
        return 3 * n

    def __getattr__(self, name):
        if name == "given":
            return 5
        raise AttributeError(name)

    def __bool__(self):
        return False

    def __len__(self):
        return 6

    def __contains__(self, key):
        return key == "k"

    def __getitem__(self, key):
        return key * 2

    def __add__(self, other):
        return NotImplemented

    def __radd__(self, other):
        return other + self.own

    def __call__(self, n, *more, scale=1):
        return (n + sum(more)) * scale


@program
def attributes(x):
    o = Odd.made()
    n = o.slot + o.own + o.doubled + o.triple(2) + o.given + len(o) + o[4] + o(1, 2, scale=3) + len(o.kinds)
    if hasattr(o, "fails") or hasattr(o, "nothing") or o or "j" in o:
        return x
    o.own = 8
    o.fresh = getattr(o, "nothing", 9)
    o.own += 1
    return (x * n + o) * o.fresh + ("k" in o)


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, cls=None):
        return self if obj is None else vars(obj)[self.name] * 2

    def __set__(self, obj, value):
        vars(obj)[self.name] = value


class NonData:
    def __get__(self, obj, cls=None):
        return 11


class Meta(type):
    @property
    def of_class(cls):
        return 13


class Described(metaclass=Meta):
    data = Descriptor()
    plain = NonData()
    shadowed = NonData()


@program
def descriptors(x):
    d = Described()
    vars(d)["_data"] = 3
    d.shadowed = 4
    return x * d.data + d.plain + d.shadowed + Described.of_class


class Upper(dict):
    def __getitem__(self, key):
        return super().__getitem__(key.lower())

    def __missing__(self, key):
        return 17


class Longer(list):
    def __len__(self):
        return super().__len__() + 1


@program
def subclassed_containers(x):
    ordered = collections.OrderedDict(a=1, b=2)
    counted = collections.defaultdict(int)
    counted["a"] += 2
    return x * ordered["b"] + counted["a"] + counted["b"]


@program
def subclassed_dict(x):
    return x * Upper(a=1)["A"]


@program
def subclassed_list(x):
    return x * len(Longer([1, 2]))


@program
def mutated_lists(x):
    values = [1, 2]
    for v in values:
        if v < 4:
            values.append(v + 2)
    values[0] = values[-1]
    values += [5]
    del values[1]
    values.extend((6, 7))
    last = values.pop()
    return x * sum(values) + last + len(values)


@program
def mutated_dicts(x):
    d = {"a": 1}
    d["b"] = 2
    d.update({"c": 3}, e=4)
    d |= {"f": 5}
    del d["a"]
    got = d.pop("b") + d.get("zz", 6) + d.setdefault("y", 7)
    try:
        got += d["none"]
    except KeyError:
        got += 8
    for k, v in d.items():
        got += v * len(k)
    return x * got + ("c" in d) + ("q" not in d)


@program
def an_attribute_that_is_not_there(x):
    return Odd().nowhere


class Says:
    """Says of itself what it is told to."""

    def __init__(self, **answers):
        vars(self).update(answers)

    def __len__(self):
        return self.length

    def __bool__(self):
        return self.truth


@program
def a_length_below_zero(x):
    return x * len(Says(length=-1))


@program
def a_length_that_is_no_number(x):
    return x * len(Says(length="a"))


@program
def lengths_and_truths(x):
    ordered = collections.OrderedDict(a=1)
    found = [
        bool(Says(truth=True)),
        not Says(truth=False),
        len(Says(length=3)),
        bool(ordered),
        len(ordered),
        len({1, 2}),
        bool({}),
    ]
    return x * sum(found) + len(range(4)) + bool(range(0)) + len("abc") + bool(NonData())


@program
def no_length(x):
    return x * len(NonData())


class Equal:
    def __init__(self, to):
        self.to = to

    def __eq__(self, other):
        return other == self.to


@program
def membership(x):
    found = [3 in [1, Equal(3)], Equal(1) in (1, 2), "b" in "abc", 2 in {1, 2}, 5 in range(9), None in [1, None], 1.0 in (1, 2)]
    return x * sum(found) + (x in [x]) + ("a" not in collections.OrderedDict(a=1)) + (float("nan") in [float("nan")])


@program
def partials(x):
    def f(a, b=2, *rest, c=3, **more):
        return a * b + c + sum(rest) + sum(more.values())

    inner = functools.partial(f, x)
    outer = functools.partial(inner, 4, c=5)
    return (
        inner() + inner(1, 2, 3) + inner(c=7) + outer(6, z=8) + functools.partial(torch.add, x)(1) + functools.partial(x.mul, 2)()
    )


@program
def partials_that_ask_who_calls(x):
    asked = functools.partial(isinstance, x)
    return x * asked(torch.Tensor) + functools.partial(hasattr, x)("shape") + functools.partial(len, [1, 2])()


@program
def numbers_with_tensors(x):
    return 2 * x + x / 2 - (3 - x) + 2**x + (x > 1) * (1 < x) + -x % 2 + x // 2 + (x @ x.T).sum()


@program
def operands_that_know_nothing_of_each_other(x):
    return x * (NonData() + Says())


@program
def views_of_dicts(x):
    d = {"a": 1, "b": 2}
    total = sum(d.values()) + len(d.keys()) + sum(v for _, v in d.items()) + sum(map(len, d)) + ("a" in d.keys())
    for (k, v), other in zip(d.items(), reversed([3, 4]), strict=True):
        total += v * other + len(k)
    return x * total + len({*d, *{"c"}})


@program
def changed_while_it_is_iterated(x):
    d = {"a": 1}
    for k in d:
        d[k + "b"] = 2
    return x * len(d)
