"""Exponentials of what is in part set aside, less what no entry exceeds: bounds that no tensors exceed, in any spelling."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, norm_mode
from thunder_norm.audit import Ball, Case, search
from thunder_norm.modular import ModularNorm

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
LOWER = torch.ones(4, 4, dtype=torch.bool).tril()
INF = float("inf")


def pairs(x):
    return x[:, :, None] - x[:, None, :]


def by_where(x, y):
    d = torch.where(LOWER, pairs(x), -INF) + y[:, None, :]
    return torch.exp(d - d.amax(-1, keepdim=True))


def by_other_side(x, y):
    d = y[:, None, :] + torch.where(~LOWER, -INF, pairs(x))
    return torch.exp(d - d.max(-1).values[..., None])


def with_larger(x, y):
    d = torch.where(LOWER, pairs(x), -INF) - y[:, None, :]
    m = torch.maximum(x, torch.max(d, dim=-1).values)
    return torch.exp(d - m[:, :, None])


def with_larger_in_place(x, y):
    d = pairs(x).masked_fill(~LOWER, -INF) + y[:, None, :]
    m = torch.maximum(d.amax(2), y).unsqueeze(2)
    return torch.exp(d - m)


def moved(x, y):
    d = (torch.where(LOWER, pairs(x), -INF) + y[:, None, :]).transpose(1, 2).unsqueeze(1)
    return torch.exp(d - d.amax(2, keepdim=True))


def less_than_the_larger(x, y):
    m = torch.maximum(x, y)
    return torch.exp(x - m) + torch.exp(y - m)


FORMS = (by_where, by_other_side, with_larger, with_larger_in_place, moved, less_than_the_larger)


def balls(n=3.0):
    return [Ball(name, LinfTensor, (2, 4), n, ()) for name in ("x", "y")]


@pytest.mark.parametrize("form", FORMS)
def test_exponentials_are_at_most_one_each(form):
    x, y = (LinfTensor(3.0, backing=torch.rand(2, 4, dtype=D) * 6 - 3, perturbation_size=1.0) for _ in range(2))
    out = form(x, y)
    largest = 2.0 if form is less_than_the_larger else 1.0
    assert out.norm_size.item() == pytest.approx(largest)
    assert out.perturbation_size.item() < 20
    with norm_mode("typical"):
        assert form(x, y).norm_size.item() <= largest + 1e-9


CASES = [Case(form.__name__, form, tuple(balls()), 0.0, FEW) for form in FORMS]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_tensors_exceed_them(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found


OTHERS = {
    "the least": lambda x, y: torch.exp(pairs(x) - pairs(x).amin(-1, keepdim=True)),
    "of another dimension": lambda x, y: (lambda d: torch.exp(d - d.amax(1)[:, :, None]))(pairs(x) + y[:, None, :]),
    "put in elsewhere": lambda x, y: (lambda d: torch.exp(d - d.amax(-1)[:, None]))(pairs(x) + y[:, None, :]),
    "the smaller": lambda x, y: torch.exp(x - torch.minimum(x, y)),
    "of another": lambda x, y: torch.exp(x - torch.maximum(y, x.flip(0))),
    "less than it": lambda x, y: (lambda d: torch.exp(d - (d.amax(-1) - 1)[..., None]))(pairs(x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_exceeded_is_bounded_as_it_is(name):
    x, y = (LinfTensor(1.0, backing=torch.rand(2, 4, dtype=D)) for _ in range(2))
    assert OTHERS[name](x, y).norm_size > 2  # entries of 1 and -1 reach e
    found = search(OTHERS[name], balls(1.0), **FEW)
    assert found.is_sound, found


def test_a_row_that_is_set_aside_everywhere_has_no_largest_entry():
    mask = LOWER.clone()
    mask[0] = False
    x = LinfTensor(1.0, backing=torch.rand(2, 4, 4))
    d = torch.where(mask, x, -INF) + x
    assert d.amax(-1).norm_size == math.inf


class ParallelMLSTM(nn.Module):
    """The xLSTM's: gates relative to the largest so far, and a divisor that is the larger of two."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gates = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        i, f = self.gates(x).unbind(-1)
        b = F.logsigmoid(f).cumsum(-1)
        d = torch.where(LOWER, pairs(b), -INF) + i[:, None, :]
        m = torch.maximum(b, torch.max(d, dim=-1).values)[:, :, None]
        s = q @ k.mT / math.sqrt(6) * torch.exp(d - m)
        n = torch.maximum(s.sum(-1, keepdim=True).abs(), torch.exp(-m))
        return s @ v / (n + 1e-6)


def test_an_mlstm_has_targets_and_a_bound():
    """Refused before: how far its output moves was not finite."""
    torch.manual_seed(seeded(0))
    model, x = ParallelMLSTM(), torch.randn(2, 4, 6)
    assert min(ModularNorm(model, x, mode="typical").targets.values()) > 1e-3
    out = model(RMSTensor.of(x))
    assert actual_norm(out) <= out.norm_size * (1 + 1e-5) < math.inf
