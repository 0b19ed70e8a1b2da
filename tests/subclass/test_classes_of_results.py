"""Tensors that a program computes of tensors whose classes do not dispatch: their classes, methods and attributes are eager mode's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import tv_tensors

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedSubclassError
from thunder_norm.transforms import SubclassTransform
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


def test_methods_and_functions_that_differ_are_refused():
    jf = thunder.jit(lambda x: type(x.detach()).__name__, transforms=[SubclassTransform()])
    with pytest.raises(UnsupportedSubclassError, match="of which class a result of a Image is"):
        jf(tv_tensors.Image(torch.rand(3, 4)))  # x.detach() is one, torch.detach(x) is none


@pytest.mark.parametrize("disabled", [torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction])
def test_classes_that_are_to_say_nothing_are_refused(disabled):
    def program(x):
        with disabled():
            return x + 1

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    assert_same(jf(torch.ones(2)), torch.ones(2) + 1)
    with pytest.raises(UnsupportedSubclassError, match="DisableTorchFunctionSubclass in a program"):
        jf(torch.ones(2).as_subclass(_Doubling))
