"""Tensors that a program computes of tensors whose classes do not dispatch: their classes, methods and attributes are eager mode's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import tv_tensors

from tests.seeds import crossed, seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class _Doubling(torch.Tensor):
    factor = 3.0

    def double(self):  # torch's converts to float64
        return self * self.factor

    @property
    def half(self):
        return self / 2

    def kind(self):
        return type(self).__name__


class _Derived(_Doubling):
    factor = 5.0


class _Disabled(_Doubling):
    __torch_function__ = torch._C._disabled_torch_function_impl


class _Unit(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.unit = next((getattr(a, "unit", "none") for a in args if isinstance(a, cls)), "none")
        return result


class _Rated(nn.Parameter):
    """As libraries for inference write parameters: with what its makers know of it."""

    def __new__(cls, data, **known):
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.known, parameter.steps = known, 2
        return parameter

    @property
    def rate(self):
        return self.known.get("rate", 1.0)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def _unit():
    x = torch.randn(3, 4).as_subclass(_Unit)
    x.unit = "m"
    return x


_MADE = {
    "default": lambda: torch.randn(3, 4).as_subclass(_Doubling),
    "derived": lambda: torch.randn(3, 4).as_subclass(_Derived),
    "disabled": lambda: torch.randn(3, 4).as_subclass(_Disabled),
    "with attributes": _unit,
    "parameter": lambda: _Rated(torch.randn(3, 4), rate=3.0),
    "of another library": lambda: tv_tensors.Image(torch.rand(3, 4)),
}


def types(x, y):
    found = x * 2, x[0], x.sum(), F.relu(x), torch.cat([x, x]), x.view(-1), x.mT, x > 0, 1 - x, y * x, *x.unbind(0), x.max(-1)[0]
    return [type(t).__name__ for t in found], isinstance(x + 1, type(x)), isinstance(torch.where(y > 0, x, y), type(x)), found


def of_what_is_plain_beside(x, y):
    return type(y * 2).__name__, type(y.exp().sum()).__name__, x + 1


def written(x, y):
    z = x * 1
    z.add_(y)
    return type(z).__name__, type(z.mul_(2)).__name__, z


def branches(x, y):
    z = x * 2
    return z.exp() if type(z) is torch.Tensor else z.sin()


def methods(x, y):
    return (x * 2).double(), hasattr(x * 2, "half"), hasattr(x * 2, "unit"), getattr(x + y, "factor", 1.0)


@pytest.mark.parametrize("made", _MADE)
@pytest.mark.parametrize("program", [types, of_what_is_plain_beside, written, branches, methods])
def test_classes_and_methods_of_results(program, made):
    torch.manual_seed(seeded(0))
    args = _MADE[made](), torch.randn(3, 4)
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(jf(*args), program(*args))


@pytest.mark.parametrize("program", [lambda x: x.double(), lambda x: ((x * 2).double(), type(x * 2).__name__)])
def test_another_class_is_another_trace(program):
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for cls in (torch.Tensor, _Doubling, _Derived, _Doubling, torch.Tensor):
        x = torch.ones(2).as_subclass(cls)
        assert_same(jf(x), program(x))
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (3, 2)


def test_attributes_that_a_class_gives_to_results():
    jf = thunder.jit(lambda x: (x * 2).sum(0).unit, transforms=[SubclassTransform()])
    x = _unit()
    for unit in ("m", "km", "m"):
        x.unit = unit
        assert jf(x) == unit


def test_attributes_of_parameters_of_a_class():
    def program(m, x):
        return F.linear(x, m.weight) * m.weight.rate + m.weight.steps, hasattr(m.weight, "known"), getattr(m.weight, "other", 4)

    torch.manual_seed(seeded(1))
    m, x = nn.Linear(4, 3), torch.randn(2, 4)
    m.weight = _Rated(torch.randn(3, 4), rate=3.0)
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for rate in (3.0, 4.0):
        m.weight.known["rate"] = rate
        assert_same(jf(m, x), program(m, x))


def test_data_of_such_a_parameter_is_written_into():
    def program(m, x, w):
        m.weight.data.copy_(w)
        return m(x)

    torch.manual_seed(seeded(2))
    m, x, w = nn.Linear(4, 3), torch.randn(2, 4), torch.randn(3, 4)
    m.weight = _Rated(torch.randn(3, 4))
    found = thunder.jit(program, transforms=[SubclassTransform()])(m, x, w)
    assert_same((found, m.weight.data), (program(m, x, w), w))


def test_methods_and_functions_that_differ():
    jf = thunder.jit(
        lambda x: (x.detach(), type(x.detach()).__name__, torch.detach(x), type(x * 2).__name__), transforms=[SubclassTransform()]
    )
    x = tv_tensors.Image(torch.rand(3, 4))
    assert_same(jf(x), (x.detach(), "Image", torch.detach(x), "Tensor"))


@pytest.mark.parametrize("disabled", [torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction])
def test_classes_that_are_to_say_nothing(disabled):
    def program(x):
        with disabled():
            y = x + 1
        return y, x + 1

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for x in (torch.ones(2), torch.ones(2).as_subclass(_Doubling)):
        assert_same(jf(x), program(x))


# -- whole programs -------------------------------------------------------------------------------------------------------------


class Simple(torch.Tensor):
    tag = "class"

    def double(self):  # torch's converts to float64
        return self * 4

    def who(self):
        return self.tag

    @property
    def total(self):
        return self.sum() * 2


class Derived(Simple):
    def double(self):
        return self * 5


class Tagged(Simple):
    """Hands its tag on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls):
            found.tag = next((a.tag for a in args if isinstance(a, cls)), None)
        return found


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.add else found


