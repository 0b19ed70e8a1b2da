"""Recursions in the log domain with constants of infinity: finite bounds, which no tensors exceed, in any spelling."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, norm_mode, normed
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 3, "steps": 8, "seed": seeded()}
INF = float("inf")


def const(*values):
    return torch.tensor(values, dtype=D)


def by_stack(x, y):
    """A forward algorithm from left to right, y the scores of its transitions."""
    alpha = const(0.0, -INF, -INF)
    for t in range(2):
        before = torch.cat([const(-INF), alpha[:-1] + y[t, :-1]])
        alpha = torch.logsumexp(torch.stack([alpha, before]), 0) + x[t]
    return torch.logsumexp(alpha, 0)


def by_logaddexp(x, y):
    alpha = const(0.0, -INF, -INF) + x[0]
    for t in range(1, 3):
        alpha = torch.logaddexp(F.pad((alpha + y[t])[:-1], (1, 0), value=-INF), alpha) + x[t]
    blank = F.pad(alpha, (0, 1), value=-INF).masked_fill(torch.tensor([True, False, False, False]), -INF)
    return torch.logaddexp(alpha[:1], alpha[-1:]) + blank[1:3].sum()


def soft_dtw(x, y):
    r = [[torch.tensor(INF, dtype=D) for _ in range(4)] for _ in range(3)]
    r[0][0] = torch.tensor(0.0, dtype=D)
    for i in range(1, 3):
        for j in range(1, 4):
            above = torch.stack([r[i - 1][j], r[i][j - 1], r[i - 1][j - 1]])
            r[i][j] = x[i, j - 1] - 0.5 * torch.logsumexp(-above / 0.5, 0)
    return r[2][3] + y[0, 0]


def hard_dtw(x, y):
    left = const(0.0, INF, INF)
    for t in range(3):
        above = torch.cat([const(INF), left[:-1]]) if t else left
        left = torch.stack([left, above]).amin(0) + x[t]
    return torch.stack([left[0], y[0, 0]]).min(0).values


def by_smallest(x, y):
    left = const(0.0, INF, 0.0)
    for t in range(2):
        left = torch.stack([left - const(0.0, 0.0, -INF), y[t]]).min(0).values + x[t]
    return left.amax() - torch.logsumexp(x[0] - const(0.0, INF, 0.0), 0)


def by_masks(x, y):
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    cost = torch.where(lower, x, INF) - y
    scores = (-cost * 2).t() + torch.zeros(3, 3, dtype=D).masked_fill(lower, -INF)[:, 2:]
    return torch.logsumexp(scores[:2] / 2, -1)


IS_SAME = torch.tensor([[True, False, True], [False, True, False], [True, False, True]])


def by_choices(x, y):
    """A path that may skip where it is let, beside what no path reaches, as tensors of infinity."""
    a = torch.where(IS_SAME, x, torch.full((3, 3), -INF, dtype=D))
    b = torch.where(IS_SAME, torch.full_like(y, -INF), y)
    either = torch.where(const(1.0, 0.0, 1.0) > 0, a, b + const(0.0, -INF, 0.0))
    return torch.logsumexp(torch.stack([a, b, either, x]), 0)


def by_distances(x, y):
    """The nearest of another class less the furthest of one's own."""
    others = torch.where(IS_SAME, torch.full_like(x, INF), x)
    own = torch.where(IS_SAME, y, torch.tensor(-INF, dtype=D))
    return torch.min(others, 1).values - own.amax(1)


FORMS = (by_choices, by_distances, by_stack, by_logaddexp, soft_dtw, hard_dtw, by_smallest, by_masks)
CASES = [Case(f.__name__, f, tuple([Ball(name, LinfTensor, (3, 3), 2.0, ()) for name in ("x", "y")])) for f in FORMS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_not_infinite_is_bounded(case):
    form = case.call
    x, y = (LinfTensor(2.0, backing=torch.rand(3, 3, dtype=D) * 4 - 2, perturbation_size=1.0) for _ in range(2))
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            out = form(x, y)
        assert out.norm_size < 40
    found = search(form, case.balls, **FEW)
    assert found.is_sound, found


@pytest.mark.parametrize(
    "form", [f for f in FORMS if f is not by_choices], ids=lambda f: f.__name__
)  # its masks are its caller's
def test_a_trace_has_the_same_bounds(form):
    x, y = (LinfTensor(2.0, backing=torch.rand(3, 3, dtype=D) * 4 - 2) for _ in range(2))
    traced = normed(thunder.jit(form, transforms=[NormTransform()]))(x, y)
    torch.testing.assert_close(traced.norm_size, form(x, y).norm_size)


def test_what_is_infinite_is_found_out_by_a_trace_that_is_given_masks():
    def nearest(x, is_same):
        d = torch.where(is_same, torch.full_like(x, INF), x)
        return d.amin(1) + torch.logsumexp(x.masked_fill(is_same, -INF), 1) + torch.where(is_same, -INF, x).max(1).values

    traced = normed(thunder.jit(nearest, transforms=[NormTransform()]))
    everywhere = IS_SAME.clone()
    everywhere[1] = True
    for is_same in (IS_SAME, everywhere):
        x = LinfTensor(2.0, backing=torch.rand(3, 3, dtype=D) * 4 - 2)
        torch.testing.assert_close(traced(x, is_same).norm_size, nearest(x, is_same).norm_size)
    assert traced(x, IS_SAME).norm_size < 10 and traced(x, everywhere).norm_size == INF


def test_infinities_that_meet_or_stay_have_no_bound():
    x = LinfTensor(1.0, backing=torch.rand(3, dtype=D), perturbation_size=1.0)
    low, high = const(0.0, -INF, 0.0), const(0.0, INF, 0.0)
    for out in (
        (x + low) + high,  # NaN
        torch.logsumexp(torch.stack([x + low, x + low]), 0),
        torch.logaddexp(x + low, low),
        torch.logsumexp(x + high, 0),
        torch.amin(x + low, 0),
        torch.amin((x + high) * 0, 0),
        torch.where(high >= 0, torch.full_like(x, -INF), x + low).amax(0),
        torch.where(high > 0, x + high, torch.full_like(x, -INF)).amin(0),
    ):
        assert out.norm_size == math.inf


def test_a_parameter_with_infinities_is_none_of_the_programs_constants():
    x = LinfTensor(1.0, backing=torch.rand(2, dtype=D))
    p = torch.nn.Parameter(const(-INF, -INF))
    assert torch.logsumexp(torch.stack([x, p]), 0).norm_size == math.inf


@pytest.mark.parametrize("beside", [torch.tensor([True, False, True]), torch.tensor([3, -1, 0])], ids=["bool", "int"])
def test_numbers_of_other_dtypes_beside_infinities(beside):
    x = LinfTensor(1.0, backing=torch.rand(3, dtype=D) * 2 - 1, perturbation_size=1.0)
    out = torch.logsumexp(x + const(0.0, -INF, 0.0) + beside, 0)
    assert out.backing.abs() <= out.norm_size < 6 and out.perturbation_size < 1.1
