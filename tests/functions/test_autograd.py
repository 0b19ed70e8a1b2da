"""Transformed functions in torch's autograd: connected, to any order, to arguments and to parameters; nothing detaches silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import thunder_norm.transforms as T
from tests.seeds import seeded
from tests.transform_oracles import assert_same, float64
import thunder


def f(x: torch.Tensor) -> torch.Tensor:
    return (x / x.sum()).sin().pow(3).sum()


def _third(transforms: Any) -> torch.Tensor:
    x = float64(4).requires_grad_()
    first = transforms.grad(f)(x)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert first.requires_grad and second.requires_grad
    return torch.autograd.grad(second.square().sum(), x)[0]


def _through_a_pullback(transforms: Any) -> torch.Tensor:
    x, ct = float64(4).requires_grad_(), float64(4, seed=1).requires_grad_()
    _, pullback = transforms.vjp(lambda x: torch.softmax(x, 0), x)
    return torch.autograd.grad(pullback(ct)[0].square().sum(), (x, ct))


def _parameters(transforms: Any) -> Any:
    torch.manual_seed(seeded(0))
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    penalty = transforms.vmap(transforms.grad(lambda x: net(x).sum()))(float64(5, 4)).square().sum()
    return torch.autograd.grad(penalty, tuple(net.parameters()), allow_unused=True)


def _given_parameters(transforms: Any) -> Any:
    net = torch.nn.Linear(4, 1).double()
    params = {k: torch.nn.Parameter(float64(*v.shape)) for k, v in net.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(net, p, (x,)).square().sum()  # noqa: E731
    gradients = transforms.grad(loss)(params, float64(5, 4))
    return torch.autograd.grad(gradients["weight"].sin().sum(), list(params.values()))


@pytest.mark.parametrize("program", [_third, _through_a_pullback, _parameters, _given_parameters])
def test_derivatives_of_derivatives(program: Any) -> None:
    assert_same(program(T), program(torch.func))


def test_a_module_under_vmap_is_trained() -> None:
    net = torch.nn.Linear(3, 2).double()
    x = float64(5, 3)
    T.vmap(net)(x).square().sum().backward()
    found = [p.grad for p in net.parameters()]
    assert_same(found, list(torch.autograd.grad(net(x).square().sum(), list(net.parameters()))))


def test_the_backward_uses_the_numbers_that_were_drawn() -> None:
    x = torch.ones(3, 500, requires_grad=True)
    out = T.vmap(lambda x: F.dropout(x, 0.5) + torch.rand_like(x) * 0, randomness="different")(x)
    torch.manual_seed(seeded(7))
    before = torch.rand(3)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.manual_seed(seeded(7))
    assert torch.equal(torch.rand(3), before)
    assert torch.equal(gradient, out.detach()) and not torch.equal(out[0], out[1])


def test_nothing_is_recorded_without_gradients() -> None:
    x = float64(3).requires_grad_()
    with torch.no_grad():
        assert not T.grad(f)(x).requires_grad
    assert not T.grad(f)(x.detach()).requires_grad
    assert T.vmap(lambda x: x.argmax())(x[None]).requires_grad is False


def _product_and_power(v):
    return v.prod() + (v**v).sum()


def _power_of_real_parts(v):
    return (v.real**2).sum() + v.abs().prod()


@pytest.mark.parametrize("f", [_product_and_power, _power_of_real_parts])
@pytest.mark.parametrize("arrives", [lambda x: x, lambda x: x * 1, lambda x: torch.stack([x, x * 2]).sum(0)])
def test_plain_thunder_differentiates_a_transformed_function_of_what_it_computed(f, arrives):
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    x = (x + 0.5j * x.flip(0) if f is _power_of_real_parts else x).requires_grad_()
    mine, torchs = (lambda x, vmap=vmap: vmap(f)(arrives(x)) for vmap in (T.vmap, torch.func.vmap))
    found, expected = thunder.jit(mine)(x), torchs(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))


def test_anomaly_detection_of_a_first_call() -> None:
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with torch.autograd.set_detect_anomaly(True):
        found = torch.autograd.grad(thunder.jit(model, transforms=[T.NormTransform()])(x).square().sum(), model.weight)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), model.weight))
