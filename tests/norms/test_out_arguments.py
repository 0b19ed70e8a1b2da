"""What a model computes into its buffers by ``out=``, as spectral norm does in train mode: eager's values, bounds, targets, steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import norm_report, normed
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform
import thunder

spectral_norm = nn.utils.parametrizations.spectral_norm


class PowerIteration(nn.Module):
    """A weight over its largest singular value, by one step of power iteration."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("u", F.normalize(torch.randn(4), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(6), dim=0))

    def forward(self, x):
        with torch.no_grad():
            F.normalize(torch.mv(self.weight, self.v), dim=0, out=self.u)
            torch.div(torch.mv(self.weight.t(), self.u), 3.0, out=self.v)
            v = F.normalize(self.v, dim=0)
        return F.linear(x, self.weight / torch.dot(self.u, torch.mv(self.weight, v)))


class OfInputs(nn.Module):
    """A buffer that what comes of the input is computed into."""

    last: torch.Tensor

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        y = F.linear(x, self.weight)
        with torch.no_grad():
            torch.mul(y[0], 0.5, out=self.last)
        return y + self.last


MODELS = {
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(8, 1))),
    "spectral norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), spectral_norm(nn.Conv1d(2, 4, 3, padding=1))
    ),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(6, 4)),
    "power iteration": PowerIteration,
    "of inputs": OfInputs,
}


@pytest.fixture(params=list(MODELS))
def model(request):
    torch.manual_seed(seeded())
    return MODELS[request.param]().train(), torch.randn(3, 6)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_values_and_buffers_are_eagers_within_the_bound(model):
    model, x = model
    eager = copy.deepcopy(model)
    y, expected = normed(thunder.jit(model, transforms=[NormTransform()]))(x), eager(x)
    torch.testing.assert_close(y.backing, expected)
    for found, own in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(found, own)
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5) and y.norm_size.isfinite()


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_reports_and_targets_leave_the_buffers_as_they_are_and_steps_lower_a_loss(model):
    model, x = model
    before = copy.deepcopy(dict(model.named_buffers()))
    rows = norm_report(thunder.jit(model, transforms=[NormTransform()]), x).rows
    assert all(row.tightness is None or row.tightness <= 1 + 1e-4 for row in rows) and rows[-1].tightness > 1e-2
    norm = ModularNorm(model, x, mode="typical")
    assert not norm.unreached and min(norm.targets.values()) > 1e-4
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    optimizer = ModularOptimizer(norm, lr=0.1)
    target, losses = torch.randn_like(model(x)), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
