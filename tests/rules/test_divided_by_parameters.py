"""Learned divisors: their norms and movements count as those of any parameter, and not the values that they happen to have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, build_norm_map, norm_report
from thunder_norm.audit import Ball, Case, search
from thunder_norm.errors import MissingNormRuleError, NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

BY = {
    "a temperature": lambda y, t: y / t,
    "a temperature by its logarithm": lambda y, t: y / t.exp(),
    "in logsumexp": lambda y, t: torch.logsumexp(y / t, -1),
    "of a constant": lambda y, t: y + torch.ones(4) / t,
    "of a matrix": lambda y, t: y @ (torch.eye(4) / t),
    "a moved one": lambda y, t: y / (t.abs() + 0.1),
}


class Tempered(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.linear, self.t, self.by = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7)), by

    def forward(self, x):
        return self.by(self.linear(x), self.t)


def made(by):
    torch.manual_seed(seeded(0))
    return Tempered(by), torch.randn(3, 4)


@pytest.mark.parametrize("name", BY)
def test_a_learned_divisor_is_reached_in_mode_typical(name):
    """It had no target before, and nobody said so but the list of what no output depends on."""
    model, x = made(BY[name])
    model(x).square().sum().backward()
    assert model.t.grad.abs() > 0
    norm = ModularNorm(model, x, mode="typical")
    assert not norm.unreached and norm.targets["t"] > 1e-6


@pytest.mark.parametrize("by", [BY["a temperature"], lambda y, t: torch.addcdiv(y, y, t)])
def test_a_norm_alone_does_not_keep_a_divisor_away_from_zero(by):
    """The value at hand stood for all that the parameter may be."""
    model, x = made(by)
    for run in (lambda: build_norm_map(model, x, parameters="unit")(RMSTensor(1.0)), lambda: ModularNorm(model, x)):
        with pytest.raises((NormMismatchError, MissingNormRuleError), match="lower bound|no norm rule"):
            run()


@pytest.mark.parametrize("name", BY)
def test_reports_at_the_data_have_the_norms_of_the_results(name):
    model, x = made(BY[name])
    y = model(x).detach()
    row = norm_report(thunder.jit(model, transforms=[NormTransform()]), x).rows[-1]
    actual = (y if y.ndim == 1 else y.square().mean(-1).sqrt()).abs().max().item()
    assert row.actual == pytest.approx(actual, rel=1e-5)
    assert row.actual <= row.norm_size * (1 + 1e-5)


OF_A_FACTOR = {
    "snake": lambda a, x: x + torch.sin(a * x) ** 2 / a,
    "snake by square": lambda a, x: x + torch.sin(x * a).square() / a,
    "a square of itself": lambda a, x: (s := (a * x).sin()) * s / a,
    "a sine": lambda a, x: torch.sin(a * x) / a,
    "a soft bound": lambda a, x: torch.tanh(x * a).div(a),
    "an angle": lambda a, x: torch.true_divide(torch.atan(a * x), a),
    "squares": lambda a, x: torch.tanh(a * x).pow(2) / a,
}


FEW = {"restarts": 4, "steps": 12, "seed": seeded()}
CASES = [
    Case(
        f"{name}, {kind.__name__} over {dims}",
        call,
        (Ball("a", LinfTensor, (3, 1), norm_size=1.3), Ball("x", kind, (2, 3, 4), norm_size=2.0, elem_dims=dims or None)),
        0.0,
        FEW,
    )
    for name, call in OF_A_FACTOR.items()
    for kind, dims in ((LinfTensor, ()), (RMSTensor, (-1,)), (RMSTensor, (-2,)))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_vanishes_with_a_factor_is_bounded_over_it(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound and found.value > 0.1, found


@pytest.mark.parametrize("name", OF_A_FACTOR)
def test_what_vanishes_with_a_factor_is_bounded_where_that_is_nearly_0(name):
    call = OF_A_FACTOR[name]
    a, x = torch.full((3, 1), 1e-9, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    bound = call(LinfTensor(1.0, backing=a), RMSTensor.of(x)).norm_size
    assert RMSTensor.of(call(a, x)).norm_size <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, x: torch.sin(a * x) / (a + 1e-9),
        lambda a, x: torch.cos(a * x) / a,
        lambda a, x: torch.relu(a * x) / a,
        lambda a, x: (torch.sin(a * x) + 1) / a,
        lambda a, x: (torch.sin((b := a * 1.0) * x), b.add_(2))[0] / b,
    ],
)
def test_what_does_not_vanish_with_it_is_refused(call):
    a, x = LinfTensor(1.0, backing=torch.rand(3, 1)), RMSTensor(1.0, backing=torch.randn(3, 4))
    with pytest.raises(NormMismatchError):
        call(a, x)


def test_a_snake_of_a_model_has_targets_and_a_norm_map():
    class Snake(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.out = nn.Conv1d(2, 4, 3), nn.Parameter(torch.ones(1, 4, 1)), nn.Conv1d(4, 2, 1)

        def forward(self, x):
            x = self.conv(x)
            return self.out(x + torch.sin(self.a * x) ** 2 / self.a)

    torch.manual_seed(seeded(0))
    model, x = Snake(), torch.randn(2, 2, 8)
    norm = ModularNorm(model, x)
    assert not norm.unreached and all(t > 0 for t in norm.targets.values())
    (found,) = [build_norm_map(model, x, parameters="unit")(*norm.inputs[0])]
    assert 0 < found.norm_size < 100
