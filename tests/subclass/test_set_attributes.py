"""Attributes that programs set on wrappers: read back in the program, and seen by the caller on results and on what was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import assert_same, nested, two
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform, vmap
import thunder


def jit(function: Callable) -> Callable:
    return thunder.jit(function, transforms=[SubclassTransform()])


class Labelled(torch.Tensor):
    """``v * scale``, with a label that is context and a number that is none: operations hand both on."""

    @staticmethod
    def __new__(cls, v, scale, label="d"):
        return torch.Tensor._make_wrapper_subclass(cls, v.shape, dtype=v.dtype, device=v.device)

    def __init__(self, v, scale, label="d"):
        self.v, self.scale, self.label, self.number = v, scale, label, 7

    def __tensor_flatten__(self):
        return ["v", "scale"], (self.label,)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["v"], inner["scale"], *context)

    def rescale_(self, by):
        self.scale = self.scale * by
        self.label += "r"
        return self

    @property
    def half(self):
        return self.scale / 2

    @half.setter
    def half(self, value):
        self.scale = value * 2

    @half.deleter
    def half(self):
        self.scale = torch.ones(())

    @property
    def fixed(self):
        return 3

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(a for a in args if isinstance(a, cls))
        result = func(*tree_map_only(cls, lambda x: x.v * x.scale, args), **(kwargs or {}))
        result = type(first)(result, torch.ones(()), first.label)
        result.number = first.number
        return result


class Strict(Labelled):
    """Says itself how attributes are set, and calls what is above it."""

    def __setattr__(self, name, value):
        if name == "bad":
            raise ValueError("no bad")
        super().__setattr__(name, value)

    def rescale_(self, by):
        return super().rescale_(by * 2)

    @property
    def half(self):
        return super().half * 5

    def with_half(self):
        return super(Strict, self).half + self.half  # noqa: UP008 - written as people do


@dataclass
class Settings:
    times: int
    by: torch.Tensor


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(two(3, 4))

    def forward(self, x):
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return x * self.weight, self.weight.calls


def labelled(cls=Labelled, **attributes: Any) -> torch.Tensor:
    x = cls(torch.randn(3, 4), torch.tensor(2.0))
    vars(x).update(attributes)
    return x


def marked(**attributes: Any) -> TwoTensor:
    x = two(3, 4)
    vars(x).update(attributes)
    return x


PROGRAMS: dict[str, tuple[Callable, Callable[[], tuple], tuple[int, ...]]] = {}


def program(make: Callable[[], tuple], *moving: int) -> Callable:
    """The function below it, named so, is a program; `moving` are the arguments that gradients are for."""

    def add(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = function, make, moving
        return function

    return add


@program(lambda: (two(3, 4),))
def of_a_result(x):
    y = x * 2
    before = hasattr(y, "note")
    y.note = 3
    setattr(y, "label", "a")  # noqa: B010
    y.gone = 4
    del y.gone
    return y * y.note, y, before, hasattr(y, "note"), getattr(y, "gone", 5), hasattr(y[0], "note")


@program(lambda: (two(3, 4), torch.randn(3, 4)), 1)
def of_another_shape_on_what_is_given(x, p):
    x.a = x.a[0]
    return x.a * p * x.shape[0]


@program(lambda: (two(3, 4), torch.randn(3, 4)), 1)
def of_another_layout_on_what_is_given(x, p):
    x.a, x.b = x.a.t(), x.b.t()
    return p * 2, x.detach()


@program(lambda: (two(3, 4), torch.randn(3, 4)))
def of_another_dtype_on_what_is_given(x, p):
    x.a = x.a.double()
    return x.a.sum() + p


@program(lambda: (two(3, 4), torch.randn(3, 4)))
def of_another_shape_on_what_is_made(x, p):
    y = x * 2
    y.a = y.a[0] + p[0]
    return x * y.b * y.shape[0], y.a * 2


@program(lambda: (two(3, 4), torch.randn(3, 4)))
def of_another_shape_on_what_is_returned(x, p):
    y = x * 2
    y.a, y.b = y.a[0], p[0]
    return y


@program(lambda: (two(3, 4), torch.randn(3, 4)))
def of_what_is_given(x, p):
    x.tag, x.made, x.given = 5, p * 2, p
    x.given.mul_(2)
    return x * x.tag * x.made + x.given


@program(lambda: (two(3, 4), two(3, 4)))
def wrappers_and_objects(x, y):
    z = x * 2
    z.other, x.other = x + 1, y
    z.several = [z.other, x.a * 2, {"k": z}, 3]
    z.several.append(y)
    z.settings = Settings(2, x.b)
    y.mul_(2)
    return z * z.other + z.several[1] * z.settings.times, z, x.other


@program(lambda: (two(3, 4),))
def of_each_other(x):
    y, z = x * 2, x * 3
    y.other, z.other, y.own = z, y, y
    return y, y.own.other.other * 2


@program(lambda: (two(3, 4), torch.randn(3, 4)))
def inner_tensors_of_a_result(x, p):
    y = x * 2
    y.a, y.b = y.b, y.a
    z = y * 3
    y.a = p
    y.b += 1
    p.mul_(2)
    return y, z, y + 1


@program(lambda: (two(3, 4), two(3, 4), torch.randn(3, 4)))
def inner_tensors_of_what_is_given(x, y, p):
    x.a, x.b = x.b, x.a
    x.a.mul_(2)
    y.a = p.sin()
    y.b += 1
    return x * 3, y.a, y


@program(lambda: (nested(3, 4), nested(3, 4)))
def of_wrappers_inside(x, y):
    z = x * 2
    z.a.note, z.b.a = 3, z.a.b
    x.a.note, x.b.a = 4, x.a.b
    y.a = y.b * 2
    y.a.note = "n"
    return z, x * 2, y + 1, z.a.note + x.a.note


@program(lambda: (labelled(), labelled()))
def by_methods_and_properties(x, y):
    x.rescale_(3.0)
    y.half = y.half * 5
    z = (x + 1).rescale_(2.0)
    z.label += "z"
    w = z * 2
    del w.half
    try:
        w.fixed = 4
    except AttributeError:
        w.label = "w"
    return x * 2, y * 2, z, w, z.label


@program(lambda: (labelled(Strict), labelled(Strict)))
def by_what_is_above(x, y):
    x.rescale_(2.0)
    try:
        x.bad = 3
    except ValueError:
        x.number = 8
    return x * y.half, x.with_half(), y


@program(lambda: (labelled(number=12),))
def data_that_operations_hand_on(x):
    y = x * 2
    y.number += 1
    return y, y * 2, x.number


@program(lambda: (marked(tag=2, factor=torch.randn(3, 4), labels=["a"], by_name={"k": torch.randn(3, 4)}),))
def set_by_the_caller(x):
    x.labels.append("b")
    x.by_name["z"] = x * 2
    x.tag += 1
    y = x * x.tag * x.factor + x.by_name["k"] * len(x.labels)
    del x.factor
    return y, hasattr(x, "factor"), hasattr(x, "tag")


@program(lambda: (Counting(), torch.randn(3, 4)))
def of_a_parameter(module, x):
    return module(x)


@program(lambda: ({"x": two(3, 4), "l": [two(3, 4)]},))
def of_what_containers_hold(held):
    held["x"].note = 3
    held["l"][0].a = held["x"].b
    held["new"] = held["x"] * 2
    held["new"].note = held["l"]
    return held["l"][0] * 2


@program(lambda: (two(3, 4), two(3, 4)), 0, 1)
def gradients(x, y):
    z = x.sin()
    w = z * z
    z.a = z.b * 3
    x.other = x * y
    w.note = x.other
    return w * x.other, (z * z).sum(), w.note


@program(lambda: (two(3, 4), two(3, 4)), 0, 1)
def gradients_that_are_set(x, y):
    g = y * 2
    x.grad = g
    g.mul_(3)
    z = (x * 2).detach()
    z.grad, y.grad = y * 4, x.grad
    del y.grad
    return x * y, x.grad * 2, z, z.grad


@program(lambda: (torch.randn(3, 4), torch.randn(3, 4), two(3, 4)))
def gradients_added_to(x, y, w):
    x.grad = y * 2 if x.grad is None else x.grad + y
    x.grad.add_(1)
    w.grad = None
    y.grad = x.grad
    y.grad = None
    return x * w


@program(lambda: (torch.randn(3, 4), torch.randn(3, 4)))
def gradients_that_do_not_fit(x, y):
    said = []
    for value in (y[0], y.double(), 3):
        try:
            x.grad = value
        except (RuntimeError, TypeError) as e:
            said.append(str(e))
    return x * len(said), said


@program(lambda: (two(3, 4), torch.randn(3, 4)), 1)
def gradients_of_plain_tensors(x, p):
    y = x * 1
    y.note = p * 2
    return y.note * 3


@program(lambda: (torch.nested.nested_tensor_from_jagged(torch.randn(6, 4), torch.tensor([0, 2, 6])),))
def of_nested_tensors(x):
    x.tag = 3
    y = x * x.tag
    y.note = "y"
    return y


class Tagged(torch.Tensor):
    """A class without a dispatch of its own."""


def _described(value: Any, seen: dict[int, int], held: list[Any]) -> Any:
    """All that can be seen of a value, wrappers by their attributes; an object at two places is said to be one."""
    if isinstance(value, torch.Tensor | list | dict | Settings):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
    if type(value) in (torch.Tensor, nn.Parameter, Tagged):
        plain = value.as_subclass(torch.Tensor).detach()
        return type(value).__name__, plain, value.requires_grad, _described(dict(vars(value)), seen, held)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return value.values().detach(), value.offsets(), [vars(value).get(n) for n in ("tag", "note")]
    if isinstance(value, torch.Tensor):
        own = {k: v for k, v in sorted(vars(value).items()) if not k.startswith("_")}
        if value.is_leaf and value.grad is not None:
            own["grad"] = value.grad
        return type(value).__name__, value.requires_grad, _described(own, seen, held)
    if isinstance(value, nn.Module):
        return _described(dict(value.named_parameters()), seen, held)
    if isinstance(value, dict):
        held.append(value)
        return {k: _described(v, seen, held) for k, v in value.items()}
    if isinstance(value, Settings):
        return [_described(v, seen, held) for v in vars(value).values()]
    return [_described(v, seen, held) for v in value] if isinstance(value, list | tuple) else value


def outcome(function: Callable, make: Callable[[], tuple], moving: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(seeded(0))
    args = make()
    for i in moving:
        args[i].requires_grad_()
    results = function(*args)
    gradients: Any = ()
    if moving:
        losses = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
        gradients = torch.autograd.grad([t.sum() for t in losses], [args[i] for i in moving])
    return _described([results, list(args), list(gradients)], {}, [])


@pytest.mark.parametrize("name", PROGRAMS)
def test_attributes_that_a_program_sets_are_eagers(name: str):
    function, make, moving = PROGRAMS[name]
    jitted, want = jit(function), outcome(function, make, moving)
    for _ in range(2):
        assert_same(outcome(jitted, make, moving), want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def _counted(x):
    x.count = getattr(x, "count", 0) + 1
    return x * x.count


def _remembered(x):
    if getattr(x, "total", None) is None:
        x.total = x.a.sum()
    return x * x.total


def _swapped(x):
    x.a, x.b = x.b, x.a * 2
    return x + 1


def _deleted(x):
    if hasattr(x, "tag"):
        del x.tag
    return x + 1


class Tracked(TwoTensor):
    """Counts the operations on it, in what is no context of its."""

    def __init__(self, a, b):
        self.a, self.b, self.count = a, b, 0

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Tracked(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, cls):
                x.count += 1
        a, b = (func(*[getattr(x, n) if isinstance(x, cls) else x for x in args], **(kwargs or {})) for n in "ab")
        return cls(a, b)


HISTORIES: dict[str, tuple[Callable, list[Callable[[dict], Any]]]] = {
    "one object again": (_counted, [lambda kept: kept.setdefault("x", two(3, 4))] * 3),
    "what is remembered": (_remembered, [lambda kept: kept.setdefault("x", two(3, 4))] * 2 + [lambda kept: two(3, 4)]),
    "inner tensors": (_swapped, [lambda kept: kept.setdefault("x", two(3, 4))] * 2 + [lambda kept: two(3, 4)]),
    "numbers of the caller's": (lambda x: x * x.tag, [lambda kept, v=v: marked(tag=v) for v in (2, 3, 2, 2.0, True)]),
    "one that may be missing": (
        lambda x: (x * getattr(x, "tag", 5), hasattr(x, "tag")),
        [lambda kept, v=v: marked(**v) for v in ({}, {"tag": 2}, {}, {"tag": 3})],
    ),
    "tensors of the caller's": (
        lambda x: x * getattr(x, "tag", 5),
        [lambda kept, v=v: marked(**v) for v in ({}, {"tag": torch.ones(4)}, {"tag": torch.ones(4) * 2}, {"tag": torch.ones(1)})],
    ),
    "deleted ones": (_deleted, [lambda kept, v=v: marked(**v) for v in ({}, {"tag": 2}, {"tag": torch.ones(2)}, {})]),
    "data beside the context": (lambda x: (x * 2, x.number), [lambda kept, v=v: labelled(number=v) for v in (7, 8, 7)]),
    "what operations count": (
        lambda x: ((x + 1) * 2, x.sin()),
        [lambda kept: kept.setdefault("x", Tracked(torch.ones(2), torch.ones(2)))] * 3,
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_trace_serves_inputs_with_the_attributes_it_was_made_for(name: str):
    function, makes = HISTORIES[name]

    def called(f):
        kept, found = {}, []
        for make in makes:
            torch.manual_seed(seeded(0))
            x = make(kept)
            found.append(_described([f(x), x], {}, []))
        return found

    assert_same(called(jit(function)), called(function))


def test_what_torch_keeps_on_a_nested_tensor_is_left_alone():
    def normalized(x):
        return torch.nn.functional.layer_norm(x.sin(), (4,)) * x

    jitted = jit(normalized)
    for _ in range(2):
        x = torch.nested.nested_tensor_from_jagged(torch.randn(6, 4), torch.tensor([0, 2, 6]))
        found = jitted(x)
        assert vars(x).keys() <= vars(torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())).keys()
        assert_same(found.values(), normalized(x).values())


def _another_shape(x):
    y = x * 2
    y.a = y.a[:1]
    return y


def _another_dtype(x):
    y = x * 2
    y.a, y.b = y.a.double(), y.b.double()
    return [y]


def _a_flag_of_torchs(x):
    x.grad_dtype = None
    return x


REFUSED: dict[str, tuple[Callable, Callable]] = {
    "what is torch's": (jit(_a_flag_of_torchs), lambda: two(3, 4)),
    "in a function under a transform": (vmap(lambda x: (setattr(x, "note", 3), x * 2)[1]), lambda: two(3, 4)),
    "of a norm": (
        thunder.jit(lambda x: (setattr(x, "note", 3), x * 2)[1], transforms=[NormTransform()]),
        lambda: __import__("thunder_norm").RMSTensor.of(torch.ones(3, 4)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attributes_that_cannot_be_set_are_refused(name: str):
    function, make = REFUSED[name]
    with pytest.raises(UnsupportedOpError, match=r"attribute '\w+' of a \w+ is set(.|\n)*test_set_attributes.py"):
        function(make())


@pytest.mark.parametrize("function", [_another_shape, _another_dtype])
def test_what_a_class_does_not_put_together_is_not_returned(function: Callable):
    with pytest.raises(UnsupportedOpError, match=r"'a'.* set to what makes another tensor of it"):
        jit(function)(two(3, 4))


@dataclass
class Box:
    held: Any = None


def writes_into_what_it_holds(x):
    x.by_name["z"] = x * 2
    x.labels.append("b")
    x.labels.append(x * 3)
    return x + 1


def hands_on_what_an_input_holds(x):
    y = x + 1
    y.by_name = x.by_name
    y.by_name["z"] = 1
    y.labels = x.labels
    y.labels.append("b")
    return y


def hands_on_twice(x):
    y = x + 1
    y.held = {"in": x.by_name, "labels": [x.labels]}
    x.by_name["z"] = y * 2
    z = y * 2
    z.held = y.held
    z.held["in"]["k"] = y * 3
    return y, z


def writes_into_what_it_has_set(x):
    y = x + 1
    y.held = {"k": 1}
    y.held["z"] = x * 3
    y.list = [1]
    y.list.append(4)
    y.list.append(x * 2)
    return y


def gives_an_input_what_it_holds(x):
    x.other = x.by_name
    x.other["z"] = x * 2
    x.more = {"q": x.by_name}
    x.more["q"]["w"] = 3
    return x + 1


def in_a_box(x):
    box = Box(x.by_name)
    box.held["z"] = 1
    return box.held


def a_tensor_in_it(x):
    y = x + 1
    y.by_name = x.by_name
    y.by_name["k"].add_(1)
    return y


_HOLDING = {"plain": lambda: torch.zeros(2), "a class": lambda: torch.zeros(2).as_subclass(Tagged), "a wrapper": lambda: two(2)}


@pytest.mark.parametrize("kind", _HOLDING)
@pytest.mark.parametrize(
    "function",
    [
        writes_into_what_it_holds,
        hands_on_what_an_input_holds,
        hands_on_twice,
        writes_into_what_it_has_set,
        gives_an_input_what_it_holds,
        in_a_box,
        a_tensor_in_it,
    ],
)
def test_objects_in_attributes_are_the_ones_that_a_program_writes_into(function: Callable, kind: str):
    def make() -> tuple:
        x = _HOLDING[kind]()
        x.by_name, x.labels = {"a": 1, "k": torch.ones(2)}, ["a"]
        return (x,)

    jitted, want = jit(function), outcome(function, make, ())
    for _ in range(2):
        assert_same(outcome(jitted, make, ()), want)
