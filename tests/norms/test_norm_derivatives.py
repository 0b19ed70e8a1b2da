"""Derivatives of norms through `NormTransform`, of first and second order, and sensitivities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_models import Net, jit, leaves_for
from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import (
    NormMismatchError,
)
from thunder_norm.norms.eager import run_eagerly


@pytest.fixture(scope="module")
def model() -> Net:
    """Shared by tests that only read it."""
    torch.manual_seed(seeded(1))
    return Net()


def grads_of(y: NormedTensor, wanted: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.norm_size, wanted, **options)


class Normalized(Net):
    """Values and sensitivities that are not affine in the norms."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.zeros(10))

    def forward(self, x):
        h = F.layer_norm(F.gelu(F.linear(x, self.w1, self.b1)), (10,), self.gain, self.shift)
        return F.linear(h, self.w2, self.b2)


@pytest.fixture(scope="module")
def differentiable() -> tuple:
    """(jitted model, leaves, input): one compilation for the tests of derivatives."""
    torch.manual_seed(seeded(3))
    net = Normalized()
    kinds = {"w1": RMSToRMSTensor, "b1": RMSTensor, "gain": LinfTensor, "shift": RMSTensor, "w2": RMSToRMSTensor, "b2": RMSTensor}
    leaves = {
        name: with_perturbation(kind(1.5 - i / 8, norm_size_requires_grad=True)) for i, (name, kind) in enumerate(kinds.items())
    }
    x = with_perturbation(RMSTensor(0.5, backing=torch.randn(4, 6) / 8, norm_size_requires_grad=True))
    return jit(net, parameters=leaves), net, leaves, x


def test_first_derivatives_are_those_of_eager_mode(differentiable):
    jm, net, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]
    got = grads_of(jm(x), wanted)
    want = grads_of(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0], wanted)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=0)


def test_first_derivatives_are_finite_differences(differentiable):
    jm, _, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]
    for size, grad in zip(wanted, grads_of(jm(x), wanted), strict=True):
        values = []
        for h in (1e-6, -1e-6):
            with torch.no_grad():
                size += h
            values.append(jm(x).norm_size.item())
            with torch.no_grad():
                size -= h
        assert grad.item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_second_derivatives_are_those_of_eager_mode(differentiable):
    jm, net, leaves, x = differentiable
    wanted = [x.norm_size, *(leaf.norm_size for leaf in leaves.values())]

    def second(y: NormedTensor) -> list[torch.Tensor]:
        first = grads_of(y, wanted, create_graph=True)
        total = sum(g * (i + 1) for i, g in enumerate(first))
        return [first, torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)]

    got, want = second(jm(x)), second(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0])
    for g, w in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)
    assert any(g != 0 for g in got[1])


def test_sensitivities_are_those_of_eager_mode_and_differentiable(differentiable):
    jm, net, leaves, x = differentiable
    sizes = [x.norm_size, leaves["w1"].norm_size, leaves["w2"].norm_size]

    def all_of(y: NormedTensor) -> list[torch.Tensor]:
        found = sensitivities(y, {**leaves, "input": x})
        total = sum(found.values())
        return [*found.values(), *torch.autograd.grad(total, sizes, allow_unused=True, materialize_grads=True)]

    got = all_of(jm(x))
    want = all_of(run_eagerly(net, (x,), {}, policy=leaves, mode="bound")[0])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-14)
    assert all(g > 0 and torch.isfinite(g) for g in got[:7])


