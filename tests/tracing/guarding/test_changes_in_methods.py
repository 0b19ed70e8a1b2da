"""What a program changes where no line of it names the method that does: each call of the jitted one changes what eager PyTorch's does."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

import thunder_norm  # noqa: F401 - before Thunder
from thunder_norm.transforms import NormTransform
import thunder

SEEN: list[int] = []
KEPT = ModuleType("kept_by_a_module")  # global variables of another file of the user's
exec("SEEN = []\n\ndef note():\n    SEEN.append(1)\n\nclass Of:\n    seen = []\n", vars(KEPT))
sys.modules[KEPT.__name__] = KEPT


def note(result=2):
    SEEN.append(1)
    return result


class Meta(type):
    def __instancecheck__(cls, obj):
        return note(obj.ndim == 1)

    def __subclasscheck__(cls, other):
        return note(other is int)

    def method(cls):
        return note()


class Of(metaclass=Meta):
    pass


class Answers:
    """An object whose methods are called by syntax, and one that answers any name."""

    __contains__ = __getitem__ = __getattr__ = __add__ = __radd__ = __lt__ = __call__ = lambda self, _=None: note()
    __len__ = __int__ = __neg__ = __enter__ = lambda self: note()

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return iter((note(),))

    def __format__(self, _):
        return "ab" * note()


class Descriptor:
    def __get__(self, obj, kind):
        return note()


class Holds:
    described = Descriptor()

    def __init__(self):
        note()

    @property
    def prop(self):
        return note()

    def method(self):
        return note()

    def __setattr__(self, name, value):
        note()
        object.__setattr__(self, name, value)


class New:
    def __new__(cls):
        note()
        return object.__new__(cls)


@dataclasses.dataclass
class Made:
    times: int = 2

    def __post_init__(self):
        note()


class Missing(dict):
    def __missing__(self, key):
        return note()


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * note()

    @staticmethod
    def backward(ctx, g):
        return g * 2


ANSWERS, HOLDS, MISSING = Answers(), Holds(), Missing()


def entered(x):
    with ANSWERS as times:
        return x * times


def set_by_own_method(x):
    HOLDS.times = 3
    return x * HOLDS.times


def noted_in_a_module(x):
    KEPT.note()
    KEPT.SEEN.append(1)
    KEPT.Of.seen.append(1)
    return x * 2


def made_by_type(x):
    return x * type("Anew", (), {"times": lambda self: note()})().times()


PROGRAMS: list[Callable] = [
    entered,
    set_by_own_method,
    noted_in_a_module,
    made_by_type,
    lambda x: x * (2 if isinstance(x, Of) else 3),
    lambda x: x * (2 if isinstance(x, str | Of) else 3),
    lambda x: x * (2 if issubclass(str, (list, Of)) else 3),
    lambda x: x * Of.method(),
    lambda x: x * (2 if 1 in ANSWERS else 3),
    lambda x: x * ANSWERS[0],
    lambda x: x * ANSWERS.any_name,
    lambda x: x * (ANSWERS + 1) * (1 + ANSWERS),
    lambda x: x * (2 if ANSWERS < 1 else 3),
    lambda x: x * ANSWERS(),
    lambda x: x * len(ANSWERS) * int(ANSWERS) * -ANSWERS,
    lambda x: x * sum(ANSWERS),
    lambda x: x * len(f"{ANSWERS}"),
    lambda x: x * HOLDS.described,
    lambda x: x * HOLDS.prop,
    lambda x: x * getattr(HOLDS, "me" + "thod")(),
    lambda x: x * operator.attrgetter("prop")(HOLDS),
    lambda x: (Holds(), New(), x * Made().times)[-1],
    lambda x: x * MISSING["nothing"],
    lambda x: Doubles.apply(x),
]


def changes() -> int:
    return len(SEEN) + len(KEPT.SEEN) + len(KEPT.Of.seen)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_changes_what_eager_pytorchs_does(program):
    def times(f):
        before = changes()
        torch.testing.assert_close(f(x), expected)
        return changes() - before

    x = torch.ones(2)
    expected = program(x)
    jitted, in_eager = thunder.jit(program, transforms=[NormTransform()]), times(program)
    assert in_eager > 0
    assert [times(jitted), times(jitted)] == [in_eager, in_eager]


class Adds:
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value + 1)


class AddsToModule(torch.nn.Module):
    def __setattr__(self, name, value):
        super().__setattr__(name, value + 1 if name == "last" else value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    last: object = None


@pytest.mark.parametrize("value", [lambda x: 3, lambda x: x.sum()], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", [Adds, AddsToModule, Frozen])
def test_what_a_class_does_when_an_attribute_is_set_is_done_once(kind, value):
    put = object.__setattr__ if kind is Frozen else setattr

    def program(x, held):
        put(held, "last", value(x))
        return x * 2

    jitted, (held, expected) = thunder.jit(program, transforms=[NormTransform()]), (kind(), kind())
    for x in (torch.ones(2), torch.full((2,), 3.0)):
        jitted(x, held)
        program(x, expected)
        torch.testing.assert_close(held.last, expected.last)


def test_what_a_class_says_of_an_object_may_change():
    class Limited(type):
        limit = 1

        def __instancecheck__(cls, obj):
            return obj.ndim == cls.limit

    class Flat(metaclass=Limited):
        pass

    def program(x):
        return x * 2 if isinstance(x, Flat) else x * 3

    jitted = thunder.jit(program, transforms=[NormTransform()])
    for limit in (1, 2, 1):
        Limited.limit = limit
        for x in (torch.ones(2), torch.ones(2, 2)):
            torch.testing.assert_close(jitted(x), program(x))


@functools.singledispatch
def _dispatched(v):
    return 0


class _Replaced:
    def __init__(self):
        self.v = 5

    def __abs__(self):
        return 6

    def __hash__(self):
        return 7


class _Meta(type):
    def __getitem__(cls, key):
        return 2

    def __call__(cls):
        return 3


class _Made(metaclass=_Meta):
    pass


class _First:
    v = 1


class _Second:
    v = 2


class _Derived(_First):
    pass


def _with_default(v=1):
    return v


class _Plain:
    v = 3


_derived, _bases = _Derived(), (_Second,)


@pytest.mark.parametrize(
    ("ask", "owner", "name", "new"),
    [
        (lambda: _Made["a"], _Meta, "__getitem__", lambda cls, key: 5),
        (lambda: _Made(), _Meta, "__call__", lambda cls: 5),
        (lambda: _Plain().v, _Plain, "__new__", lambda cls: SimpleNamespace(v=4)),
        (lambda: _derived.v, _Derived, "__bases__", _bases),
        (lambda: 1 + isinstance(_derived, _Second), _Derived, "__bases__", _bases),
        (lambda: 1 + issubclass(_Derived, _Second), _Derived, "__bases__", _bases),
        (lambda: 1 + len(_Second.__subclasses__()), _Derived, "__bases__", _bases),
        (lambda: inspect.signature(_with_default).parameters["v"].default, _with_default, "__defaults__", (7,)),
        (lambda: _Replaced().v, _Replaced, "__init__", lambda self: setattr(self, "v", 9)),
        (lambda: abs(_Replaced()), _Replaced, "__abs__", lambda self: 9),
        (lambda: hash(_Replaced()), _Replaced, "__hash__", lambda self: 9),
        (lambda: _dispatched(2.5), None, None, None),
    ],
)
def test_what_is_called_without_a_name_may_be_replaced(ask, owner, name, new, request):
    def replace():
        if owner is None:
            _dispatched.register(float)(lambda v: v * 2)
            return
        is_there = name == "__bases__" or name in vars(owner) or not isinstance(owner, type)
        old = getattr(owner, name)
        request.addfinalizer(lambda: setattr(owner, name, old) if is_there else delattr(owner, name))
        setattr(owner, name, new)

    jitted = thunder.jit(lambda x: x * ask(), transforms=[NormTransform()])
    x = torch.ones(2)
    for n in range(4):
        if n == 2:
            replace()
        assert torch.equal(jitted(x), x * ask())
    assert thunder.cache_misses(jitted) == 2
