"""A bound that is no number because one before it overflowed is refused; what NaN and infinity in data make of norms is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import build_norm_map, norm_report, normed
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

NAN, INF = math.nan, math.inf


class Cubes(nn.Module):
    """Powers of what is small, normalized: the data stay finite, and bounds do not."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 16), nn.LayerNorm(16)

    def forward(self, ids):
        x = self.table(ids) * 0.1
        for _ in range(20):
            x = x - x * x * x
        return self.norm(x), x


def test_a_bound_that_overflowed_on_the_way_is_refused():
    torch.manual_seed(seeded(0))
    model, ids = Cubes(), torch.randint(6, (2, 4))
    jm = thunder.jit(model, transforms=[NormTransform()])
    assert all(t.isfinite().all() for t in model(ids))
    for call in (lambda: normed(jm)(ids), lambda: build_norm_map(model, ids, parameters="unit")(ids)):
        with pytest.raises(NormMismatchError, match="not a number, though all that was given is finite"):
            call()
    report = norm_report(jm, ids, sensitivity="global")
    assert report.first_infinite is not None


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_nan_because_of_the_data_is_told_as_such(value):
    torch.manual_seed(seeded(0))
    model, ids = Cubes(), torch.randint(1, 6, (2, 4))
    with torch.no_grad():
        model.table.weight[0, 0] = value  # of a row that no token has
    found = normed(thunder.jit(model, transforms=[NormTransform()]))(ids)
    assert found[0].norm_size.isnan() and found[0].backing.isfinite().all()
    assert build_norm_map(model, ids)(ids)[0].norm_size.isnan()


def test_infinite_bounds_are_returned():
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 16)

        def forward(self, ids):
            x = self.table(ids) * 0.1
            for _ in range(14):
                x = x * x
            return x

    torch.manual_seed(seeded(0))
    with torch.no_grad():
        (model := Powers()).table.weight.mul_(100)
        model.table.weight[1:] *= 1e-3
    assert normed(thunder.jit(model, transforms=[NormTransform()]))(torch.ones(2, dtype=torch.long)).norm_size == INF
