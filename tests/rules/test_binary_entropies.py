"""Binary cross entropies of probabilities and of labels that have norms: bounds against adversarial inputs, and the fused loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, normed
from thunder_norm.audit import Ball, Case, Witness
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
bits = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]], dtype=D)
weights = torch.tensor([[0.5, 2.0, 1.0, 1.0], [1.0, 1.0, 3.0, 0.1]], dtype=D)
REDUCTIONS = ("mean", "sum", "none")
wrong = 1.5 * (1 - 2 * bits)
AGAINST = {"witnesses": [[wrong]]}
# just inside of where a clamp to 0.1 and 0.9 ends the probability is smallest, and the loss steepest
INSIDE = {"witnesses": [[wrong], Witness([0.5 + (wrong / 1.5) * (0.4 - 1e-6)], [wrong])]}


def x(kind=RMSTensor, n=1.5):
    return Ball("x", kind, (2, 4), n)


def labels(kind=RMSTensor, n=0.6):
    return Ball("y", kind, (2, 4), n)


def cases(name, loss, *balls, tight=0.99, options=None):
    return [
        Case(f"{name}, {r}", lambda *a, reduction=r: loss(*a, reduction=reduction), balls, tight, options or {})
        for r in REDUCTIONS
    ]


BCE, WITH_LOGITS = F.binary_cross_entropy, F.binary_cross_entropy_with_logits
TOGETHER = {"witnesses": [[1.5 * torch.ones(2, 4, dtype=D), -0.6 * torch.ones(2, 4, dtype=D)]]}
WEIGHTED = torch.full((2, 4), 2.0, dtype=D)
CASES = [
    *cases("sigmoid", lambda a, **o: BCE(torch.sigmoid(a), bits, **o), x(LinfTensor), options=AGAINST),
    *cases("sigmoid, RMS", lambda a, **o: BCE(torch.sigmoid(a), bits, **o), x(), options=AGAINST),
    *cases("one minus sigmoid", lambda a, **o: BCE(1 - torch.sigmoid(2 * a), 1 - bits, **o), x(LinfTensor), options=AGAINST),
    *cases("in another shape", lambda a, **o: BCE(torch.sigmoid(a).flatten(), bits.flatten(), **o), x(LinfTensor), options=AGAINST),
    *cases("weights", lambda a, **o: BCE(torch.sigmoid(a), bits, weights, **o), x(LinfTensor), tight=0.3, options=AGAINST),
    *cases("kept away", lambda a, **o: BCE(torch.tanh(a) * 0.4 + 0.5, bits, **o), x(LinfTensor), tight=0.2, options=AGAINST),
    *cases("clamped", lambda a, **o: BCE(torch.clamp(a, 0.1, 0.9), bits, **o), x(LinfTensor), tight=0.8, options=INSIDE),
    *cases("labels", WITH_LOGITS, x(LinfTensor), labels(LinfTensor), tight=0.98, options=TOGETHER),
    *cases("labels, RMS", WITH_LOGITS, x(), labels(), tight=0.6, options=TOGETHER),
    *cases("labels, weights", lambda a, y, **o: WITH_LOGITS(a, y, WEIGHTED, **o), x(LinfTensor), labels(LinfTensor), tight=0.98, options=TOGETHER),
    *cases(
        "labels, positive weights", lambda a, y, **o: WITH_LOGITS(a, y, pos_weight=WEIGHTED, **o), x(LinfTensor), labels(LinfTensor), tight=0.4, options=TOGETHER
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


@pytest.mark.parametrize(
    "shaped", [lambda p: p, lambda p: p.squeeze(-1), lambda p: p.view(-1), lambda p: p[:, 0], lambda p: p.t()]
)
@pytest.mark.parametrize("has_normed_labels", [False, True])
def test_a_sigmoid_before_the_loss_has_the_bound_of_the_fused_loss(shaped, has_normed_labels):
    torch.manual_seed(seeded(0))
    logits, y = torch.randn(5, 1), torch.randint(0, 2, (5, 1)).float()

    def separate(a, y):
        return BCE(shaped(torch.sigmoid(a)), shaped(y))

    def fused(a, y):
        return WITH_LOGITS(shaped(a), shaped(y))

    given = RMSTensor.of(logits)
    given.perturbation_size = torch.tensor(0.1, dtype=D)
    y = RMSTensor.of(y) if has_normed_labels else y
    expected = fused(given, y)
    for found in (separate(given, y), thunder.jit(separate, transforms=[NormTransform()])(given, y)):
        torch.testing.assert_close(found.backing, expected.backing)
        torch.testing.assert_close(found.norm_size, expected.norm_size)
        torch.testing.assert_close(found.perturbation_size, expected.perturbation_size)


def test_probabilities_of_which_nothing_is_known_are_refused():
    for y in (bits, RMSTensor.of(bits)):
        with pytest.raises(NormMismatchError, match="unbounded at 0 and 1"):
            BCE(LinfTensor(1.0, backing=bits), y)


def test_labels_that_torch_takes_are_within_the_bound():
    """Where labels have norms no search goes: outside [0, 1] torch refuses them."""
    generator = torch.Generator().manual_seed(seeded(0))

    def loss(a, y):
        return BCE(torch.tanh(a) * 0.4 + 0.5, y)

    closest = 0.0
    for _ in range(200):
        a = torch.randn(6, generator=generator, dtype=D).sign() * torch.rand(6, generator=generator, dtype=D).sqrt()
        y = torch.rand(6, generator=generator, dtype=D).round()
        for moved in range(2):
            given = [LinfTensor(1.0, backing=t, perturbation_size=float(i == moved)) for i, t in enumerate((a, y))]
            found = loss(*given)
            slope = torch.func.grad(loss, argnums=moved)(a, y).abs().sum()  # to the largest entry of a move
            assert loss(a, y) <= found.norm_size and slope <= found.perturbation_size
            closest = max(closest, (loss(a, y) / found.norm_size).item(), (slope / found.perturbation_size).item())
    assert closest > 0.3


class Classifier(nn.Module):
    """As tutorials have it: probabilities, and the loss of them in the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        self.loss = nn.BCELoss()

    def forward(self, x, y):
        return self.loss(self.layers(x).squeeze(1), y)


def test_a_classifier_with_its_loss():
    torch.manual_seed(seeded(0))
    model, x, y = Classifier(), torch.randn(6, 4), torch.randint(0, 2, (6,)).float()
    out = normed(thunder.jit(model, transforms=[NormTransform()]))(x, y)
    torch.testing.assert_close(out.backing, model(x, y))
    assert out.backing <= out.norm_size
    for mode in ("bound", "typical", "modula"):
        norm = ModularNorm(model, x, y, mode=mode)
        assert not norm.unreached and all(t > 1e-3 for name, t in norm.targets.items() if norm.masses[name] > 0)
