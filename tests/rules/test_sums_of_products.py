"""Sums of products, quotients by exponentials, what is masked, functions of what stays inside their domain: rules for programs as written."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, norm_report, norm_sensitivity, sensitivities
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import JumpError, NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
LATER = torch.ones(3, 3, dtype=torch.bool).triu(1)


def x(*shape, n=0.7, kind=RMSTensor, dims=None, name="x"):
    return Ball(name, kind, shape, n, dims)


def y(*shape, n=1.5, kind=RMSTensor, dims=None):
    return x(*shape, n=n, kind=kind, dims=dims, name="y")


def gamma_of(f):
    return lambda a: f(F.relu(a) + 0.5)


CASES = [
    Case("inner product", lambda a, b: (a * b).sum(-1), (x(2, 4), y(2, 4)), 0.99, FEW),
    Case("of one with many", lambda a, b: (a[:, None] * b).sum(2, keepdim=True), (x(2, 4), y(2, 3, 4)), 0.99, FEW),
    Case("over all", lambda a, b: (a * b).sum(), (x(2, 3), y(2, 3, dims=(-2, -1))), 0.0, FEW),
    Case("weighted values", lambda a, b: (a.softmax(-1)[..., None] * b).sum(1), (x(2, 3, kind=LinfTensor), y(2, 3, 4)), 0.0, FEW),
    Case("of three", lambda a, b, c: (a * b * c).sum(-1), (x(2, 4), y(2, 4), Ball("c", LinfTensor, (2, 4), 0.8, ())), 0.99, FEW),
    Case(
        "of three, each of its own shape",
        lambda a, b, c: (c * (a[:, None] * b[None])).sum(-1),
        (x(2, 4), y(3, 4), Ball("c", RMSTensor, (2, 3, 4), 0.8, (-1,))),
        0.0,
        FEW,
    ),
    Case(
        "weighted values and gates",
        lambda a, b, c: (a.softmax(-1)[..., None] * b * torch.sigmoid(c)).sum(1),
        (x(2, 3, kind=LinfTensor), y(2, 3, 4), Ball("c", RMSTensor, (2, 3, 4), 0.8, (-1,))),
        0.0,
        FEW,
    ),
    Case("by an exponential", lambda a, b: a / b.exp(), (x(2, 3), y(2, 3, kind=LinfTensor)), 0.99, FEW),
    Case("by an exponential of RMS", lambda a, b: a / b.exp(), (x(2, 3), y(2, 3)), 0.0, FEW),
    Case("one over an exponential", lambda a: 2 / a.exp(), (x(2, 3, kind=LinfTensor),), 0.99, FEW),
    Case("log exp", lambda a: a.exp().log(), (x(2, 3),), 0.99, FEW),
    Case("a growing power", lambda a, b: a.abs() ** (1 + F.softplus(b)), (x(2, 3), y(2, 3, kind=LinfTensor)), 0.0, FEW),
    Case("float_power", lambda a: torch.float_power(a.abs() + 0.5, 0.3), (x(2, 3),), 0.0, FEW),
    Case("an inverse, by float_power", lambda a: torch.float_power(a.abs() + 0.5, -1), (x(2, 3),), 0.0, FEW),
    Case(
        "of two, by float_power", lambda a, b: torch.float_power(a.abs() + 0.5, b), (x(2, 3), y(2, 3, kind=LinfTensor)), 0.0, FEW
    ),
    Case(
        "a growing float_power",
        lambda a, b: torch.float_power(a.abs(), 1 + b.square()),
        (x(2, 3), y(2, 3, kind=LinfTensor)),
        0.0,
        FEW,
    ),
    Case("arccosine inside", lambda a: a.clamp(-0.8, 0.8).acos(), (x(2, 3),), 0.0, FEW),
    Case("arcsine inside", lambda a: a.clamp(-0.8, 0.8).asin(), (x(2, 3),), 0.0, FEW),
    Case("log gamma", gamma_of(torch.lgamma), (x(2, 3, n=3.0),), 0.0, FEW),
    Case("digamma", gamma_of(torch.digamma), (x(2, 3, n=3.0),), 0.0, FEW),
    Case("exp of masked", lambda a: a.masked_fill(LATER, -math.inf).exp(), (x(3, 3),), 0.0, FEW),
    Case("largest of masked", lambda a: a.masked_fill(LATER, -math.inf).amax(-1), (x(3, 3),), 0.0, FEW),
    Case(
        "loss of masked",
        lambda a: F.cross_entropy(a.masked_fill(LATER, -math.inf), torch.tensor([0, 1, 0])),
        (x(3, 3, kind=LinfTensor),),
        0.0,
        FEW,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_sound_and_as_tight_as_said(case):
    case.check()


def test_a_masked_label_makes_a_loss_infinite_in_traces_too():
    logits, mask = torch.zeros(2, 3), torch.eye(2, 3, dtype=torch.bool)
    jf = thunder.jit(lambda t, y: F.cross_entropy(t.masked_fill(mask, -math.inf), y), transforms=[NormTransform()])
    for labels, is_finite in ((torch.tensor([1, 2]), True), (torch.tensor([0, 2]), False)):
        assert jf(LinfTensor.of(logits), labels).norm_size.isfinite().item() is is_finite


def test_sums_of_products_have_the_norms_of_matrix_products():
    torch.manual_seed(seeded(0))
    q, k = (RMSTensor(n, backing=torch.randn(2, 3, 8), perturbation_size=0.1) for n in (0.7, 1.5))
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            found, expected = (q * k).sum(-1), torch.einsum("btd,btd->bt", q, k)
        assert found.norm_size.item() == pytest.approx(expected.norm_size.item())
        assert found.perturbation_size.item() == pytest.approx(expected.perturbation_size.item())


def moved(f, n: float, kind=RMSTensor, shape=(4, 4)):
    a = kind(n, backing=torch.eye(*shape, dtype=D), perturbation_size=torch.tensor(1.0, requires_grad=True))
    out = f(a)
    return out.norm_size.item(), sensitivities(out, a).item()


def test_rounding_moves_as_far_as_its_input_in_mode_typical_and_jumps_in_bounds():
    for f, slope in (
        (torch.round, 1.0),
        (torch.floor, 1.0),
        (lambda t: torch.fake_quantize_per_tensor_affine(t, 0.5, 0, -8, 7), 1.0),
        (torch.sign, 1 / 3),
        (lambda t: t + (t.sign() - t).detach(), 1 / 3 + 2),
    ):
        with norm_mode("typical"):
            assert moved(f, 3.0)[1] == pytest.approx(slope)
        with pytest.raises(JumpError):
            moved(f, 3.0)


def test_typical_determinants_are_those_of_multiples_of_orthogonal_matrices():
    q = torch.linalg.qr(torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(seeded(0))))[0]
    with norm_mode("typical"):
        size, slope = moved(lambda w: torch.slogdet(w)[1], 3.0, RMSToRMSTensor)
    assert size == pytest.approx(math.hypot(torch.slogdet(3 * q)[1].item(), 2.0))
    # d log |det W| along W itself, of operator norm 3
    w = (3 * q).requires_grad_()
    (gradient,) = torch.autograd.grad(torch.slogdet(w)[1], w)
    assert slope == pytest.approx((gradient * q).sum().item())
    with norm_mode("typical"):
        assert moved(lambda w: torch.logdet(w.expand(2, 4, 4)), 3.0, RMSToRMSTensor) == (size, slope)
    with pytest.raises(NormMismatchError):
        moved(lambda w: torch.slogdet(w)[1], 3.0, RMSToRMSTensor)


def test_a_determinant_has_a_report_at_the_data():
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.eye(3) + 0.1), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x @ self.weight, self.scale.sum() + torch.slogdet(self.weight)[1] + x.sum(-1)

    flow = Flow()
    report = norm_report(thunder.jit(flow, transforms=[NormTransform()]), torch.ones(2, 3))
    (expected,) = torch.autograd.grad(torch.slogdet(flow.weight)[1], flow.weight)
    row = report.parameters["weight"]
    moved_by_product = math.sqrt(3)  # of x, for a change that is RMS over each row
    assert row.sensitivity >= torch.linalg.matrix_norm(expected).item() > moved_by_product / 10 and math.isfinite(row.sensitivity)


def test_decays_that_parameters_make_are_at_most_one():
    """``exp(-exp(a) + i b)`` of parameters, as state space models write it, over many steps."""

    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.phase, self.inward = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4)), nn.Linear(3, 4)

        def forward(self, x):
            step = torch.exp(torch.complex(-torch.exp(self.decay), self.phase))
            h = torch.zeros(4, dtype=torch.complex64)
            for t in range(x.shape[0]):
                h = step * h + self.inward(x[t])
            return h.real

    targets = {n: min(ModularNorm(Recurrence(), torch.randn(n, 3), mode="typical").targets.values()) for n in (4, 16)}
    assert 0 < targets[4] / targets[16] < 40  # n steps, and n decays before each: no power of n


def test_what_is_multiplied_by_a_mask_in_place_stands_for_the_parameter():
    class Masked(nn.Linear):
        def forward(self, x):
            self.weight.data *= torch.ones(4, 4).tril()
            return super().forward(x)

    torch.manual_seed(seeded(0))
    module, given = Masked(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        expected = nn.Linear.forward(module, given) - F.linear(given, module.weight.triu(1))
    assert all(t > 0 for t in ModularNorm(module, given).targets.values())
    row = norm_report(thunder.jit(module, transforms=[NormTransform()]), given).rows[-1]
    assert row.actual == pytest.approx(RMSTensor.of(expected).norm_size.item(), rel=1e-5)


def test_a_mask_of_minus_infinity_leaves_what_is_exponentiated_as_it_was():
    a = RMSTensor(1.3, backing=torch.zeros(3, 3), perturbation_size=1.0)
    with norm_mode("typical"):
        masked, plain = a.masked_fill(LATER, -math.inf).exp(), a.exp()
    assert masked.norm_size.item() == plain.norm_size.item() and masked.perturbation_size.item() == plain.perturbation_size.item()
    everything = torch.ones(3, 3, dtype=torch.bool)
    assert a.masked_fill(everything, -math.inf).amax(-1).norm_size == math.inf
    with norm_sensitivity("local"):
        assert math.isfinite(a.masked_fill(LATER, -math.inf).exp().norm_size)


def test_decays_over_a_chunk_are_no_masks():
    """In mode typical, exponentials of sums of decays: the longer the chunk the less they move, for chunks as models have them."""
    moved = []
    for n in (16, 64, 256):
        with norm_mode("typical"):
            decay = F.softplus(RMSTensor(1.0, backing=torch.randn(1, n, 4), perturbation_size=1.0)).cumsum(-2).neg().exp()
        moved.append(decay.perturbation_size.item() / n)
    assert moved[2] <= moved[1] <= moved[0]
