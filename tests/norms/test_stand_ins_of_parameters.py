"""What stands for a model's parameters in a report and in `ModularNorm` is a parameter for the program that asks."""

import pytest
import torch
from torch import nn

from thunder_norm import norm_report
from thunder_norm.modular import ModularNorm, find_roles
from thunder_norm.transforms import NormTransform
import thunder


class Asks(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4, device=device))
        self.register_buffer("r", torch.ones(4))

    def forward(self, x):
        assert type(self.w) is nn.Parameter and not isinstance(self.r, nn.Parameter)
        return x @ self.w * (1.0 if isinstance(self.w, nn.Parameter) else 100.0) + self.r.to(x.device)


def test_a_report_takes_the_branch_of_eager_mode():
    x = torch.ones(2, 4)
    report = norm_report(thunder.jit(Asks(), transforms=[NormTransform()]), x)
    assert report.rows[-1].actual == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_modular_norm_does(mode, device):
    model = Asks(device)
    norm = ModularNorm(model, torch.ones(2, 4, device=device), mode=mode)
    assert "w" in norm.targets
    assert model.w.requires_grad and type(model.w) is nn.Parameter


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_roles_do(device):
    assert "w" in str(find_roles(Asks(device), torch.ones(2, 4, device=device)))
