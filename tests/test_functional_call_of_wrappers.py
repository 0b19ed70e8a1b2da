"""``torch.func.functional_call`` with wrapper subclasses in place of parameters, in traced programs, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import RMSTensor, RMSToRMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
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
