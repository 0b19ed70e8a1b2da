"""Straight-through estimators: norms of the values that are there, whatever the terms are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, norm_mode, normed, with_perturbation
from thunder_norm.audit import Ball, Case
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

# z, q -> q
SPELLINGS = {
    "difference detached": lambda z, q: z + (q - z).detach(),
    "difference detached, first": lambda z, q: (q - z).detach() + z,
    "subtracted detached": lambda z, q: q - z.detach() + z,
    "added detached": lambda z, q: q - z + z.detach(),
    "all detached but one": lambda z, q: q.detach() - z.detach() + z,
    "in place": lambda z, q: (q - z.detach()).add_(z),
    "data": lambda z, q: (q - z).data + z,
    "no_grad": lambda z, q: z + _without_gradient(q, z),
}


def _without_gradient(q, z):
    with torch.no_grad():
        return q - z


@pytest.fixture
def pair():
    torch.manual_seed(seeded(0))
    return torch.randn(3, 8), 0.01 * torch.randn(3, 8)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_norm_is_that_of_what_is_there(spelling, size, pair):
    """In float32: where z is large, what rounding leaves of it is in the norm."""
    z, q = size * pair[0], pair[1]
    run = SPELLINGS[spelling]
    found = run(RMSTensor.of(z), RMSTensor.of(q))
    assert actual_norm(found) <= found.norm_size
    assert found.norm_size <= RMSTensor.of(q).norm_size * (1 + 1e-6) + 4e-7 * RMSTensor.of(z).norm_size
    traced = normed(thunder.jit(run, transforms=[NormTransform()]))(RMSTensor.of(z), RMSTensor.of(q))
    torch.testing.assert_close(traced.norm_size, found.norm_size)
    assert actual_norm(traced) <= traced.norm_size


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_result_moves_with_what_has_the_gradient(spelling, pair):
    """The values move with q, and z has the gradient: both count."""
    z, q = map(RMSTensor.of, pair)
    run = SPELLINGS[spelling]
    if spelling not in ("added detached", "no_grad"):
        assert run(with_perturbation(z, 0.1), q).perturbation_size >= 0.1
    assert run(z, with_perturbation(q, 0.1)).perturbation_size >= 0.1


@pytest.mark.parametrize(
    "other",
    [
        lambda z, q: (lambda y: (q - y).detach() + y.neg_())(z * 1.0),
        lambda z, q: (q - z).detach() + z * 1.5,
        lambda z, q: (q - z).detach() - z,
        lambda z, q: torch.add(q - z, z, alpha=-1),
        lambda z, q: torch.sub(q, z, alpha=2) + z,
        lambda z, q: (q - z)[:1] + z,
        lambda z, q: (q - z).flip(0).detach() + z,
        lambda z, q: (q - z).detach().mul_(-1) + z,
        lambda z, q: z - (z.detach() + 1),
    ],
)
def test_other_sums_are_not_taken_for_one(other, pair):
    found = other(RMSTensor.of(pair[0].clone()), RMSTensor.of(pair[1]))
    assert actual_norm(found) <= found.norm_size * (1 + 1e-6)


def hard_softmax(x):
    soft = x.softmax(-1)
    hard = torch.zeros_like(x).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_one_hot_entries_are_between_0_and_1(mode):
    """So groups may be divided by how many are in them (GroupViT)."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seeded(0)))
    with norm_mode(mode):
        y = hard_softmax(RMSTensor.of(x))
        means = y / (y.sum(0, keepdim=True) + 1)
    assert -1e-5 < y._range.low <= 0 and 1 <= y._range.high < 1 + 1e-5
    torch.testing.assert_close(means.backing, (lambda h: h / (h.sum(0) + 1))(hard_softmax(x)))
    if mode == "bound":
        assert actual_norm(means) <= means.norm_size <= 10


class Quantized(nn.Module):
    """Codes at the ends: what comes after them has the codes' norm, however large the encoder's is."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(6, 4), nn.Embedding(8, 4), nn.Linear(4, 2)
        self.scale = scale

    def forward(self, x):
        z = self.scale * self.first(x)
        q = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        return F.gelu(self.last(z + (q - z).detach()))


def test_a_quantized_encoder_has_targets_and_its_scale_no_part_in_the_norm():
    torch.manual_seed(seeded(0))
    x = torch.randn(5, 6)
    norms = []
    for scale in (1.0, 1000.0):
        model = Quantized(scale)
        norm = ModularNorm(model, x, mode="typical")
        assert not norm.unreached and min(norm.targets.values()) > 1e-6
        with torch.no_grad():
            model.codes.weight.copy_(F.normalize(torch.randn(8, 4), dim=-1) * 2)
            model.last.weight.copy_(torch.eye(2, 4))
            model.last.bias.zero_()
            norms.append(model(RMSTensor.of(x)).norm_size.item())
            assert actual_norm(model(RMSTensor.of(x))) <= norms[-1] * (1 + 1e-5)
    assert norms[1] < norms[0] * 1.01


def test_a_rounded_entry_is_no_larger_than_it_rounds_to():
    x = torch.linspace(-2.4, 2.4, 9)
    found = (lambda x: x + (x.round() - x).detach())(LinfTensor(2.4, backing=x))
    assert actual_norm(found) <= found.norm_size <= 2.9 * (1 + 1e-6)


Z, Q = Ball("z", RMSTensor, (2, 4), 3.0), Ball("q", RMSTensor, (2, 4), 0.3)
FIXED = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
# the value is attained, and of the movements that of q: z moves nothing
CASES = [
    Case("a difference detached", SPELLINGS["difference detached"], (Z, Q), 0.0),
    Case("a constant", lambda z: FIXED.to(z.dtype) - z.detach() + z, (Z,), 0.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_values_exceed_what_is_said(case):
    assert case.check(seeded()).value > 0.99


class OneStep(nn.Module):
    """A parameter after a step along its gradient (MAML), which is a difference of tensors that have no norms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        gradient = torch.func.grad(lambda w: F.linear(x, w).square().mean())(self.weight)
        return F.linear(x, self.weight - 0.1 * gradient)


def test_a_parameter_less_its_gradient_has_a_norm():
    torch.manual_seed(seeded(0))
    module, x = OneStep(), torch.randn(5, 8)
    y = normed(thunder.jit(module, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(y.backing, module(x))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
