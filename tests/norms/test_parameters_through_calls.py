"""What a program does to parameters alone before it uses them, in calls that torch writes in others: their norms come along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import check_bounds
from thunder_norm import norm_report, normed
from thunder_norm.transforms import NormTransform
import thunder


def _iterated(m, x):
    for w in m.w:
        x = x * w
    return x


def _zipped(m, x):
    for w, b in zip(m.w, m.b, strict=True):
        x = x + torch.tanh(x @ w + b)[:, None]
    return x


def _unpacked(m, x):
    first, second = m.w
    return x * first + second


PROGRAMS = {
    "iterated": _iterated,
    "zipped": _zipped,
    "unpacked": _unpacked,
    "of what is made from one": lambda m, x: x * [t.tanh() for t in m.w * 2][1],
    "summed by Python": lambda m, x: x * sum(w for w in m.w),
    "under a number": lambda m, x: (x @ m.w.T) * (1 / m.b),
    "a power of a number": lambda m, x: x * (2**m.w)[0],
    "hstack": lambda m, x: x * torch.hstack([m.b, m.b[:1]]),
    "vstack": lambda m, x: x @ torch.vstack([m.w, m.w[0]]).T,
    "column_stack": lambda m, x: x @ torch.column_stack([m.w[0], m.w.T]),
    "multi_dot": lambda m, x: x @ torch.linalg.multi_dot([m.w.T, m.w, m.w.T]),
    "filled where it is positive": lambda m, x: x * m.w.masked_fill(m.w > 0, 0.0)[0],
    "one of two numbers": lambda m, x: x * torch.where(m.w > 0, 1.0, -2.0)[0] * m.b[0],
}


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.rand(2) + 0.5)
        self.program = program

    def forward(self, x):
        return self.program(self, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_norms_bound_the_result_and_move_with_parameters(name):
    torch.manual_seed(seeded(0))
    m, x = Model(PROGRAMS[name]).double(), torch.randn(5, 3, dtype=torch.float64)
    jitted = thunder.jit(m, transforms=[NormTransform()])
    out = normed(jitted)(x)
    check_bounds([out])
    torch.testing.assert_close(out.backing, m(x))
    parameters = list(m.parameters())
    slopes = torch.autograd.grad(out.norm_size, parameters, allow_unused=True)
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(slopes, directions, strict=True) if g is not None)
    sizes = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += step * d
            sizes.append(normed(jitted)(x).norm_size)
    torch.testing.assert_close(slope, (sizes[0] - sizes[1]) / 2e-6, rtol=1e-4, atol=1e-4)
    assert len(norm_report(jitted, x).rows) > 0
