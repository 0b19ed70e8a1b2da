"""Parameters that move the output are reached; where that cannot be said, there is an error."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn

from thunder_norm import LinfTensor, norm_report
from thunder_norm.errors import MissingNormRuleError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform


class ThroughUnknown(nn.Module):
    """A weight by way of an operation that has no norm rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, x):
        return x @ torch.linalg.pinv(self.weight)


def test_a_report_does_not_call_a_parameter_unreached_because_a_rule_is_missing():
    jm = thunder.jit(ThroughUnknown(), transforms=[NormTransform()])
    with pytest.raises(MissingNormRuleError, match="linalg.pinv"):
        norm_report(jm, LinfTensor.of(torch.randn(2, 4)))


class Dropped(nn.Module):
    """A layer that a random mask leaves out."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep

    def forward(self, x):
        return x + self.layer(x) * (torch.rand(x.shape[0], 1) < self.keep) / 0.5


@pytest.mark.parametrize("keep", [-1.0, 0.5, 2.0])  # nothing, something, everything
def test_what_a_random_mask_drops_is_reached(keep):
    sensitivities = ModularNorm(Dropped(keep), torch.randn(2, 4)).sensitivities
    assert sensitivities == ModularNorm(Dropped(2.0), torch.randn(2, 4)).sensitivities
    assert all(s > 0 for s in sensitivities.values())


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("target", torch.randn(2, 4))

    def forward(self, x):
        return nn.functional.mse_loss(x, self.target)


def test_a_model_of_buffers_alone_has_a_modular_norm():
    norm = ModularNorm(Loss(), torch.randn(2, 4))
    assert norm.sensitivities == {} and norm.outputs.norm_size > 0
