"""Mode typical: what is near a number, and the number less, is as large as what Gaussians have there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_mode, normed, sensitivities, with_perturbation
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64


def value_of(x):
    """Schrittwieser et al.'s, of returns."""
    return torch.sign(x) * (((torch.sqrt(1 + 0.004 * (x.abs() + 1 + 0.001)) - 1) / 0.002) ** 2 - 1)


FUNCTIONS = {
    "values": value_of,
    "pseudo-Huber": lambda x: torch.sqrt(1 + 0.01 * x * x) - 1,
    "pseudo-Huber, squared": lambda x: (1 + (x / 10).square()) ** 0.5 - 1,
    "exponential less 1": lambda x: (1e-3 * x).exp() - 1,
    "1 less exponential": lambda x: 1 - torch.exp(-(1e-3 * x)),
    "forth and back": lambda x: x + 100 - 100,
    "square less 1": lambda x: (1 + 0.1 * x).square() - 1,
    "logarithm": lambda x: torch.log(5 + 0.01 * x) - 1.6094379124341003,
    "scaled": lambda x: 3 - (2 + 0.01 * x) * 1.5,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [0.1, 1.0])
def test_sizes_and_slopes_are_those_of_gaussians(name, n):
    f = FUNCTIONS[name]
    t = n * torch.randn(4000, 8, generator=torch.Generator().manual_seed(seeded(0)), dtype=D)
    slope = torch.autograd.functional.jvp(f, t, torch.ones_like(t))[1].square().mean().sqrt().item()
    size = f(t).square().mean().sqrt().item()
    with norm_mode("typical"):
        x = with_perturbation(RMSTensor(n, backing=t))
        y = f(x)
        assert size / 3 < y.norm_size.item() < 3 * size
        assert slope / 3 < sensitivities(y, x).item() < 3 * slope
        traced = normed(thunder.jit(f, transforms=[NormTransform(mode="typical")]))(x)
        torch.testing.assert_close(traced.norm_size, y.norm_size)
        torch.testing.assert_close(sensitivities(traced, x), sensitivities(y, x))


@pytest.mark.parametrize("n", [3.0, 100.0])
def test_far_from_the_number_sizes_are_at_most_what_they_were(n):
    for f in (lambda x: torch.sqrt(1 + x * x) - 1, lambda x: (1 + x).square() - 1):
        with norm_mode("typical"):
            y = f(RMSTensor(n, backing=torch.randn(4, 8, dtype=D)))
        assert 0.3 * n < y.norm_size.item() <= (1 + n) ** 2 + 1


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return value_of(self.layers(x))


def test_a_value_that_is_scaled_back_has_targets():
    targets = ModularNorm(Value(), torch.randn(4, 8), mode="typical").targets
    assert min(targets.values()) > 1e-3
