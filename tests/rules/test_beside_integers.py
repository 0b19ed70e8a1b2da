"""`cat` and `stack` of normed tensors and of plain integers or bools: a mask beside what it masks (TimesFM)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, norm_report
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


def beside(m, x, mask):
    return m.linear(torch.cat([x, mask], -1))


def below(m, x, mask):
    return torch.stack([m.linear(torch.cat((x, x), dim=-1)), mask.repeat(1, 2)], dim=0).sum(0)


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.linear, self.program = nn.Linear(6, 6), program

    def forward(self, x, mask):
        return self.program(self, x, mask)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("program", [beside, below])
def test_bounds_hold_and_values_are_eager_ones(program, dtype):
    torch.manual_seed(seeded(0))
    model, x, mask = Model(program), torch.randn(4, 3), torch.tensor([0, 3, 1]).expand(4, 3).to(dtype)
    expected = model(x, mask)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    found = jitted(RMSTensor.of(x), mask)
    torch.testing.assert_close(jitted(x, mask), expected)
    torch.testing.assert_close(found.backing, expected)
    assert actual_norm(found) <= found.norm_size * (1 + 1e-5)
    last = norm_report(jitted, RMSTensor.of(x), mask).rows[-1]
    assert last.actual == pytest.approx(actual_norm(found).item(), rel=1e-5) and last.tightness <= 1 + 1e-5
    assert build_norm_map(model, x, mask, parameters="unit")(RMSTensor(2.0), mask).norm_size.isfinite()
    for mode in ("bound", "typical"):
        assert ModularNorm(model, x, mask, mode=mode).unreached == ()
