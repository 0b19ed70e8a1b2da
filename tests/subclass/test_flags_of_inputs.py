"""Programs that let an input require grad, as models of forces do with positions: as in eager mode, in the first call and in later ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm.errors import InnerDerivativeError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class Forces(nn.Module):
    """Energies, and their derivatives by positions in a dict, which is what the model is given."""

    def __init__(self, how):
        super().__init__()
        self.energy, self.how = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), how

    def forward(self, data):
        with torch.enable_grad():
            x = self.how(data["pos"])
            e = self.energy(x).sum()
            (g,) = torch.autograd.grad(e, x, create_graph=True)
        return {"energy": e, "forces": -g, "flag": x.requires_grad}


def by_method(x):
    return x.requires_grad_()


def by_method_with_value(x):
    x.requires_grad_(True)
    return x


def by_attribute(x):
    x.requires_grad = True
    return x


WAYS = [by_method, by_method_with_value, by_attribute]


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("how", WAYS)
def test_results_gradients_and_flags_are_those_of_eager_mode(how, transform):
    torch.manual_seed(seeded(0))
    model = Forces(how)
    jitted = thunder.jit(model, transforms=[transform()])
    for shape, flag in ((4, False), (4, False), (4, True), (6, False), (4, False)):
        x = torch.randn(shape, 3, generator=torch.Generator().manual_seed(seeded(shape)))
        found = []
        for call in (model, jitted):
            given = x.clone().requires_grad_(flag)
            out = call({"pos": given})
            ((out["forces"] ** 2).sum() + out["energy"]).backward()
            found.append((out, given.grad, given.requires_grad, [p.grad.clone() for p in model.parameters()]))
            model.zero_grad()
        (eager, grad, has, grads), (own, own_grad, own_has, own_grads) = found
        assert own["flag"] is eager["flag"] is True and own_has is has is True
        for name in ("energy", "forces"):
            torch.testing.assert_close(own[name], eager[name])
            assert own[name].requires_grad and eager[name].requires_grad
        torch.testing.assert_close(own_grad, grad)
        torch.testing.assert_close(own_grads, grads)
    assert thunder.cache_misses(jitted) <= 3  # one for each shape, and perhaps one for what requires grad before


def test_without_gradients_around_them():
    torch.manual_seed(seeded(1))
    model = Forces(by_method)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(2):
        x = torch.randn(4, 3)
        with torch.no_grad():
            expected, found = model({"pos": x.clone()}), jitted({"pos": x})
        assert x.requires_grad
        for name in ("energy", "forces"):
            torch.testing.assert_close(found[name], expected[name])


class Equation(nn.Module):
    """What is left of Burgers' equation, of two inputs that are let require grad."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, t):
        x.requires_grad_()
        t.requires_grad = True
        u = self.net(torch.cat([x, t], 1))
        first, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        return by_t + u * first - 0.01 * torch.autograd.grad(first.sum(), x, create_graph=True)[0]


def test_two_inputs():
    torch.manual_seed(seeded(2))
    model = Equation()
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(2):
        x, t = torch.rand(5, 1), torch.rand(5, 1)
        expected, found = model(x.clone(), t.clone()), jitted(x, t)
        torch.testing.assert_close(found, expected)
        assert x.requires_grad and t.requires_grad
    grads = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (expected, found)]
    torch.testing.assert_close(*grads)
    assert thunder.cache_misses(jitted) == 1


def test_a_call_that_another_trace_serves_sets_no_flag():
    """The flag is set in one branch alone."""

    def f(x, asks):
        if asks:
            x.requires_grad_()
            return torch.autograd.grad(x.sin().sum(), x)[0]
        return x.sin()

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for asks in (True, False, True, False):
        x = torch.randn(3)
        torch.testing.assert_close(jitted(x, asks), x.detach().cos() if asks else x.sin())
        assert x.requires_grad is asks


def made_before(x):
    y = x * 2
    x.requires_grad_()
    return y + x


def asked_before(x):
    return x * 2 if x.requires_grad else x.requires_grad_() * 3


def taken_back(x):
    had = x.requires_grad
    y = x.requires_grad_() * 2
    x.requires_grad_(had)
    return y


@pytest.mark.parametrize("f", [made_before, asked_before, taken_back, lambda x: x.requires_grad_(False) * 2])
def test_what_another_flag_would_change_is_refused(f):
    x = torch.randn(3, requires_grad=f.__name__ == "<lambda>")
    with pytest.raises(InnerDerivativeError, match="requires_grad_"):
        thunder.jit(f, transforms=[SubclassTransform()])(x)
    assert x.requires_grad is (f.__name__ == "<lambda>")
