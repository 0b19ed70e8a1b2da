"""``torch.func.functional_call`` with wrapper subclasses in place of parameters, in traced programs, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, RMSToRMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, ProfileTransform, SubclassTransform
import thunder


class Given(nn.Module):
    """A layer called with other tensors for its weight and its buffer, computed on the way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()

    def forward(self, x, weight, mean):
        tensors = {"0.weight": weight * 0.5, "1.running_mean": mean}
        return torch.func.functional_call(self.layer, tensors, (x,)) + self.layer(x)


def given() -> tuple[Given, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seeded(0))
    model = Given().double()
    for b in model.buffers():
        if b.is_floating_point():
            b.uniform_(0.5, 2.0)
    return model, *(torch.randn(shape, dtype=torch.float64) for shape in [(4, 3), (3, 3), (3,)])


def twice(t: torch.Tensor) -> TwoTensor:
    return TwoTensor(t, 2 * t)


@pytest.mark.parametrize("which", ["weight", "mean", "input and weight", "all"])
def test_values_and_gradients_are_eager_s(which):
    model, x, weight, mean = given()
    x, weight, mean = (
        twice(t) if which == "all" or name in which else t for name, t in (("input", x), ("weight", weight), ("mean", mean))
    )
    jm = thunder.jit(model, transforms=[SubclassTransform()])
    for _ in range(2):
        found, expected = jm(x, weight, mean), model(x, weight, mean)
        assert type(found) is type(expected) is TwoTensor
        torch.testing.assert_close(found.a, expected.a)
        torch.testing.assert_close(found.b, expected.b)
    bias = model.layer[0].bias
    for _ in range(2):
        found, expected = (torch.autograd.grad(f(x, weight, mean).sin().sum(), bias)[0] for f in (jm, model))
        torch.testing.assert_close(found.a, expected.a)
        torch.testing.assert_close(found.b, expected.b)


def test_norms_are_eager_s():
    model, x, weight, mean = given()
    args = RMSTensor.of(x), RMSToRMSTensor.of(weight), mean
    found, expected = thunder.jit(model, transforms=[NormTransform()])(*args), model(*args)
    torch.testing.assert_close(found.backing, expected.backing)
    torch.testing.assert_close(found.norm_size, expected.norm_size)


class Returns(nn.Module):
    """The parameter that it was given is what it returns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return {"product": x * self.weight, "own": [self.weight]}


def test_a_parameter_that_the_module_returns_is_the_wrapper_given_for_it():
    inner = Returns()

    def f(x, w):
        found = torch.func.functional_call(inner, {"weight": w}, (x,))
        return found["product"], found["own"][0] is w, found["own"][0]

    w, x = twice(torch.randn(3)), torch.randn(3)
    product, is_same, own = thunder.jit(f, transforms=[SubclassTransform()])(x, w)
    assert is_same and own is w
    torch.testing.assert_close(product.b, x * 2 * w.a)


def of_one_made_inside(x, weight):
    layer = nn.Linear(3, 3, bias=False, dtype=x.dtype)
    first = torch.func.functional_call(layer, {"weight": weight}, (x,))
    return torch.func.functional_call(layer, {"weight": weight.sin() + 1}, (first,))


def of_layers_made_inside(x, weight):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return torch.func.functional_call(
        layers, {"0.weight": weight, "0.bias": weight[0], "2.weight": 2 * weight, "2.bias": weight[1]}, (x,)
    )


def of_gradients_made_inside(x, weight):
    layer = nn.Linear(3, 3, bias=False, dtype=x.dtype)
    loss = lambda p: torch.func.functional_call(layer, p, (x,)).sin().sum()  # noqa: E731
    return torch.func.grad(loss)({"weight": weight})["weight"]


def of_one_in_eval_mode(x, weight):
    layers = nn.Sequential(nn.Linear(3, 3, bias=False, dtype=x.dtype), nn.Dropout(0.5)).eval()
    return torch.func.functional_call(layers, {"0.weight": weight}, (x,))


def of_one_whose_parameters_are_asked_for(x, weight):
    layer = nn.Linear(3, 3, dtype=x.dtype).train(False)
    assert "weight" in layer._parameters and not layer.training
    bias = weight[0] if layer._parameters.get("bias") is not None else weight[1]
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))


MADE_INSIDE = [
    of_one_made_inside,
    of_layers_made_inside,
    of_gradients_made_inside,
    of_one_in_eval_mode,
    of_one_whose_parameters_are_asked_for,
]


@pytest.mark.parametrize("f", [f for f in MADE_INSIDE if f is not of_gradients_made_inside])
def test_a_module_that_the_program_makes_is_called_with_wrappers(f):
    def run(call):
        torch.manual_seed(seeded(0))
        weight = twice(torch.randn(3, 3, dtype=torch.float64)).requires_grad_()
        y = call(torch.randn(4, 3, dtype=torch.float64), weight)
        (gradient,) = torch.autograd.grad(y.sin().sum(), weight, torch.ones_like(y.sum().detach()))
        return [y.a.detach(), y.b.detach(), gradient.a, gradient.b]

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    expected = run(f)
    for _ in range(2):
        torch.testing.assert_close(run(jf), expected)  # acquired in each call, which draws the module's own parameters


@pytest.mark.parametrize(("f", "transform"), crossed(MADE_INSIDE, [SubclassTransform, NormTransform, ProfileTransform]))
def test_a_module_that_the_program_makes_is_called_with_given_tensors(f, transform):
    torch.manual_seed(seeded(0))
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    jf = thunder.jit(f, transforms=[transform()])
    for x in torch.randn(2, 4, 3, dtype=torch.float64):
        found, expected = jf(x, weight), f(x, weight)
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(y.square().sum(), weight) for y in (found, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, ProfileTransform])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 3).eval()])
@pytest.mark.parametrize("given", [{}, {"bias": torch.ones(3)}])
def test_parameters_that_a_module_made_inside_has_drawn_are_refused(given, make, transform):
    def f(x):
        return torch.func.functional_call(make(), given, (x,))

    with pytest.raises(UnsupportedOpError, match="a parameter of a module that it makes"):
        thunder.jit(f, transforms=[transform()])(torch.ones(2, 3))
