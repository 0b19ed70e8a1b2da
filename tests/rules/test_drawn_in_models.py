"""Numbers that a model draws: at the data of a run they are constants, in a bound for all inputs they are what their distribution says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, norm_report, normed
from thunder_norm.errors import JumpError, NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


class Noisy(nn.Module):
    """Noise of sizes that the program says (VITS)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + 0.5 * torch.randn(len(x), 4)


class Dropped(nn.Module):
    """The dropout of SpeechT5, which is the same for all of a batch, and always there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        kept = torch.bernoulli(y[0], p=0.5).unsqueeze(0).repeat(len(y), 1, 1)
        return torch.where(kept == 1, y, 0) * 2


def jit(model):
    return thunder.jit(model, transforms=[NormTransform()])


def test_a_report_takes_what_is_drawn_as_it_is():
    torch.manual_seed(seeded(0))
    model, x = Noisy(), torch.randn(3, 4)
    last = norm_report(jit(model), x).rows[-1]
    assert 0.3 < last.tightness <= 1 + 1e-5
    assert min(ModularNorm(model, x, mode="typical").targets.values()) > 0.01
    with pytest.raises(NormMismatchError, match="unbounded"):
        normed(jit(model))(x)


def test_a_dropout_by_hand_has_norms_everywhere():
    torch.manual_seed(seeded(0))
    model, x = Dropped(), torch.randn(2, 3, 4)
    assert min(ModularNorm(model, x, mode="typical").targets.values()) > 0.01
    assert norm_report(jit(model), x).rows[-1].tightness <= 1 + 1e-5
    out = model(RMSTensor.of(x))
    assert actual_norm(out) <= out.norm_size * (1 + 1e-5)


def test_probabilities_that_move_make_zeros_and_ones_jump():
    x = RMSTensor(1.0, backing=torch.rand(3, 4), perturbation_size=1.0)
    assert torch.bernoulli(x, p=0.3).perturbation_size == 0
    with pytest.raises(JumpError):
        torch.bernoulli(x)
    assert torch.bernoulli(RMSTensor.of(torch.rand(3, 4))).norm_size == 1
