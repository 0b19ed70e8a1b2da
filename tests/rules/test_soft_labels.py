"""Losses whose labels have norms: mixed labels, and distillation, against adversarial logits, labels and teachers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import L1Tensor, LinfTensor, RMSTensor, normed
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
REDUCTIONS = ("mean", "sum", "none")
class_weights = torch.full((4,), 2.0, dtype=D)
corner = torch.full((2, 4), 1.5, dtype=D)
corner[:, 0] = -1.5
at_corner = torch.zeros(2, 4, dtype=D)
at_corner[:, 0] = 0.8
AGAINST = {"witnesses": [[corner, at_corner]]}


def logits(kind=LinfTensor, n=1.5):
    return Ball("x", kind, (2, 4), n)


def cases(name, loss, *balls, tight, options=None, reductions=REDUCTIONS):
    return [
        Case(f"{name}, {r}", lambda *a, reduction=r: loss(*a, reduction=reduction), balls, tight, options or {})
        for r in reductions
    ]


def distance(x, t, **options):
    return F.kl_div(F.log_softmax(x, -1), F.softmax(t, -1), **options)


def distance_of_channels(x, t, **options):
    return F.kl_div(F.log_softmax(x, 1), F.softmax(t, 1), **options)


LABELS = Ball("y", L1Tensor, (2, 4), 0.8)
IMAGES = Ball("x", LinfTensor, (2, 3, 2), 1.2), Ball("t", LinfTensor, (2, 3, 2), 0.7)
CASES = [
    *cases("labels", F.cross_entropy, logits(), LABELS, tight=0.98, options=AGAINST),
    *cases("labels, RMS", F.cross_entropy, logits(RMSTensor), Ball("y", RMSTensor, (2, 4), 0.4), tight=0.2),
    *cases("weighted labels", lambda x, y, **o: F.cross_entropy(x, y, class_weights, **o), logits(), LABELS, tight=0.98, options=AGAINST),
    *cases("smoothed labels", lambda x, y, **o: F.cross_entropy(x, y, label_smoothing=0.2, **o), logits(), LABELS, tight=0.6, options=AGAINST),
    *cases("images", F.cross_entropy, IMAGES[0], Ball("y", LinfTensor, (2, 3, 2), 0.3), tight=0.3),
    *cases("teacher", distance, logits(), logits(n=0.8), tight=0.0, reductions=("batchmean", *REDUCTIONS)),
    *cases("teacher, alike", distance, logits(n=0.01), logits(n=0.01), tight=0.0, reductions=("batchmean", *REDUCTIONS)),
    *cases("teacher, far", lambda x, t, **o: F.kl_div(x, F.softmax(t, -1), **o), logits(), logits(n=5.0), tight=0.0),
    *cases("teacher of channels", distance_of_channels, *IMAGES, tight=0.0, reductions=("batchmean", *REDUCTIONS)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


def test_labels_of_which_no_more_is_known_than_a_norm_are_refused_by_distances():
    x = torch.randn(2, 4)
    with pytest.raises(NormMismatchError, match="plain"):
        F.kl_div(RMSTensor.of(x), L1Tensor.of(x.abs()))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x, y, share):
        y = share * y + (1 - share) * y.flip(0)
        return F.cross_entropy(self.linear(share * x + (1 - share) * x.flip(0)), y)


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(6, 4).requires_grad_(False), nn.Linear(6, 4)

    def forward(self, x, y):
        with torch.no_grad():
            taught = F.softmax(self.teacher(x) / 2, 1)
        found = self.student(x)
        return 4 * F.kl_div(F.log_softmax(found / 2, 1), taught, reduction="batchmean") + F.cross_entropy(found, y)


def given_labels():
    return torch.randint(0, 4, (5,))


@pytest.mark.parametrize("make", [Mixed, Distilled])
def test_models_with_such_losses(make):
    torch.manual_seed(seeded(0))
    model, x, y = make(), torch.randn(5, 6), given_labels()
    given = (x, F.one_hot(y, 4).float(), torch.tensor(0.3)) if make is Mixed else (x, y)
    found = normed(thunder.jit(model, transforms=[NormTransform()]))(*given)
    torch.testing.assert_close(found.backing, model(*given))
    assert found.backing <= found.norm_size
    for mode in ("bound", "typical", "modula"):
        norm = ModularNorm(model, *given, mode=mode)
        moved = [name for name, p in model.named_parameters() if p.requires_grad and norm.masses[name] > 0]
        assert all(norm.targets[name] > 1e-4 for name in moved)


def test_of_a_single_number():
    """Whose softmax is 1."""
    x = LinfTensor(1.0, backing=torch.tensor(0.3), perturbation_size=0.1)
    found = F.kl_div(x, x.softmax(-1), reduction="sum")
    assert found.norm_size >= F.kl_div(torch.tensor(-1.0), torch.tensor(1.0), reduction="sum")
    torch.testing.assert_close(found.backing, F.kl_div(torch.tensor(0.3), torch.tensor(1.0), reduction="sum"))
