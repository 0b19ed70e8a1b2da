"""A bound that is no number because one before it overflowed is refused; what NaN and infinity in data make of norms is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    RMSTensor,
    build_norm_map,
    norm_mode,
    norm_report,
    norm_sensitivity,
    normed,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import NormMismatchError, ThunderNormError
from thunder_norm.transforms import NormTransform
import thunder

NAN, INF = math.nan, math.inf


class Cubes(nn.Module):
    """Powers of what is small, normalized, and times a matrix of zeros: the data stay finite, and bounds do not."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        x = self.table(ids) * 0.1
        for _ in range(20):
            x = x - x * x * x
        return self.head(x), self.norm(x)


def test_a_bound_that_overflowed_on_the_way_is_refused():
    torch.manual_seed(seeded(0))
    model, ids = Cubes(), torch.randint(6, (2, 4))
    jm = thunder.jit(model, transforms=[NormTransform()])
    assert all(t.isfinite().all() for t in model(ids))
    for call in (lambda: normed(jm)(ids), lambda: build_norm_map(model, ids)(ids)):
        with pytest.raises(NormMismatchError, match="not a number, though all that was given is one"):
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
    normalized = build_norm_map(model, ids)(ids)[1].norm_size
    assert found[1].norm_size.item() == pytest.approx(value, nan_ok=True) == pytest.approx(normalized.item(), nan_ok=True)


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


def test_a_size_that_is_infinite_is_no_reason_to_return_nan():
    """Of a tensor whose norm nobody knows: eager runs say infinite, traces and norm maps refuse what would be NaN."""
    torch.manual_seed(seeded(0))
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2, bias=False)), torch.randn(3, 4)
    nn.init.zeros_(model[1].weight)
    given = RMSTensor(INF, backing=x)
    assert model(given).norm_size == model[0](given).norm_size == INF
    jm = thunder.jit(model, transforms=[NormTransform()])
    norm_map = build_norm_map(model, RMSTensor.of(x))
    assert norm_map(RMSTensor.of(x)).norm_size == 0
    for call in (lambda: normed(jm)(given), lambda: norm_map(given)):
        with pytest.raises(NormMismatchError, match="not a number"):
            call()


POWERS = {
    "x^-4": lambda x: x**-4,
    "x^-400": lambda x: x**-400,
    "x^0.5": lambda x: x**0.5,
    "x^400": lambda x: x**400.0,
    "1 / x": lambda x: 1 / x,
    "rsqrt": torch.rsqrt,
    "log": torch.log,
    "log1p": torch.log1p,
    "clamp": lambda x: x.clamp(min=1e200),
    "exp": torch.exp,
    "lgamma": torch.lgamma,
    "logit": torch.logit,
    "sinh": torch.sinh,
}


@pytest.mark.parametrize("mode, sensitivity", [("bound", "global"), ("bound", "local"), ("typical", "global")])
@pytest.mark.parametrize("name", POWERS)
def test_numbers_beyond_floats_are_infinite_or_refused(name, mode, sensitivity):
    """Python makes an error of a power that is no float; torch infinity."""
    torch.manual_seed(seeded(0))
    t = torch.randn(2, 3, dtype=torch.float64)
    for c in (0.0, 5e-324, 1e-300, 1e-100, 1.0, 1e100, 1e300):
        for kept in (lambda x, c=c: x.square() + c, lambda x, c=c: x.clamp(min=c), lambda x, c=c: x.clamp(c, c)):
            leaf = with_perturbation(LinfTensor.of(t))
            with norm_mode(mode), norm_sensitivity(sensitivity):
                try:
                    y = POWERS[name](kept(leaf))
                    slope = sensitivities(y, leaf).item()
                except ThunderNormError:
                    continue
            actual = LinfTensor.of(POWERS[name](kept(t))).norm_size.item()
            assert y.norm_size.item() >= 0 and slope >= 0 or math.isnan(actual)
            if mode == "bound" and math.isfinite(actual):
                assert actual <= y.norm_size.item() * (1 + 1e-6) + 1e-307
