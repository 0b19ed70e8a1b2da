"""Norms of programs that take derivatives: penalties, energies, equations, inner steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import InnerDerivativeError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.norms.flat_programs import FlatProgram
from thunder_norm.transforms import NormTransform
import thunder


class Penalty(nn.Module):
    """WGAN-GP's, of a critic of images."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        y = self.head(F.elu(self.body(x)).flatten(1))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g.flatten(1).norm(dim=1) - 1).square().mean() - y.mean()


class Energy(nn.Module):
    """Hamilton's equations of an energy, after a step downwards."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x):
        energy = lambda z: self.net(z).sum()  # noqa: E731
        x = x - 0.1 * torch.func.grad(energy)(x)
        return torch.cat([x[:, 2:], -x[:, :2]], -1)


class Equation(nn.Module):
    """The residual of Burgers' equation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points):
        x, t = (points[:, i : i + 1].clone().requires_grad_(True) for i in range(2))
        u = self.net(torch.cat([x, t], 1))
        ux, ut = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=True)
        return {"residual": ut + u * ux - 0.1 * uxx, "name": "burgers"}["residual"]


class Forwards(nn.Module):
    """FFJORD's: steps along a field, and how volumes change, by forward mode in one direction."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        direction, volume = torch.ones_like(x), torch.zeros(x.shape[0], 1)
        for i in range(2):
            t = torch.full((x.shape[0], 1), i / 2)
            step, moved = torch.func.jvp(lambda z: self.field(torch.cat([z, t], -1)), (x,), (direction,))  # noqa: B023
            x, volume = x + step / 2, volume + (moved * direction).sum(-1, keepdim=True) / 2
        return torch.cat([x, volume], -1)


class Jacobians(nn.Module):
    """Each sample's Jacobian."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(lambda z: self.second(torch.sin(self.first(z)))))(x)


class InnerStep(nn.Module):
    """A step on the weight, and the result after it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4) * 0.3)

    def forward(self, x):
        (g,) = torch.autograd.grad((x @ self.weight.t() - 1).square().mean(), self.weight, create_graph=True)
        return x @ (self.weight - 0.1 * g).t()


class Mapped(nn.Module):
    """A function of one sample, with the weights of a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x):
        return torch.vmap(lambda row: F.linear(row, self.layer.weight, self.layer.bias).tanh())(x)


class Ensemble(nn.Module):
    """Models of which each has a slice of the parameters, on the same input, and one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 6, 4) * 0.5), nn.Parameter(torch.randn(3, 4, 6) * 0.4)

    @staticmethod
    def member(weights, x):
        return F.gelu(x @ weights["first"].mT) @ weights["second"].mT

    def forward(self, x):
        weights = {"first": self.first, "second": self.second}
        each = torch.func.vmap(self.member, in_dims=(0, None))(weights, x)
        return torch.func.vmap(self.member)(weights, F.layer_norm(each, (4,))).mean(0)


class InnerLoop(nn.Module):
    """Test-time training: each sample's own weights, after a step on its own loss."""

    def __init__(self):
        super().__init__()
        self.weight, self.key, self.value = nn.Parameter(torch.randn(4, 4) * 0.4), nn.Linear(4, 4), nn.Linear(4, 4)

    def loss(self, weights, k, v):
        return (torch.tanh(k @ weights["w"]) - v).square().mean()

    def forward(self, x):
        weights = {"w": self.weight.expand(x.shape[0], -1, -1)}
        slopes = torch.func.vmap(torch.func.grad(self.loss))(weights, self.key(x), self.value(x))
        return torch.func.vmap(torch.matmul)(x, weights["w"] - 0.5 * slopes["w"])


PROGRAMS = {
    Mapped: (3, 4),
    Ensemble: (5, 4),
    InnerLoop: (3, 5, 4),
    Penalty: (2, 2, 8, 8),
    Energy: (3, 4),
    Equation: (5, 2),
    Forwards: (3, 4),
    Jacobians: (3, 3),
    InnerStep: (4, 4),
}


def made(cls):
    torch.manual_seed(seeded(0))
    return cls(), torch.randn(*PROGRAMS[cls])


@pytest.mark.parametrize("cls", PROGRAMS)
def test_values_are_eagers_and_within_the_bound(cls):
    model, x = made(cls)
    y, _ = run_eagerly(model, (RMSTensor.of(x),), {}, policy="measured", mode="bound")
    torch.testing.assert_close(y.backing, model(x), rtol=1e-4, atol=1e-5)
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5) < math.inf


class Stacked(nn.Module):
    """Parameters of three models in one tensor each, which meet plain tensors alone, under `torch.vmap`."""

    def __init__(self):
        super().__init__()
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        stacked = torch.func.stack_module_state(models)[0]
        self.names, self.stacked = list(stacked), nn.ParameterList(p.detach() for p in stacked.values())
        self.__dict__["base"] = models[0].to("meta")

    def forward(self, x):
        weights = dict(zip(self.names, self.stacked, strict=True))
        return torch.vmap(lambda w, x: torch.func.functional_call(self.base, w, (x,)), in_dims=(0, None))(weights, x).mean(0)


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_have_norms_under_a_transform_that_is_given_plain_tensors_alone(grad):
    torch.manual_seed(seeded(0))
    model, x = Stacked(), torch.randn(5, 4)
    jm = thunder.jit(model, transforms=[NormTransform()])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(jm(x), model(x))
        y = normed(jm)(x)
    torch.testing.assert_close(y.backing, model(x), rtol=1e-4, atol=1e-5)
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
    rows = norm_report(jm, x).rows
    assert rows[-1].actual == pytest.approx(actual_norm(RMSTensor.of(model(x), rows[-1].elem_dims)).item(), rel=1e-4)


