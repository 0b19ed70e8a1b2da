"""Exponentials of complex tensors, whose real parts are followed, and complex numbers beside tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, rules  # noqa: F401
from thunder_norm.audit import Ball, Case
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}


def x(*shape, n=0.7, kind=RMSTensor, dims=None, name="x"):
    return Ball(name, kind, shape, n, dims)


def parts(z):
    return torch.view_as_real(z)


CASES = [
    Case(
        "of real and imaginary parts", lambda a, b: parts(torch.exp(torch.complex(a, b))), (x(2, 3), x(2, 3, name="b")), 0.0, FEW
    ),
    Case("of the largest entry", lambda a: parts(torch.exp(torch.complex(a, 0 * a))), (x(2, 1, kind=LinfTensor),), 0.0, FEW),
    Case("that decays", lambda a, b: parts(torch.exp(torch.complex(-a.exp(), b))), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("by a sum", lambda a, b: parts(torch.exp(-F.softplus(a) + 1j * b)), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case(
        "by steps",
        lambda a, b, s: parts(torch.exp((-a.exp() + 1j * b).unsqueeze(-1) * s.exp() * torch.arange(3))),
        (x(2, 3), x(2, 3, name="b"), x(1, 1, name="s", kind=LinfTensor)),
        0.0,
        FEW,
    ),
    Case("of some", lambda a, b: parts(torch.exp(torch.complex(-a.exp(), b)[0])), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("over what decays", lambda a, b: parts(a / (1j * b - (a.exp() + 0.1))), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case(
        "complex, over it",
        lambda a, b: parts(torch.complex(b, a) / torch.complex(F.softplus(a), b)),
        (x(2, 3), x(2, 3, name="b")),
        0.0,
        FEW,
    ),
    Case(
        "a number over it",
        lambda a, b: parts(torch.true_divide(2.0, torch.complex(a.sigmoid(), b))),
        (x(2, 3), x(2, 3, name="b")),
        0.0,
        FEW,
    ),
    Case(
        "its inverse", lambda a, b: parts(torch.reciprocal(torch.complex(1 + a.exp(), b))), (x(2, 3), x(2, 3, name="b")), 0.0, FEW
    ),
    Case("a number times", lambda a: parts((3 - 4j) * a), (x(2, 3),), 0.9, FEW),
    Case("a number added", lambda a: parts(1j + (a + (0.3 + 0.4j)) - 2j), (x(2, 3),), 0.0, FEW),
    Case("a number less", lambda a: parts((1 + 1j) - a / 2j), (x(2, 3),), 0.0, FEW),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_sound_and_as_tight_as_said(case):
    case.check()


def test_an_exponential_that_decays_is_at_most_one():
    torch.manual_seed(seeded())
    a, b = (RMSTensor(30.0, backing=torch.randn(4, 8, dtype=D)) for _ in range(2))
    z = (-a.exp() + 1j * b).unsqueeze(-1) * torch.arange(5)
    assert torch.exp(z).norm_size.item() == 1.0
    assert torch.exp(z).abs()._range.high == 1.0
    assert (1 - torch.exp(z).abs().square()).sqrt().norm_size.isfinite()
    grows = torch.exp(a.abs() + 1j * b)
    assert grows.norm_size > math.exp(30.0) and grows.abs()._range.low == 1.0


def test_a_decay_that_grows_backwards_is_not_taken_for_one():
    a = RMSTensor(1.0, backing=torch.randn(4, 8, dtype=D))
    z = (-a.exp() + 1j * a).unsqueeze(-1) * (torch.arange(5) - 2)
    found = torch.exp(z)
    assert found.backing.abs().max() > 1 and found.norm_size > 1


def test_typical_size_is_that_of_random_numbers():
    torch.manual_seed(seeded())
    samples = torch.complex(torch.randn(200_000, dtype=D), torch.randn(200_000, dtype=D)) * (0.5 / math.sqrt(2))
    with norm_mode("typical"):
        found = torch.exp(RMSTensor(0.5, backing=samples[:8]))
    assert found.norm_size.item() == pytest.approx(samples.exp().abs().square().mean().sqrt().item(), rel=0.02)


def test_traced_and_eager_claims_agree():
    def decays(a, b):
        return torch.exp((-a.exp() + 1j * b).unsqueeze(-1) * torch.arange(5)).real

    torch.manual_seed(seeded())
    a, b = (RMSTensor.of(torch.randn(4, 8)) for _ in range(2))
    traced = thunder.jit(decays, transforms=[NormTransform()])(a, b)
    assert torch.allclose(traced.backing, decays(a, b).backing, atol=1e-5)
    assert traced.norm_size.item() == pytest.approx(decays(a, b).norm_size.item(), rel=1e-5)
