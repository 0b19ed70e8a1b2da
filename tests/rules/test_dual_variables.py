"""Normalization in the log domain, again and again: bounds that grow with the number of iterations, not by a factor for each."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, norm_mode, normed
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 3, "steps": 8, "seed": seeded()}


def sinkhorn(n, c):
    mu, nu, u, v = (torch.full((k,), x, dtype=D) for k, x in ((3, 1 / 3), (4, 0.25), (3, 0.0), (4, 0.0)))
    eps = 0.5

    def m():
        return (-c + u[:, None] + v[None]) / eps

    for _ in range(n):
        u = eps * (torch.log(mu) - torch.logsumexp(m(), 1)) + u
        v = eps * (torch.log(nu) - torch.logsumexp(m().t(), 1)) + v
    return torch.exp(m())


def by_two_sums(n, c):
    mu, nu = (torch.full((k,), -math.log(k), dtype=D) for k in (3, 4))
    v = torch.zeros(4, dtype=D)
    u = torch.zeros(3, dtype=D)
    for _ in range(n):
        u = mu - torch.logsumexp(c + v[None], dim=1)
        v = nu - torch.logsumexp(c + u.unsqueeze(1), dim=0)
    return torch.exp(c + u.reshape(3, 1) + v.expand(3, 4))


def in_place(n, c):
    x = c * 1.0
    for _ in range(n):
        x = x - torch.logsumexp(x, -1, keepdim=True)
        x = x - torch.logsumexp(x, -2, keepdim=True)
    return torch.exp(x)


def turned_round(n, c):
    x = c * 1.0
    for _ in range(n):
        x = torch.rsub(torch.logsumexp(x, -1, keepdim=True), x)
        x = torch.rsub(torch.logsumexp(x, -2, keepdim=True), x)
    return torch.exp(x)


FORMS = {
    "dual variables": (sinkhorn, 0.25),
    "two sums": (by_two_sums, 0.25),
    "in place": (in_place, 1.0),
    "by rsub": (turned_round, 1.0),
}
BALLS = (Ball("c", LinfTensor, (3, 4), 1.0, ()),)
CASES = [Case(name, functools.partial(form, 2), BALLS) for name, (form, _) in FORMS.items()]


@pytest.mark.parametrize("name", FORMS)
def test_it_moves_with_the_number_of_iterations(name):
    form, largest = FORMS[name]
    for mode in ("bound", "typical"):
        moved = []
        with norm_mode(mode):
            for n in (2, 4, 8):
                out = form(n, LinfTensor(1.0, backing=torch.rand(3, 4, dtype=D) * 2 - 1, perturbation_size=1.0))
                moved.append(out.perturbation_size.item())
        assert moved[2] - moved[1] <= 2 * (moved[1] - moved[0]) + 1e-9
        if mode == "bound" and largest == 1.0:
            assert out.norm_size.item() <= largest + 1e-9
        if mode == "bound" and largest < 1.0:  # numbers of the program's are known by their norm: no more than its inverse
            assert out.norm_size.item() <= 4 + 1e-9
    found = search(functools.partial(form, 2), BALLS, **FEW)
    assert found.is_sound, found


@pytest.mark.parametrize("name", FORMS)
def test_a_trace_has_the_same_bounds(name):
    c = LinfTensor(1.0, backing=torch.rand(3, 4, dtype=D) * 2 - 1)
    traced = normed(thunder.jit(lambda c: FORMS[name][0](2, c), transforms=[NormTransform()]))(c)
    assert traced.norm_size <= FORMS[name][0](2, c).norm_size * (1 + 1e-9)  # it knows of more numbers which they are


OTHERS = {
    "of another row": lambda x, y: torch.exp(x - torch.logsumexp(x, 0)[:, None] * 1.0),
    "of other entries": lambda x, y: torch.exp(x - torch.logsumexp(y + x.flip(0), 1)[:, None] + y),
    "turned round": lambda x, y: torch.exp(x.t() + y - torch.logsumexp(x + y, 1)[:, None]),
    "half of it": lambda x, y: torch.exp(x + y - 0.5 * torch.logsumexp(x + y, 1)[:, None]),
    "along the other dimension": lambda x, y: torch.exp(x + y - torch.logsumexp(x + y, 1)[None, :]),
    "what goes past": lambda x, y: torch.logsumexp(x + torch.logsumexp(y, 1, keepdim=True), 1) - torch.logsumexp(y, 0),
    "cancelled": lambda x, y: torch.logsumexp(x + 2 * torch.logsumexp(y, 1)[:, None], 1) - 2 * torch.logsumexp(y, 1),
    "a part of it": lambda x, y: (lambda z: torch.logsumexp(x + z[:, None], 1)[:2] - z[1:])(torch.logsumexp(y, 1)),
    "repeated": lambda x, y: (lambda z: torch.logsumexp(x.repeat(2, 1) + z.repeat(2)[:, None], 1) - z.repeat(2))(y.logsumexp(1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_tensors_exceed_what_is_nearly_so(name):
    found = search(OTHERS[name], [Ball(n, LinfTensor, (3, 3), 1.5, ()) for n in ("x", "y")], **FEW)
    assert found.is_sound, found


def test_what_is_infinite_does_not_cancel():
    x, y = LinfTensor(1.0, backing=torch.rand(3, 3)), LinfTensor(math.inf, backing=torch.rand(3, 3))
    z = torch.logsumexp(y, 1)
    assert (torch.logsumexp(x + z[:, None], 1) - z).norm_size == math.inf
