"""Logarithms of sums of exponentials written out: the bounds of logsumexp, which no tensors exceed, with weights and what is added."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, normed
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 3, "steps": 8, "seed": seeded()}
OTHERS = 1 - torch.eye(4, dtype=D)


def plain(x):
    return torch.log(torch.exp(x).sum(1))


def of_others(x):
    e = torch.exp(x - x.amax(1, keepdim=True)) * OTHERS
    return (x - torch.log(e.sum(1, keepdim=True))).mean()


def weighed(x):
    return torch.log((torch.tensor([0.5, 0.0, 3.0, 1.0], dtype=D) * x.exp()).sum(-1) + 1e-6)


def taken_away(x):
    return torch.exp(x).masked_fill(OTHERS == 0, 0.0).sum((0, 1)).log() - (2 * (torch.exp(x) + 0.5).sum()).log()


def divided(x):
    return 1 / (torch.exp(x) * OTHERS).sum(0) + torch.exp(2 * x).sum(0, keepdim=True).rsqrt()


FORMS = (plain, of_others, weighed, taken_away, divided)
CASES = [
    Case(f"{f.__name__} {k.__name__}", f, (Ball("x", k, (4, 4), 2.0, d),))
    for f in FORMS
    for k, d in ((LinfTensor, ()), (RMSTensor, (-1,)))
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_tensors_exceed_the_bounds(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_logarithms_move_no_further_than_their_arguments_and_traces_say_the_same(form):
    x = LinfTensor(2.0, backing=torch.rand(4, 4, dtype=D) * 4 - 2, perturbation_size=1.0)
    out = form(x)
    assert out.norm_size < 40 and (out.perturbation_size <= 3 + 1e-9 or form is divided)
    traced = normed(thunder.jit(form, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(traced.norm_size, out.norm_size)
    torch.testing.assert_close(traced.perturbation_size, out.perturbation_size)
    with norm_mode("typical"):
        assert form(x).norm_size < 40


def test_a_trace_finds_out_what_its_weights_add_up_to():
    def f(x, mask):
        return torch.log((torch.exp(x) * mask.to(D)).sum(-1))

    x = LinfTensor(2.0, backing=torch.rand(3, 4, dtype=D), perturbation_size=1.0)
    mask = torch.tensor([[True, False, True, True], [True] * 4, [False, False, False, True]])
    traced = normed(thunder.jit(f, transforms=[NormTransform()]))
    torch.testing.assert_close(traced(x, mask).norm_size, f(x, mask).norm_size)
    assert f(x, mask).norm_size.item() == pytest.approx(2 + math.log(4))
    mask[0] = False
    assert traced(x, mask).norm_size == math.inf


@pytest.mark.parametrize(
    "weights",
    [torch.tensor([1.0, -0.5, 1.0]), torch.zeros(3), torch.nn.Parameter(torch.ones(3))],
    ids=["negative", "zero", "parameter"],
)
def test_weights_that_say_nothing_are_refused_as_ever(weights):
    x = LinfTensor(1.0, backing=torch.rand(2, 3))
    with pytest.raises(ThunderNormError, match="log"):
        torch.log((torch.exp(x) * weights).sum(-1))


def test_a_supervised_contrastive_loss_has_a_bound():
    labels = torch.tensor([0, 0, 1, 1, 0])

    def loss(x):
        z = F.normalize(x, dim=-1)
        similarity = z @ z.T / 0.1
        similarity = similarity - similarity.max(1, keepdim=True).values.detach()
        others = 1 - torch.eye(5, dtype=D)
        positive = (labels[:, None] == labels).to(D) * others
        score = similarity - torch.log((torch.exp(similarity) * others).sum(1, keepdim=True))
        return -((positive * score).sum(1) / positive.sum(1)).mean()

    x = RMSTensor.of(torch.randn(5, 3, dtype=D, generator=torch.Generator().manual_seed(seeded(0))))
    out = loss(x)
    torch.testing.assert_close(out.backing, loss(x.backing))
    assert out.backing.abs() <= out.norm_size < 1e3
