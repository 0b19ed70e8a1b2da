"""Signs times what is 0 where they jump: how far such functions move, beside differences of eager PyTorch's results."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, norm_sensitivity, normed, sensitivities, with_perturbation
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import JumpError, NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64


def soft_threshold(x):
    return torch.sign(x) * F.relu(x.abs() - 0.3)


def soft_threshold_clamped(x):
    return torch.clamp(torch.abs(x) - 0.3, min=0) * x.sign()


def soft_threshold_by_maximum(x):
    return x.sgn() * torch.maximum(x.abs() - 0.3, torch.zeros_like(x))


def soft_threshold_in_place(x):
    return x.sign().mul_((x.abs() - 0.3).relu_())


def symlog(x):
    return torch.sign(x) * torch.log1p(x.abs())


def symexp(x):
    return torch.sign(x) * (torch.exp(x.abs()) - 1)


def rescaled(x):
    """Of returns, by Pohlen et al."""
    return torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + 0.001 * x


def rescaled_back(x):
    """Its inverse, as Schrittwieser et al. write it: 0 at 0 but for rounding."""
    return torch.sign(x) * (((torch.sqrt(1 + 0.004 * (x.abs() + 1 + 0.001)) - 1) / 0.002) ** 2 - 1)


def power(x):
    return x.sign() * x.abs() ** 1.5


def with_sign(x):
    return torch.copysign(torch.log1p(x.abs()), x)


# and how steep they are, of entries up to 1
FUNCTIONS = {
    soft_threshold: 1.0, soft_threshold_clamped: 1.0, soft_threshold_by_maximum: 1.0, soft_threshold_in_place: 1.0, symlog: 1.0,
    symexp: math.e, rescaled: 0.501, power: 1.5, with_sign: 1.0,
}  # fmt: skip
SHRINKING = [f for f in FUNCTIONS if f.__name__.startswith("soft")]
AUDITED = [Case(f.__name__, f, (Ball("x", LinfTensor, (2, 4)),)) for f in (soft_threshold, symlog, rescaled, with_sign)]


def quotients(f, n: float) -> torch.Tensor:
    """How far results move, in units of what moves, between neighbours and between points with 0 in between, of entries up to n."""
    g = torch.Generator().manual_seed(seeded(0))
    a = (2 * torch.rand(20000, generator=g, dtype=D) - 1) * n
    scales = torch.tensor([1e-6, 1e-3, 0.1, 2.0], dtype=D)[torch.randint(4, (20000,), generator=g)] * n
    b = (a + scales * torch.randn(20000, generator=g, dtype=D)).clamp(-n, n)
    return ((f(a) - f(b)).abs() / (a - b).abs())[a != b]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sensitivity", ["global", "composed", "local"])
def test_functions_that_keep_the_sign_move_as_those_of_the_modulus(f, sensitivity):
    torch.manual_seed(seeded(1))
    backing = 2 * torch.rand(3, 8, dtype=D) - 1
    if sensitivity != "local" or f in SHRINKING:
        backing[0, 0] = 0.0  # at the jump
    with norm_sensitivity(sensitivity):
        x = with_perturbation(LinfTensor(1.0, backing=backing))
        found = sensitivities(f(x), x).item()
    assert found <= FUNCTIONS[f] * (1 + 1e-6)
    if sensitivity == "local":
        slope = torch.autograd.functional.jacobian(f, backing)
        assert found >= slope.abs().max().item() * (1 - 1e-9)
    else:
        assert found >= quotients(f, 1.0).max().item() * (1 - 1e-6)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_they_move_within_a_radius_across_the_jump(f):
    torch.manual_seed(seeded(2))
    data = 0.2 * torch.randn(5, 4, dtype=D)
    with norm_sensitivity("within"):
        x = with_perturbation(LinfTensor(2.0, backing=data), 0.5)
        found = f(x).perturbation_size.item()
    near = data + 0.5 * (2 * torch.rand(4000, 5, 4, dtype=D) - 1)
    assert 0.5 * FUNCTIONS[f] * 2 > found >= (f(near) - f(data)).abs().max().item() * (1 - 1e-6)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_traced_they_move_as_in_eager_mode(f):
    x = with_perturbation(RMSTensor(1.0, backing=torch.randn(3, 8, generator=torch.Generator().manual_seed(seeded(3)))))
    expected = f(x)
    found = normed(thunder.jit(f, transforms=[NormTransform()]))(x)
    torch.testing.assert_close(found.norm_size, expected.norm_size)
    torch.testing.assert_close(found.perturbation_size, expected.perturbation_size)
    torch.testing.assert_close(sensitivities(found, x), sensitivities(expected, x))


def test_thresholds_move_them_too():
    """A threshold that is made positive, of which each of 8 entries has its own: as eager's differences say."""
    g = torch.Generator().manual_seed(seeded(4))

    def f(x, t):
        return torch.sign(x) * F.relu(x.abs() - F.softplus(t))

    x, t = (with_perturbation(LinfTensor(1.0, backing=torch.zeros(8, dtype=D))) for _ in range(2))
    by_x, by_t = (s.item() for s in sensitivities(f(x, t), (x, t)))
    a, b, low, high = (2 * torch.rand(4, 20000, generator=g, dtype=D) - 1).unbind()
    moved = (f(a, low) - f(b, high)).abs()
    assert (moved <= (by_x * (a - b).abs() + by_t * (low - high).abs()) * (1 + 1e-9)).all()
    assert by_x == pytest.approx(1.0) and by_t <= 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sign(),
        lambda x: x.sign() + x,
        lambda x: x.sign() * F.relu(x.abs() + 0.3),
        lambda x: x.sign() * (x.abs() - 0.3),
        lambda x: x.sign() * F.relu(x.roll(1).abs() - 0.3),
        lambda x: x.sign() * x.abs().mean(),
        lambda x: x.sign() * x.abs().flip(0),
        lambda x: x.sign() * (x + 1).abs(),
        lambda x: torch.copysign(x.abs() + 0.1, x),
        lambda x: x.sign() * x.abs().add_(1),
        lambda x: (x.sign() + 1) * x.abs(),
    ],
)
def test_what_is_not_0_where_the_sign_changes_jumps(f):
    for sensitivity in ("global", "composed", "within"):
        with norm_sensitivity(sensitivity), pytest.raises(JumpError):
            x = with_perturbation(RMSTensor(1.0, backing=torch.randn(8, dtype=D)), 1.0)
            sensitivities(f(x), x)