def set_on_a_result(x):
    y = x * 1
    y.tag = "set"
    return x * (2 if y.tag == "set" else 3)


def set_on_the_input(x):
    x.tag = "set"
    return x * (2 if x.tag == "set" else 3)


def written_into(x):
    y = x.clone()
    y[0] = 5
    y += 1
    return y.double()


PROGRAMS: dict[str, Callable] = {
    "type": lambda x: x * (2 if type(x * 1) is type(x) else 3),
    "isinstance": lambda x: x * 2 if isinstance(x.sum(), Simple) else x * 3,
    "hasattr": lambda x: x * (2 if hasattr(x * 1, "who") else 3),
    "class attribute": lambda x: x * (2 if (x * 1).who() == "class" else 3),
    "property": lambda x: (x + 1).total * x,
    "method": lambda x: (x + 1).double().double(),
    "of a plain tensor": lambda x: torch.ones(3, 3).double().float() * x,
    "of a function of torch's": lambda x: torch.cat([x, torch.ones(3, 3)]).double(),
    "of rows": lambda x: [r.double() for r in x.unbind(0)][0],
    "of layers": lambda x: F.linear(F.layer_norm(x, (3,)), torch.ones(3, 3)).double(),
    "of views": lambda x: (x.flatten().double(), x[None].double(), x[0].double(), x[:, 1].double()),
    "of a comparison": lambda x: torch.where(x > 0, x, 0).double(),
    "of what is made like it": lambda x: x.new_ones(3, 3).double() + torch.zeros_like(x).double(),
    "set on a result": set_on_a_result,
    "set on the input": set_on_the_input,
    "written into": written_into,
}
OF_SIMPLE: dict[str, Callable] = {
    "softmax": lambda x: F.softmax(x, -1).double(),
    "maxima": lambda x: x.max(-1).values.double(),
    "converted": lambda x: x.to(torch.float64).double(),
    "transposed": lambda x: (x.mT.double(), x.T.double()),
    "detached": lambda x: (x.detach().double(), x.data.double()),
}


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, expected)), strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor))


def given(cls: type) -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return torch.randn(3, 3).as_subclass(cls)


def check(program: Callable, cls: type, transform: type = SubclassTransform) -> None:
    jitted = thunder.jit(program, transforms=[transform()])
    for _ in range(2):
        compare(jitted(given(cls)), program(given(cls)))


@pytest.mark.parametrize(
    ("name", "cls", "transform"),
    crossed(PROGRAMS, [Simple, Derived, Tagged], [SubclassTransform, NormTransform, CheckpointTransform]),
)
def test_results_are_of_the_class(name: str, cls: type, transform: type):
    check(PROGRAMS[name], cls, transform)


@pytest.mark.parametrize(("name", "cls"), crossed(OF_SIMPLE, [Simple, Derived]))
def test_results_of_torchs_own_rule(name: str, cls: type):
    check(OF_SIMPLE[name], cls)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.softmax(x, -1).double(),
        lambda x: torch.func.vmap(lambda t: t * 2)(x).double(),
        lambda x: (x * 1).add_(2).double(),
        lambda x: torch.add(x, 1).add_(x),
    ],
    ids=["softmax", "mapped", "in place", "in place and out of place"],
)
@pytest.mark.parametrize("cls", [Simple, Tagged, Doubling])
def test_functions_that_a_class_is_asked_of(program: Callable, cls: type):
    check(program, cls)


@pytest.mark.parametrize("cls", [Simple, Tagged])
def test_what_an_input_has_of_its_own(cls: type):
    def program(x):
        return x * (x.note if hasattr(x, "note") else 2) * (2 if x.tag == "class" else 3)

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for own in ({}, {"note": 3.0}, {"tag": "own"}, {"note": 4.0, "tag": "own"}, {}, {"note": 3.0}):
        results = []
        for f in (jitted, program):
            x = given(cls)
            x.__dict__.update(own)
            results.append(f(x))
        compare(*results)
