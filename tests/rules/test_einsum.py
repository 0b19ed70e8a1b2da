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


LOW_RANK = {
    "bti,or,ri->bto": ((2, 5, 8), (6, 3), (3, 8)),
    "or,ri,bti->bto": ((6, 3), (3, 8), (2, 5, 8)),
    "bi,ir,rs,os->bo": ((5, 8), (8, 3), (3, 2), (6, 2)),
    "or,rs,bi,is->bo": ((6, 3), (3, 2), (5, 8), (8, 2)),
}


@pytest.mark.parametrize("equation", LOW_RANK)
def test_matrices_among_many_are_operators_whatever_their_places(equation):
    """From the left, each with the next, a product of low rank was an outer product of all rows first."""
    torch.manual_seed(seeded(0))
    sizes = [torch.randn(shape, dtype=torch.float64) for shape in LOW_RANK[equation]]
    given = [RMSTensor.of(t) if "b" in term else t for t, term in zip(sizes, equation.split("->")[0].split(","), strict=True)]
    matrices = [t for t in given if not isinstance(t, RMSTensor)]
    (rows,) = (t for t in given if isinstance(t, RMSTensor))
    y = torch.einsum(equation, *given)
    gain = (8 / 6) ** 0.5 * torch.stack([torch.linalg.matrix_norm(m, 2) for m in matrices]).prod()
    assert torch.allclose(y.backing, torch.einsum(equation, *sizes))
    assert y.elem_dims == (-1,)
    assert y.backing.square().mean(-1).sqrt().max() <= y.norm_size <= rows.norm_size * gain * (1 + 1e-9)


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
