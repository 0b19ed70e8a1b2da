"""``clamp`` between tensors without a norm, as buffers of quantized and clipped models are: what ends push away from 0 alone adds to x."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, normed
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

INF = torch.tensor(math.inf)
ENDS = {
    "nothing": (-INF, INF),
    "around 0": (torch.tensor(-0.5), torch.tensor(0.25)),
    "above 0": (torch.full((4,), 0.5), INF),
    "below 0": (-INF, torch.tensor([-0.1, -0.2, -3.0, -0.5])),
    "a number and a tensor": (-0.5, INF),
}


class Clipped(nn.Module):
    """The clipped linear layer of Gemma 4."""

    def __init__(self, lo, hi):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("lo", torch.as_tensor(lo))
        self.register_buffer("hi", torch.as_tensor(hi))

    def forward(self, x):
        return torch.clamp(self.linear(x), min=self.lo, max=self.hi)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded(0))


@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
@pytest.mark.parametrize("name", ENDS)
def test_no_tensor_is_larger_and_none_moves_further(name, kind):
    lo, hi = ENDS[name]
    for scale in (0.1, 1.0, 10.0):
        x, d = scale * torch.randn(64, 3, 4), 1e-2 * torch.randn(64, 3, 4)
        size, moved = kind.of(x).norm_size, kind.of(d).norm_size
        for call in (lambda t: torch.clamp(t, lo, hi), lambda t: t.clamp(max=hi, min=lo)):
            found = call(kind(size, backing=x, perturbation_size=moved))
            torch.testing.assert_close(found.backing, call(x))
            assert kind.of(call(x)).norm_size <= found.norm_size * (1 + 1e-6)
            assert kind.of(call(x + d) - call(x)).norm_size <= found.perturbation_size * (1 + 1e-5)


def test_ends_at_infinity_change_nothing():
    model = Clipped(*ENDS["nothing"])
    x = torch.randn(3, 4)
    found, expected = (normed(thunder.jit(m, transforms=[NormTransform()]))(RMSTensor.of(x)) for m in (model, model.linear))
    torch.testing.assert_close(found.norm_size, expected.norm_size)
    for mode in ("bound", "typical"):
        clipped, plain = (ModularNorm(m, x, mode=mode).targets for m in (model, model.linear))
        assert clipped["linear.weight"] == pytest.approx(plain["weight"])


def test_a_logarithm_of_what_tensors_keep_away_from_0_has_a_bound():
    x = torch.rand(3, 4)
    found = torch.clamp(RMSTensor.of(x), torch.tensor(0.5), torch.tensor(2.0)).log()
    assert RMSTensor.of(found.backing).norm_size <= found.norm_size * (1 + 1e-6)
    assert found.norm_size <= math.log(2) * (1 + 1e-5)


CLIPPED = {  # the importance weights of V-trace and PPO, CLIP's temperature
    "at most": lambda x: x.exp().clamp(max=1.5),
    "by a method": lambda x: torch.clamp_max(x.detach().exp(), 1.5),
    "after it is detached": lambda x: x.exp().detach().unsqueeze(0).clamp(0.5, 1.5),
    "a multiple": lambda x: (2 * x.exp()).clamp(max=1.5),
}
STEEPEST = {"witnesses": [(torch.full((4,), math.log(1.5) - 1e-6, dtype=torch.float64),)]}
CASES = [Case(name, call, (Ball("x", RMSTensor, (4,), 3.0, ()),), options=STEEPEST) for name, call in CLIPPED.items()]


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("dims", [(), (-1,)], ids=str)
def test_exponentials_with_a_largest_number_move_no_further_than_that(name, dims):
    x = RMSTensor(3.0, backing=torch.randn(4), perturbation_size=1.0, elem_dims=dims)
    out = CLIPPED[name](x)
    assert out.norm_size.item() <= 1.5 + 1e-9
    assert out.perturbation_size.item() <= 1.5 + 1e-9
    found = search(CLIPPED[name], [Ball("x", RMSTensor, (4,), 3.0, dims)], restarts=4, steps=10, seed=seeded())
    assert found.is_sound, found
    assert (-x.exp()).clamp(max=1.5).perturbation_size.item() > 1.5
