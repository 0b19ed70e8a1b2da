"""Einsum of more than two tensors, and between which numbers the entries of a product of any layout are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, normed, rules  # noqa: F401
from thunder_norm.audit import Ball, Case
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


def x(*shape, name="x", kind=LinfTensor):
    return Ball(name, kind, shape, 1.3)


FEW = {"restarts": 2, "steps": 10, "seed": seeded()}
EQUATIONS = {
    "bld,bln,bld->bldn": ((2, 3, 2), (2, 3, 2), (2, 3, 2)),
    "bd,de,be->b": ((2, 3), (3, 2), (2, 2)),
    "...nd,...de,...n->...ne": ((2, 3, 2), (2, 2, 2), (2, 3)),
    "a,b,c,a->abc": ((2,), (3,), (2,), (2,)),
    "ij,jk,k": ((2, 3), (3, 2), (2,)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_of_many_hold(equation):
    balls = [x(*shape, name=name) for shape, name in zip(EQUATIONS[equation], "abcd", strict=False)]
    Case(equation, lambda *t: torch.einsum(equation, *t), balls, tight=0.0).check(seeded())


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_of_many_are_torchs(equation):
    torch.manual_seed(seeded(0))
    given = [torch.randn(shape, dtype=torch.float64) for shape in EQUATIONS[equation]]
    want = torch.einsum(equation, *given)
    for operands in ([RMSTensor.of(given[0]), *given[1:]], [*given[:-1], RMSTensor.of(given[-1])]):
        torch.testing.assert_close(torch.einsum(equation, *operands).backing, want)
        torch.testing.assert_close(torch.einsum(equation, operands).backing, want)
    traced = thunder.jit(lambda *t: torch.einsum(equation, *t), transforms=[NormTransform()])
    torch.testing.assert_close(traced(*map(RMSTensor.of, given)).backing, want)


def test_ranges_of_sums_of_products_hold():
    torch.manual_seed(seeded(0))
    a, b = (RMSTensor.of(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
    for equation in ("ik,jk->ij", "ij,kl->ijkl", "ij,ij->", "ij,kl->ik", "ij,ij->ij"):
        product = torch.einsum(equation, a.sigmoid(), b.tanh().add(0.5))
        count = {"ik,jk->ij": 4, "ij,kl->ijkl": 1, "ij,ij->": 12, "ij,kl->ik": 16, "ij,ij->ij": 1}[equation]
        found = product._range
        assert found is not None and (found.low, found.high) == pytest.approx((-0.5 * count, 1.5 * count))
        assert found.low <= product.backing.min() and product.backing.max() <= found.high
    assert torch.einsum("ij->i", a.sigmoid())._range.high == pytest.approx(4.0)
    assert torch.einsum("ij,kl->ik", a.sigmoid(), b)._range is None


class Scan(nn.Module):
    """The recurrence of a state space model whose decays, ``exp(dt A)`` with A < 0, and drives are made by einsum."""

    def __init__(self):
        super().__init__()
        self.dt, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.a_log = nn.Parameter(torch.arange(1.0, 4.0).log().repeat(4, 1))

    def forward(self, x):
        dt, b = nn.functional.softplus(self.dt(x)), self.b(x)
        decay = torch.exp(torch.einsum("bld,dn->bldn", dt, -torch.exp(self.a_log)))
        drive = torch.einsum("bld,bln,bld->bldn", dt, b, x)
        h = torch.zeros_like(drive[:, 0])
        for i in range(x.shape[1]):
            h = decay[:, i] * h + drive[:, i]
        return h


def test_decays_by_einsum_do_not_grow():
    torch.manual_seed(seeded(0))
    model, given = Scan(), torch.randn(2, 5, 4)
    with torch.no_grad():
        y = normed(thunder.jit(model, transforms=[NormTransform()]))(given)
    torch.testing.assert_close(y.backing, model(given))
    assert y.backing.square().mean(y.elem_dims).sqrt().max() <= y.norm_size < 1e6
    assert min(ModularNorm(model, given, mode="typical").targets.values()) > 1e-4
