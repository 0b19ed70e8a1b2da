"""Decays between places, in the spellings that models have: at most 1 where only earlier places are kept, and not taken for it elsewhere."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, normed, with_perturbation
from thunder_norm.core.ranges import Range
from thunder_norm.transforms import NormTransform
import thunder

INF = math.inf


def lower(s):
    return torch.ones(6, 6, dtype=torch.bool, device=s.device).tril()


DECAYS = {
    "by None": lambda s: (s[..., :, None] - s[..., None, :]).masked_fill(~lower(s), -INF),
    "by None alone": lambda s: (s[:, :, :, None] - s[:, :, None]).masked_fill(~lower(s), -INF),
    "tril": lambda s: (s.unsqueeze(-1) - s.unsqueeze(-2)).tril(),
    "tril below": lambda s: (s[..., None] - s[..., None, :]).tril(-1),
    "triu": lambda s: (s.unsqueeze(-2) - s.unsqueeze(-1)).triu(),
    "where": lambda s: torch.where(lower(s), s[..., None] - s[..., None, :], -INF),
    "where not": lambda s: torch.where(~lower(s), -INF, s[..., None] - s[..., None, :]),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decays_are_at_most_one(name):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, 6) * 3
    f = lambda x: DECAYS[name](F.logsigmoid(x).cumsum(-1)).exp()  # noqa: E731
    runs = {
        "eager": lambda: f(with_perturbation(RMSTensor.of(x))),
        "trace": lambda: thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x)),
        "map": lambda: build_norm_map(f, torch.empty(2, 3, 6, device="meta"))(RMSTensor(1.0)),
    }
    for where, run in runs.items():
        assert run().norm_size.item() == 1.0, where


def test_decays_along_a_dimension_that_is_not_the_last_are_at_most_one():
    torch.manual_seed(seeded(0))
    x = RMSTensor.of(torch.randn(2, 6, 3) * 3)
    s = F.logsigmoid(x).cumsum(1)
    assert (s[:, :, None] - s[:, None]).masked_fill(~lower(s)[..., None], -INF).exp().norm_size.item() == 1.0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("number", range(12))
def test_the_range_of_differences_is_right(number, sign):
    """With the dimensions, the triangle and its place at random, most of which keep differences of either sign."""
    pick, found = random.Random(seeded(number)), 0
    x = sign * RMSTensor.of(torch.randn(4, 4, generator=torch.Generator().manual_seed(seeded(number)))).abs()
    along = pick.choice([0, 1])
    s = x.cumsum(along)
    indices = [(None, ...), (slice(None), None), (..., None), (..., None, slice(None)), (slice(None), None, slice(None))]
    for i, j in itertools.product(indices, indices):
        d, diagonal = s[i] - s[j], pick.choice([-1, 0, 1])
        mask = torch.ones(4, 4, dtype=torch.bool).tril(diagonal)
        for out in (d.tril(diagonal), d.triu(diagonal), torch.where(mask, d, sign), torch.where(mask, 0.0, d)):
            known = out._range or Range()
            found += known.says_something
            assert known.low - 1e-6 <= out.backing.min() and out.backing.max() <= known.high + 1e-6
    assert found or along == 0  # a triangle is of the last two dimensions


class GatedRetention(nn.Module):
    """Linear attention with decays of each channel, in parallel: b, i and j, and channels."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gate = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        s = F.logsigmoid(self.gate(x)).cumsum(1)
        decay = torch.exp((s[:, :, None] - s[:, None]).masked_fill(~lower(s)[..., None], -INF))
        return torch.einsum("bic,bijc,bjc->bij", q, decay, k) / 8**0.5 @ v


def test_gated_retention_has_a_bound_that_says_something():
    """1e33 before, as if a decay could be e to the sum of all gates."""
    torch.manual_seed(seeded(0))
    out = normed(thunder.jit(GatedRetention(), transforms=[NormTransform()]))(torch.randn(2, 6, 8))
    assert actual_norm(out) <= out.norm_size * (1 + 1e-5) < 3e3