def test_a_jump_is_refused_with_its_line():
    def f(x):
        s = torch.sign(x)  # here
        return s * F.relu(x.abs() + 0.3)

    with pytest.raises(JumpError, match=r"(?s)sign jumps.*# here|sign jumps.*test_jumps_made_good"):
        with norm_sensitivity("global"):
            normed(thunder.jit(f, transforms=[NormTransform()]))(with_perturbation(RMSTensor(1.0, backing=torch.randn(8))))


class Shrinkage(nn.Module):
    """LISTA's layers, with thresholds that are not negative, or any."""

    def __init__(self, of):
        super().__init__()
        self.given, self.again = nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.threshold, self.of = nn.Parameter(torch.full((16,), 0.1)), of

    def forward(self, x):
        b = self.given(x)
        z = torch.zeros_like(b)
        for _ in range(3):
            u = b + self.again(z)
            z = torch.sign(u) * F.relu(u.abs() - self.of(self.threshold))
        return z


def test_learned_thresholds_have_targets_if_they_are_not_negative():
    x = torch.randn(4, 8)
    for mode in ("bound", "typical", "modula"):
        norm = ModularNorm(Shrinkage(F.softplus), x, mode=mode, masses={"threshold": 1.0})
        assert not norm.unreached and min(norm.targets.values()) > 1e-4
    with pytest.raises(NormMismatchError, match="jumps"):
        ModularNorm(Shrinkage(lambda t: t), x, mode="bound")
    with norm_mode("typical"):
        assert min(ModularNorm(Shrinkage(lambda t: t), x, mode="typical").targets.values()) > 1e-4
