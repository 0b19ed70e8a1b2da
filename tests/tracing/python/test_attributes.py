"""Attributes that Python code computes, assigns or looks up are in traces what they are in eager mode."""

import contextlib
import copy
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor
from thunder_norm.tracing import native
from thunder_norm.transforms import NormTransform, SubclassTransform, grad
import thunder


class Doubled:
    def __init__(self, n=1):
        self.n = n
        self.reads = 0

    @property
    def v(self):
        self.reads += 1
        return self.n * 2

    @v.setter
    def v(self, value):
        self.n = value + 1

    @functools.cached_property
    def kept(self):
        return self.n * 3

    @property
    def fixed(self):
        return 4


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, cls=None):
        return self if obj is None else obj.__dict__[self.name] + 1

    def __set__(self, obj, value):
        obj.__dict__[self.name] = value * 3


class NonData:
    def __get__(self, obj, cls=None):
        return obj.n * 2


class Described:
    data = Descriptor()
    plain = NonData()

    def __init__(self):
        self.n = 1


class Elsewhere:
    """Keeps its attributes in a dict of its own, changed."""

    def __init__(self):
        object.__setattr__(self, "held", {"a": 1})

    def __getattr__(self, name):
        try:
            return self.held[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self.held[name] = value * 5


class Scaling:
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value * 5)


class Mapped:
    names = {"width": "n"}

    def __init__(self):
        self.n = 1

    def __getattribute__(self, key):
        if key != "names" and key in super().__getattribute__("names"):
            key = super().__getattribute__("names")[key]
        return super().__getattribute__(key)


class Slotted:
    __slots__ = ("a",)


PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def a_property_is_computed_at_each_read(x):
    d = Doubled()
    first = d.v
    d.n = 5
    return x * first + d.v + d.reads


@program
def a_property_of_tensors(x):
    d = Doubled(x)
    first = d.v
    d.n = first * x
    return first + d.v


@program
def a_property_is_assigned(x):
    d = Doubled()
    d.v = x
    before = d.v
    d.v += 1
    setattr(d, "v", d.v * x)  # noqa: B010
    return before + d.v + d.n


@program
def a_property_without_setter(x):
    try:
        Doubled().fixed = 1
    except AttributeError:
        return x + 1
    return x


@program
def a_cached_property(x):
    d = Doubled()
    first = d.kept
    d.n = 5
    return x * first + d.kept


@program
def descriptors(x):
    d = Described()
    first = d.plain
    d.n = 5
    d.data = 2
    d.data += 1
    return x * first + d.plain + d.data


@program
def attributes_kept_elsewhere(x):
    e = Elsewhere()
    first = e.a
    e.a = 5
    e.t = x
    return x * first + e.a + e.t + hasattr(e, "b") + getattr(e, "b", 2)


@program
def a_setattr_of_its_own(x):
    s = Scaling()
    s.a = 2
    s.t = x
    s.a += 1
    return s.t * s.a


@program
def a_getattribute_of_its_own(x):
    m = Mapped()
    first = m.width
    m.n = x
    return x * first + m.width + getattr(m, "height", 3)


@program
def changed_through_the_dict(x):
    d = Doubled()
    d.a = 1
    d.__dict__["a"] = 7
    s = SimpleNamespace(b=1, c=x)
    s.b += 2
    vars(s).update(b=s.b * 3, c=s.c * 2)
    del d.n
    return s.c * d.a + s.b + hasattr(d, "n")


class Strict:
    """Neither falls back to the other."""

    def __init__(self):
        self.n = 1

    p = property(lambda self: self.n * 2)

    def __getattribute__(self, name):
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            return 7

    def __getattr__(self, name):
        return 9


@program
def a_getattribute_that_answers_for_all(x):
    s = Strict()
    first = s.p
    s.n = 5
    return x * first + s.p + s.anything


class Above(Doubled):
    @property
    def v(self):
        return super().v * 10


@program
def a_property_of_super(x):
    a = Above()
    first = a.v
    a.n = x
    return first + a.v


@program
def deleted(x):
    class WithDefault:
        n = 1

    w = WithDefault()
    w.n = 5
    first = w.n
    del w.n
    return x * first + w.n + hasattr(w, "n")


