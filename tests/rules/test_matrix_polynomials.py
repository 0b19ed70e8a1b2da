"""Polynomials of a matrix written out: no larger than the polynomial at the largest singular value says, nor steeper; others as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, with_perturbation
from thunder_norm.audit import Ball, Case, search
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}


def step(x):
    """One of Muon's."""
    a = x @ x.mT
    return 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x


def steps(x, count=5):
    for _ in range(count):
        x = step(x)
    return x


def cubic(x):
    return 1.5 * x - 0.5 * x @ x.transpose(-2, -1) @ x


def from_the_right(x):
    a = torch.matmul(x.mT, x)
    return x * 2 - torch.sub(x @ a, x @ a @ a, alpha=0.3)


def even(x):
    a = x @ x.mT
    return a / 2 - a @ a


def even_turned(x):
    a = x.mT @ x
    return torch.add(a, a @ a, alpha=-0.25)


def turned(x):
    return x.mT + x.mT @ x @ x.mT * 0.1


PROGRAMS = {f.__name__: f for f in (step, cubic, from_the_right, even, even_turned, turned)} | {
    "two steps": lambda x: steps(x, 2), "transposed within": lambda x: step(x.mT).mT, "a normalized one": lambda x: step(x / (x.norm() + 1e-2)),
}  # fmt: skip
BALLS = {
    "rows": Ball("x", RMSTensor, (3, 4), 0.4, None),
    "whole": Ball("x", RMSTensor, (3, 4), 0.3, (-2, -1)),
    "entries": Ball("x", LinfTensor, (4, 3), 0.4, ()),
    "operator": Ball("x", RMSToRMSTensor, (3, 4), 0.9, None),
    "several": Ball("x", RMSTensor, (2, 3, 3), 0.4, (-2, -1)),
}
CASES = [Case(f"{name}, {ball}", call, (BALLS[ball],), 0.0, FEW) for name, call in PROGRAMS.items() for ball in BALLS]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_matrix_exceeds_what_is_claimed(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found


def test_the_bound_is_that_of_the_singular_values():
    """Of orthogonal matrices, all of whose singular values are 1."""
    q = torch.linalg.qr(torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(seeded())))[0]
    x = RMSToRMSTensor(1.0, backing=q, perturbation_size=1.0)
    y = cubic(x)
    assert actual_norm(y).item() == pytest.approx(y.norm_size.item())
    y = even(x)
    assert actual_norm(y).item() == pytest.approx(y.norm_size.item())


def test_five_steps_stay_where_singular_values_do():
    torch.manual_seed(seeded())
    x = torch.randn(6, 6, dtype=D)
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            y = steps(with_perturbation(RMSTensor(1 / 6, backing=x / x.norm(), elem_dims=(-2, -1))))
        torch.testing.assert_close(y.backing, steps(x / x.norm()))
        assert actual_norm(y) <= y.norm_size <= 1.3 * math.sqrt(6) / 6, (
            "the largest modulus of the polynomial of what is below 1.21"
        )
        assert y.perturbation_size < 5**5


OTHERS = {
    "another matrix": lambda x: x + x @ x.flip(0).mT @ x,
    "not by turns": lambda x: x + x @ x,
    "different places": lambda x: x @ x.mT - x.mT @ x,
    "scaled by entries": lambda x: x + (2 * x) @ x.mT @ (x * x.abs()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_polynomial_is_bounded_as_it_is(name):
    found = search(OTHERS[name], (Ball("x", RMSTensor, (3, 3), 0.8, (-2, -1)),), **FEW)
    assert found.is_sound, found


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_matrix_that_was_written_into_is_another(sign):
    x = RMSTensor.of(torch.eye(3, dtype=D), (-2, -1)).clone()
    p = 1.0 * x @ x.mT @ x
    x.mul_(sign)
    y = 3 * x - p
    assert actual_norm(y).item() == pytest.approx((2 if sign > 0 else 4) / math.sqrt(3))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-9)


def test_traced_and_eager_claims_agree():
    torch.manual_seed(seeded())
    x = with_perturbation(RMSTensor.of(torch.randn(4, 4) / 4))
    eager, traced = steps(x), thunder.jit(steps, transforms=[NormTransform()])(x)
    assert torch.allclose(traced.backing, eager.backing, atol=1e-5)
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item(), rel=1e-5)
    assert traced.perturbation_size.item() == pytest.approx(eager.perturbation_size.item(), rel=1e-5)


class Orthogonalized(nn.Module):
    """A layer whose weight is what five steps make of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8) / 8**0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(x @ steps(self.weight / (self.weight.norm() + 1e-7)).T))


def test_targets_do_not_vanish():
    """That of the parameter was 4e-28."""
    torch.manual_seed(seeded())
    targets = ModularNorm(Orthogonalized(), torch.randn(4, 8), mode="typical").targets
    assert min(targets.values()) > 1e-6
