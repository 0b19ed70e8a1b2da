"""Inputs whose names would be one name in a trace, the prologue's own, or none in Python, are computed with each in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform, grad
import thunder


class Alike(nn.Module):
    """Each is ``t_a_0_weight`` if what is no letter becomes an underscore."""

    def __init__(self):
        super().__init__()
        self.a, self.a_0 = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
        self.add_module("a-0", nn.Linear(3, 3))
        self.add_module("a 0", nn.BatchNorm1d(3))
        self.tied = self.a

    def forward(self, x):
        return getattr(self, "a 0")(getattr(self, "a-0")(self.tied(self.a_0(self.a(x)))))


def test_values_and_gradients_are_eager_s():
    x = torch.randn(4, 3, dtype=torch.float64)
    for transform in (SubclassTransform(), NormTransform()):
        model = Alike().double().eval()
        jm = thunder.jit(model, transforms=[transform])
        for _ in range(2):
            torch.testing.assert_close(jm(x), model(x))
        found = torch.autograd.grad(jm(x).square().sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_norms_are_eager_s():
    model = Alike().eval()
    x = RMSTensor.of(torch.randn(4, 3))
    y, expected = thunder.jit(model, transforms=[NormTransform()])(x), model(x)
    torch.testing.assert_close(y.backing, expected.backing)
    torch.testing.assert_close(y.norm_size, expected.norm_size, rtol=1e-5, atol=0.0)  # of float32


def test_other_names_are_thunder_s():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    jm = thunder.jit(model, transforms=[NormTransform()])
    jm(torch.randn(4, 3))
    names = {p.name for p in thunder.last_traces(jm)[0].args}
    assert {"t_0_weight", "t_0_bias", "t_1_weight", "t_1_bias"} <= names


def of_args(args, y):
    return args.sin() + y


def of_kwargs(x, kwargs):
    return x.sin() + kwargs


def of_cache_info(cache_info, cache_info_default_dtype):
    return cache_info.sin() + cache_info_default_dtype


def of_modules(module, thunder):
    return module.sin() + thunder


def of_checks(check_tensor_metadata, check_plain_tensors):
    return check_tensor_metadata.sin() + check_plain_tensors


@pytest.mark.parametrize("f", [of_args, of_kwargs, of_cache_info, of_modules, of_checks])
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_arguments_may_have_the_names_of_a_prologue_s_own(f, transform):
    x, y = torch.randn(3), torch.randn(3, requires_grad=True)
    jf = thunder.jit(f, transforms=[transform()])
    torch.testing.assert_close(jf(x, y), f(x, y))
    torch.testing.assert_close(jf(RMSTensor.of(x), RMSTensor.of(y)).norm_size, f(RMSTensor.of(x), RMSTensor.of(y)).norm_size)


class CalledWithParameters(nn.Module):
    """torch's loops over them have each in a variable ``module``."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, y):
        def loss(parameters):
            return (torch.func.functional_call(self.net, parameters, (x,)) - y).square().mean()

        parameters = dict(self.net.named_parameters())
        for _ in range(2):  # of MAML
            gradients = torch.func.grad(loss)(parameters)
            parameters = {name: p - 0.1 * gradients[name] for name, p in parameters.items()}
        return loss(parameters)


def test_a_module_that_calls_another_with_its_parameters():
    model, x, y = CalledWithParameters().double(), torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    found, expected = thunder.jit(model, transforms=[NormTransform()])(x, y), model(x, y)
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b)


def identity(x):
    eye = torch.eye(4, dtype=torch.bool)
    return x * ~eye


def covariance(x):
    cov = torch.cov(x)
    return cov * 2


def before_the_operation(x):
    eye = x * 2
    return torch.eye(4) @ eye


def of_an_operation_inside(x):
    kron = torch.kron(x, x)
    logcumsumexp = torch.logcumsumexp(kron, 0)
    return logcumsumexp * 2


@pytest.mark.parametrize("f", [identity, covariance, before_the_operation, of_an_operation_inside])
def test_variables_may_have_the_names_of_operations(f):
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4)
    for transform in (NormTransform, SubclassTransform):
        torch.testing.assert_close(thunder.jit(f, transforms=[transform()])(x), f(x))
    expected = torch.func.grad(lambda x: f(x).square().sum())(x)
    torch.testing.assert_close(grad(lambda x: f(x).square().sum())(x), expected)