@pytest.mark.parametrize("cls", PROGRAMS)
def test_the_report_at_the_data_is_finite(cls):
    model, x = made(cls)
    rows = norm_report(thunder.jit(model, transforms=[NormTransform()]), x).rows
    assert all(math.isfinite(row.norm_size) and row.tightness <= 1.001 for row in rows if row.actual)


@pytest.mark.parametrize("cls", PROGRAMS)
@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")  # the last bias moves no derivative
def test_targets_do_not_vanish_and_steps_lower_a_loss(cls):
    model, x = made(cls)
    norm = ModularNorm(model, x, mode="typical")
    assert {name for name in norm.unreached if "bias" not in name} == set()
    assert all(t > 1e-6 for name, t in norm.targets.items() if name not in norm.unreached)
    optimizer, losses = ModularOptimizer(norm, lr=0.05, missing_grads="skip"), []
    aim = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(seeded(1)))
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(F.mse_loss(model(x), aim))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def drawn(shape, size, count):
    """Inputs whose rows have at most this RMS, some with it in a single entry."""
    generator = torch.Generator().manual_seed(seeded(2))
    for number in range(count):
        x = torch.randn(shape, generator=generator)
        if number % 3 == 0:
            x = F.one_hot(x.argmax(-1), shape[-1]) * x.sign()
        yield x * size / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("cls", [Equation, InnerStep])
def test_normed_calls_bound_their_result_and_norm_maps_what_inputs_of_that_norm_give(cls):
    model, x = made(cls)
    found = normed(thunder.jit(model, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(found.backing, model(x), rtol=1e-4, atol=1e-5)
    norm_map = build_norm_map(model, x)  # the parameters as they are
    size = x.square().mean(-1).sqrt().max().item()
    assert actual_norm(found) <= found.norm_size * (1 + 1e-5)  # of this x: the gradient inside is what it is there
    bound = norm_map(RMSTensor(size)).norm_size
    results = [model(each).detach() for each in drawn(x.shape, size, 100)]
    assert max(y.square().mean(-1).max().sqrt() for y in results) <= bound * (1 + 1e-5)


def test_another_call_sees_what_has_changed():
    """A flat program has no guards: it is written out in each call, and compiled again where it is another one."""
    model, x = made(InnerStep)
    run = normed(thunder.jit(model, transforms=[NormTransform()]))
    for change in (
        lambda: None,
        lambda: model.weight.data.mul_(2),
        lambda: setattr(model, "forward", lambda x: -InnerStep.forward(model, x)),
    ):
        change()
        found = run(x)
        torch.testing.assert_close(found.backing, model(x), rtol=1e-4, atol=1e-5)
        assert actual_norm(found) <= found.norm_size * (1 + 1e-5)
    torch.testing.assert_close(run(x[:2]).backing, model(x[:2]), rtol=1e-4, atol=1e-5)


class Shifted(nn.Module):
    """With numbers that are no parameters: a tensor, a scale, a flag."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift, self.scale, self.twice = nn.Linear(4, 4), [torch.ones(4)], 1.0, False

    def forward(self, x):
        slope = torch.func.grad(lambda z: (self.scale * self.linear(z) * self.shift[0]).tanh().sum())(x)
        return (slope + slope if self.twice else slope).mean(-1)


CHANGES = {
    "nothing": lambda model: None,
    "its tensor, in place": lambda model: model.shift[0].mul_(3),
    "its tensor": lambda model: model.shift.__setitem__(0, torch.full((4,), 0.5)),
    "a number": lambda model: setattr(model, "scale", 0.5),
    "a flag": lambda model: setattr(model, "twice", True),
    "a parameter": lambda model: model.linear.weight.requires_grad_(False),
    "a shape": lambda model: setattr(model, "linear", nn.Linear(4, 1)),
    "a dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_operations_become_is_kept_where_they_are_the_same(change):
    torch.manual_seed(seeded(0))
    model, x, found = Shifted(), torch.randn(3, 4), []
    for make in (lambda model: None, CHANGES[change]):
        make(model)
        x = x.to(model.linear.weight.dtype)
        tensors = dict(model.named_parameters())
        program = FlatProgram.of(model, tensors, (x,), {}, InnerDerivativeError(), *found)
        torch.testing.assert_close(program(tensors, (x,), {}), model(x))
        found.append(program)
    assert (found[0].graph is found[1].graph) == (change == "nothing")


class Counted(InnerStep):
    """It keeps something in each call."""

    calls = 0

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.what == "an attribute":
            self.calls += 1
        if self.what == "a buffer":
            self.seen.add_(x.detach().mean(0))
        return super().forward(x)


@pytest.mark.parametrize("what", ["an attribute", "a buffer", "nothing"])
def test_what_a_call_keeps_is_kept_or_refused(what):
    torch.manual_seed(seeded(0))
    model, x = Counted(what), torch.randn(3, 4)
    run = normed(thunder.jit(model, transforms=[NormTransform()]))
    if what == "nothing":
        torch.testing.assert_close(run(x).backing, model(x), rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(InnerDerivativeError):
        run(x)
    assert model.calls == 0 and not model.seen.any()


def test_what_depends_on_values_is_refused():
    class Branch(nn.Linear):
        def forward(self, x):
            (g,) = torch.autograd.grad(super().forward(x.requires_grad_(True)).sum(), x, create_graph=True)
            return g if g.sum().item() > 0 else -g

    with pytest.raises(InnerDerivativeError, match="torch.autograd.grad of a NormedTensor"):
        ModularNorm(Branch(3, 3), torch.randn(2, 3), mode="typical")