class Residual(nn.Module):
    """``y = W2 relu(W1 x) + x / 2 + W1 x``, by name and path."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        h = self.first(x)
        return self.second(F.relu(h)) + x / 2 + h


def test_sensitivities_are_sums_over_paths():
    model = Residual()
    leaves = leaves_for(model)
    x = with_perturbation(RMSTensor(0.7, backing=torch.randn(2, 6) / 10, norm_size_requires_grad=True))
    y = jit(model, parameters=leaves)(x)
    n, n1, n2 = 0.7, 1.5, 1.625
    # edges of the graph, with the norm entering each: (from, to, Lipschitz constant)
    edges = [
        ("first", "h", n),
        ("x", "h", n1),
        ("h", "relu", 1.0),
        ("relu", "out2", n2),
        ("second", "out2", n1 * n),
        ("out2", "y", 1.0),
        ("x", "y", 0.5),
        ("h", "y", 1.0),
    ]

    def paths(node: str) -> float:
        return 1.0 if node == "y" else sum(c * paths(to) for source, to, c in edges if source == node)

    found = sensitivities(y, {**leaves, "x": x})
    for name, key in (("first", "first.weight"), ("second", "second.weight"), ("x", "x")):
        assert found[key].item() == pytest.approx(paths(name), rel=1e-12)
    assert y.norm_size.item() == pytest.approx(n2 * n1 * n + n / 2 + n1 * n)


def test_a_leaf_the_output_does_not_depend_on_has_sensitivity_0():
    jf = jit(lambda x, y: (x * 2, y * 0.0))
    x, y = (with_perturbation(RMSTensor.of(torch.ones(3))) for _ in range(2))
    a, b = jf(x, y)
    assert [s.item() for s in sensitivities(a, [x, y])] == [2, 0]
    assert [s.item() for s in sensitivities((a, b), (x, y))] == [2, 0]
    assert sensitivities(RMSTensor.of(torch.ones(3)), [x])[0].item() == 0


def test_outputs_of_one_norm_each_have_their_derivatives():
    """-x, |x| and x have the same norm, one scalar in the trace: no output may take the derivatives of the others away."""

    def f(x):
        y = x * 2
        return y, -y, y.abs(), y.norm_size, x

    x = with_perturbation(RMSTensor(1.0, backing=torch.ones(3), norm_size_requires_grad=True))
    outputs = jit(f)(x)
    sizes = [o.norm_size if isinstance(o, NormedTensor) else o for o in outputs]
    grads = [torch.autograd.grad(n, x.norm_size, retain_graph=True)[0].item() for n in sizes]
    assert grads == [2, 2, 2, 2, 1]
    assert torch.autograd.grad(sum(sizes), x.norm_size, retain_graph=True)[0].item() == 9
    assert [sensitivities(o, [x])[0].item() for o in outputs if isinstance(o, NormedTensor)] == [2, 2, 2, 1]
    (again,) = jit(lambda x: (x * 2,))(x)
    assert torch.equal(again.norm_size, sizes[0])


def test_mistakes_in_sensitivities_are_refused():
    x = with_perturbation(RMSTensor.of(torch.ones(3)))
    with pytest.raises(NormMismatchError, match="leaf 0 of sensitivities must be a NormedTensor, got Tensor"):
        sensitivities(x * 2, [torch.ones(3)])
    with pytest.raises(NormMismatchError, match="with_perturbation"):
        sensitivities(x * 2, [RMSTensor.of(torch.ones(3))])
    with pytest.raises(NormMismatchError, match="among the outputs"):
        sensitivities(torch.ones(3), [x])
    with pytest.raises(NormMismatchError, match="already"):
        with_perturbation(x)
    with pytest.raises(NormMismatchError, match="got Tensor"):
        with_perturbation(torch.ones(3))


def test_a_first_order_move_of_the_parameters_stays_within_the_sensitivities(model):
    """||f(W + D) - f(W)|| <= sum_k S_k ||D_k||, to first order in D."""
    x = RMSTensor.of(torch.randn(16, 6))
    with torch.no_grad():
        leaves = {n: with_perturbation((RMSToRMSTensor if p.ndim == 2 else RMSTensor).of(p)) for n, p in model.named_parameters()}
    leaves = {n: with_perturbation(type(v)(v.norm_size.item())) for n, v in leaves.items()}
    found = sensitivities(jit(model, parameters=leaves)(x), leaves)
    parameters = {n: p.detach().double() for n, p in model.named_parameters()}
    x64 = x.backing.double()
    before = torch.func.functional_call(model, parameters, (x64,))
    for name, leaf in leaves.items():
        for _ in range(10):
            direction = torch.randn_like(parameters[name])
            direction *= 1e-4 / type(leaf).of(direction).norm_size
            after = torch.func.functional_call(model, {**parameters, name: parameters[name] + direction}, (x64,))
            assert RMSTensor.of(after - before).norm_size <= 1e-4 * found[name] * (1 + 1e-3)


def scaled_in_place(x):
    scale = torch.ones(3)
    scale *= 2
    return x.tanh() * scale


def scaled_without_gradients(x):
    scale = torch.arange(3)
    with torch.no_grad():
        scale += 1
        scale[0] = 5
    return (x * scale).tanh()


def read_through_a_view(x):
    scale = torch.full((4, 3), 2.0)
    rows = scale.view(2, 6)
    scale[1:].mul_(3.0)
    rows += 1
    return x.tanh() * rows.view(4, 3)


def written_from_another(x):
    scale, other = torch.zeros(3), torch.ones(3)
    scale.copy_(other)
    other.mul_(4.0)
    return x.tanh() * scale + (x * other).sin()


def written_with_norms(x):
    y = x.exp()
    y[1:] *= y[1:].sin()
    return y


@pytest.mark.parametrize(
    "f", [scaled_in_place, scaled_without_gradients, read_through_a_view, written_from_another, written_with_norms]
)
def test_norms_through_tensors_that_the_program_writes_into_are_differentiated_again(f):
    torch.manual_seed(seeded(0))
    data = torch.randn(4, 3)

    def derivatives(function) -> tuple[torch.Tensor, ...]:
        x = with_perturbation(RMSTensor(0.5, backing=data.clone(), norm_size_requires_grad=True))
        y = function(x)
        (first,) = torch.autograd.grad(y.norm_size, x.norm_size, create_graph=True)
        sensitivity = sensitivities(y, x)
        second = [torch.autograd.grad(v, x.norm_size, retain_graph=True, materialize_grads=True)[0] for v in (first, sensitivity)]
        return first, sensitivity, *second

    torch.testing.assert_close(derivatives(jit(f)), derivatives(f))
