"""Programs of objects that Thunder's interpreter meets: attributes, descriptors, subclasses of containers, and what changes these."""

import collections

from tests.native_programs import program


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
