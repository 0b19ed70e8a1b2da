"""Learned divisors: their norms and movements count as those of any parameter, and not the values that they happen to have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, build_norm_map, norm_report
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
