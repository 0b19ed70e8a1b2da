"""Sinkhorn's iterations by division: bounds that grow with the number of iterations; and the largest of several movements where nothing has moved yet."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, sensitivities, with_perturbation
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 3, "steps": 8, "seed": seeded()}


def divided(p, n, eps=0.0):
    for _ in range(n):
        p = p / (p.sum(-2, keepdim=True) + eps)
        p = p / (p.sum(-1, keepdim=True) + eps)
    return p


def in_place(p, n):
    p = p * 1.0
    for _ in range(n):
        p /= p.sum(-2, keepdim=True).clamp(min=0.5)
        p /= p.sum(-1, keepdim=True) + 0.3
    return p


FORMS = {
    "exponentials": lambda n, x: divided(x.exp(), n),
    "beside a number": lambda n, x: divided(x.exp(), n, eps=0.5),
    "hyper-connections": lambda n, x: divided(torch.softmax(x, -1) + 1e-6, n, eps=1e-6),
    "at least a number": lambda n, x: in_place(torch.sigmoid(x), n),
    "rows, and all": lambda n, x: functools.reduce(lambda p, d: p / (p.sum(d, keepdim=True) + 0.1), [-1, (-2, -1)] * n, x.exp()),
}
BALLS = (Ball("x", LinfTensor, (2, 3, 3), 1.0, ()),)
CASES = [Case(name, functools.partial(form, 2), BALLS) for name, form in FORMS.items()]


@pytest.mark.parametrize("name", FORMS)
def test_it_moves_with_the_number_of_iterations(name):
    form, moved = FORMS[name], {}
    x = LinfTensor(1.0, backing=torch.rand(2, 3, 3, dtype=D) * 2 - 1, perturbation_size=1.0)
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            moved[mode] = [form(n, x).perturbation_size.item() for n in (2, 4, 8)]
    first, second, third = moved["bound"]
    assert third - second <= 2 * (second - first) + 1e-9
    assert max(moved["typical"]) <= 2 + 1e-9  # by what the kernel does, however often
    found = search(functools.partial(form, 2), BALLS, **FEW)
    assert found.is_sound, found


def test_a_trace_has_the_same_sensitivity():
    x = with_perturbation(LinfTensor(1.0, backing=torch.rand(2, 3, 3, dtype=D) * 2 - 1))
    form = functools.partial(FORMS["hyper-connections"], 3)
    (eager,) = sensitivities(form(x), [x])
    (traced,) = sensitivities(thunder.jit(form, transforms=[NormTransform()])(x), [x])
    assert traced.item() == pytest.approx(eager.item(), rel=1e-6)


def steep_and_flat(x):
    w = torch.exp(3 * x) + torch.exp(x)
    return w / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [0.0, 0.01])
def test_a_sum_of_weights_moves_by_the_largest_of_their_shares(size):
    """Where nothing has moved yet as well: the derivative of a maximum of zeros would be the mean."""
    at, way = torch.tensor([2.0, 2, -2, 2], dtype=D), torch.tensor([1.0, -1, 1, -1], dtype=D)
    moved = torch.func.jvp(steep_and_flat, (torch.tensor([2.0, 1.8], dtype=D),), (way[:2],))[1].abs().sum()
    x = with_perturbation(LinfTensor(2.0, backing=at, elem_dims=()), size)
    assert moved > 2.5
    assert sensitivities(steep_and_flat(x), [x])[0] >= moved


def test_a_mean_moves_by_the_largest_of_what_is_averaged():
    """By each of two tensors, as it may have all of the weight."""
    v, w = (with_perturbation(RMSTensor(1.0, backing=torch.randn(4, 3, dtype=D))) for _ in range(2))
    a, b = (torch.exp(LinfTensor(5.0, backing=torch.full((4, 1), x, dtype=D))) for x in (5.0, -5.0))
    y = (a * v + b * w) / (a + b)
    share = torch.func.jvp(
        lambda v: (a.backing * v + b.backing * w.backing) / (a.backing + b.backing), (v.backing,), (v.backing,)
    )[1]
    assert share.norm() > 0.99 * v.backing.norm()
    assert all(s >= 0.99 for s in sensitivities(y, [v, w]))