@program
def slots_and_classes(x):
    class Local:
        k = 1

    s = Slotted()
    s.a = x
    s.a = s.a * 2
    first = Local.k
    Local.k = 4
    return s.a * first + Local.k + Local().k


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int

    def __post_init__(self):
        object.__setattr__(self, "n", self.n + 1)


@program
def a_slot_is_set_past_the_class(x):
    s, frozen = Slotted(), Frozen(2)
    s.a = x
    first = s.a
    object.__setattr__(s, "a", x * 3)
    second = s.a
    Slotted.a.__set__(s, x * 4)
    return first + 10 * second + 100 * Slotted.a.__get__(s) + frozen.n


@program
def a_property_is_asked_and_told_by_name(x):
    d = Doubled()
    first = d.n
    Doubled.v.__set__(d, x)
    second = d.n
    property.__set__(Doubled.v, d, x * 2)
    return first + 10 * second + 100 * Doubled.v.__get__(d, Doubled) + d.reads


@pytest.mark.parametrize("switch", [contextlib.nullcontext, native.switched_off], ids=["native", "thunder's"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_attributes_are_those_of_eager_mode(function, switch):
    x = torch.tensor([1.0, -2.0])
    with switch():
        torch.testing.assert_close(thunder.jit(function, transforms=[SubclassTransform()])(x), function(x))


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_and_under_a_derivative(function):
    x = torch.tensor([1.0, -2.0])
    expected = torch.func.grad(lambda x: function(x).sum())(x)
    torch.testing.assert_close(grad(lambda x: function(x).sum())(x), expected)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self._scale = 1.0

    @property
    def scale(self):
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = value * 10

    @property
    def tied(self):
        return self.weight.T

    def forward(self, x):
        self.scale = 2.0
        self.mapped = Mapped()
        return (x @ self.tied) * self.scale * self.mapped.width


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_a_module_with_properties(transform):
    jitted, eager = thunder.jit(Model(), transforms=[transform()]), Model()
    x = torch.tensor([[1.0, -2.0]])
    for _ in range(2):
        torch.testing.assert_close(jitted(x), eager(x))
    assert jitted._model._scale == eager._scale == 20.0


def test_a_module_with_properties_and_norms():
    model = Model()
    x = RMSTensor.of(torch.tensor([[1.0, -2.0]]))
    torch.testing.assert_close(thunder.jit(model, transforms=[NormTransform()])(x).norm_size, Model()(x).norm_size)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = self.c = 0

    def forward(self, x):
        self.a = 1
        self.b = self.a + 10
        self.c = x * 2
        self.d = self.c + self.b
        return self.d


@pytest.mark.parametrize("nested", [False, True])
def test_all_attributes_that_a_module_sets_are_set(nested):
    def made():
        module = Several()
        return (nn.Sequential(module) if nested else module), module

    (model, inner), (eager, expected) = made(), made()
    jitted, x = thunder.jit(model, transforms=[SubclassTransform()]), torch.tensor([1.0, -2.0])
    for _ in range(3):
        torch.testing.assert_close(jitted(x), eager(x))
        for name in "abcd":
            torch.testing.assert_close(getattr(inner, name), getattr(expected, name))


def test_attributes_of_an_input_object_are_set():
    def f(o, x):
        o.a, o.b, o.c = 1, 10, x * 2
        return o.c + o.b

    o, x = SimpleNamespace(a=0, b=0, c=0), torch.tensor([1.0, -2.0])
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(o, x), x * 2 + 10)
    assert (o.a, o.b) == (1, 10)
    torch.testing.assert_close(o.c, x * 2)


def asked_after_setting(o, x):
    before = hasattr(o, "sum")
    o.sum = x.sum()
    return before, hasattr(o, "sum"), getattr(o, "sum", 0.0)


def deleted_and_set(o, x):
    if hasattr(o, "sum"):
        del o.sum
    del o.n
    o.sum, o.n = x.sum(), 3
    return o.n


def set_and_deleted(o, x):
    o.late = x.sum()
    is_there = hasattr(o, "late")
    del o.late
    return is_there, hasattr(o, "late"), getattr(o, "late", 5)


def set_deleted_and_set(o, x):
    o.n, o.late = 1, 2
    del o.n, o.late
    o.late = x * 2
    return hasattr(o, "n")


def set_in_several_ways(o, x):
    object.__setattr__(o, "a", 1)
    o.__dict__["b"] = x * 2
    vars(o).update(n=8)
    return o.a, o.b, o.n, hasattr(o, "b")


def deleted_twice(o, x):
    said = []
    for delete in (lambda: delattr(o, "n"), lambda: object.__delattr__(o, "n"), lambda: delattr(o, "no")):
        for _ in range(2):
            try:
                delete()
                said.append("deleted")
            except AttributeError as e:
                said.append(str(e))
        o.n = 4
    return said


def copied_after_setting(o, x):
    o.late = 3
    made = copy.copy(o)
    made.n = 9
    return o.n, made.n, made.late


def two_of_one_object(o, x):
    o.again = o.n
    return o.n, o.again, o.items


@pytest.mark.parametrize(
    "f",
    [
        asked_after_setting,
        deleted_and_set,
        set_and_deleted,
        set_deleted_and_set,
        set_in_several_ways,
        deleted_twice,
        copied_after_setting,
        two_of_one_object,
    ],
)
@pytest.mark.parametrize("is_module", [False, True], ids=["object", "module"])
def test_attributes_that_are_set_asked_for_and_deleted(f, is_module):
    def made():
        o = nn.Identity() if is_module else SimpleNamespace()
        vars(o).update(n=0, items=[1, "a"])
        return o

    ours, theirs, x = made(), made(), torch.tensor([1.0, -2.0])
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        assert repr(jitted(ours, x)) == repr(f(theirs, x))
        assert repr(sorted(vars(ours).items())) == repr(sorted(vars(theirs).items()))


class Config:
    def __init__(self):
        self.n = 2

    @property
    def scale(self):
        return self.n


class Derived(Config):
    @property
    def scale(self):
        return super().scale * 10


@pytest.mark.parametrize("cls", [Config, Derived])
def test_a_property_is_guarded_beside_assignments_to_new_objects(cls):
    config, x = cls(), torch.tensor([1.0, -2.0])

    def f(x):
        new = SimpleNamespace()
        new.z = 1
        return x * config.scale + new.z

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for n in (2, 5, 2):
        config.n = n
        torch.testing.assert_close(jitted(x), f(x))
    assert thunder.cache_misses(jitted) == 2


def test_a_property_and_a_slot_of_an_input_are_told_by_name():
    def f(x, d, s):
        before = d.n, s.a
        Doubled.v.__set__(d, before[0] + 1)
        Slotted.a.__set__(s, before[1] + 1)
        object.__setattr__(s, "a", s.a * 2)
        return x * d.n * s.a

    def given():
        s = Slotted()
        s.a = 1
        return Doubled(), s

    ours, theirs, x = given(), given(), torch.tensor([1.0, -2.0])
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(3):
        torch.testing.assert_close(jitted(x, *ours), f(x, *theirs))
        assert (ours[0].n, ours[1].a) == (theirs[0].n, theirs[1].a)


class Answering:
    """Says what it has by code that counts how often it is asked."""

    def __init__(self):
        self.asked = []
        self.known = {}

    def __getattr__(self, name):
        self.asked.append(name)
        if name in self.known:
            return self.known[name]
        raise AttributeError(name)

    @property
    def computed(self):
        self.asked.append("computed")
        if "computed" not in self.known:
            raise AttributeError("computed")
        return self.known["computed"]


def test_code_that_answers_runs_as_often_as_in_eager_mode():
    def f(x, o):
        found = x * (2 if hasattr(o, "late") else 3) + (10 if hasattr(o, "computed") else 20)
        return found + getattr(o, "other", 100) + getattr(o, "computed", 1000)

    ours, theirs, x = Answering(), Answering(), torch.tensor([1.0, -2.0])
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for known in ({}, {"late": 1}, {"computed": 5}, {"other": 7}, {}):
        ours.known, theirs.known = dict(known), dict(known)
        torch.testing.assert_close(jitted(x, ours), f(x, theirs))
        assert ours.asked == theirs.asked


def test_an_attribute_that_a_class_gets_later_goes_before_what_its_code_answers():
    class Five:
        def __getattr__(self, name):
            return 5

    def f(x):
        return x * five.factor + Five().factor

    five, x = Five(), torch.tensor([1.0, -2.0])
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jitted(x), f(x))
    Five.factor = 3
    torch.testing.assert_close(jitted(x), f(x))
    del Five.factor
    torch.testing.assert_close(jitted(x), f(x))
