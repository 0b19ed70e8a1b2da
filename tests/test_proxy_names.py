"""Parameters whose names would be one name in a trace, or none in Python, are computed with each in its place."""

from __future__ import annotations

import torch
from torch import nn

from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class Alike(nn.Module):
    """Each is ``t_a_0_weight`` if what is no letter becomes an underscore."""

    def __init__(self):
        super().__init__()
        self.a, self.a_0 = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
        self.add_module("a-0", nn.Linear(3, 3))
        self.add_module("a 0", nn.BatchNorm1d(3))
        self.tied = self.a

    def forward(self, x):
        return getattr(self, "a 0")(getattr(self, "a-0")(self.tied(self.a_0(self.a(x)))))


def test_values_and_gradients_are_eager_s():
    x = torch.randn(4, 3, dtype=torch.float64)
    for transform in (SubclassTransform(), NormTransform()):
        model = Alike().double().eval()
        jm = thunder.jit(model, transforms=[transform])
        for _ in range(2):
            torch.testing.assert_close(jm(x), model(x))
        found = torch.autograd.grad(jm(x).square().sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_norms_are_eager_s():
    model = Alike().eval()
    x = RMSTensor.of(torch.randn(4, 3))
    y, expected = thunder.jit(model, transforms=[NormTransform()])(x), model(x)
    torch.testing.assert_close(y.backing, expected.backing)
    torch.testing.assert_close(y.norm_size, expected.norm_size)


def test_other_names_are_thunder_s():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    jm = thunder.jit(model, transforms=[NormTransform()])
    jm(torch.randn(4, 3))
    names = {p.name for p in thunder.last_traces(jm)[0].args}
    assert {"t_0_weight", "t_0_bias", "t_1_weight", "t_1_bias"} <= names
