"""Triangular systems with ones on the diagonal: norms against adversarial inputs, sensitivities at the data, torch's values."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, norm_sensitivity
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
SYSTEMS = {
    "lower": {"upper": False, "left": True},
    "upper": {"upper": True, "left": True},
    "lower, from the right": {"upper": False, "left": False},
    "upper, from the right": {"upper": True, "left": False},
}


def matrix(*shape, kind=INF, size=0.7, dims=None):
    return Ball("A", kind, shape, size, dims)


def right_side(*shape, kind=R, size=1.0, dims=None):
    return Ball("B", kind, shape, size, dims)


def solve(**options):
    return lambda a, b: torch.linalg.solve_triangular(a, b, unitriangular=True, **options)


def shape_of(options, rows, columns):
    return (rows, columns) if options["left"] else (columns, rows)


CASES = [
    *(
        Case(name, solve(**o), (matrix(3, 3), right_side(*shape_of(o, 3, 2), dims=(1 - (not o["left"]),))))
        for name, o in SYSTEMS.items()
    ),
    Case("entries", solve(upper=False), (matrix(4, 4), right_side(4, 1, kind=INF))),
    Case("rows", solve(upper=False), (matrix(3, 3), right_side(3, 2, dims=(0,))), tight=0.3),
    Case("of a batch", solve(upper=True), (matrix(2, 3, 3), right_side(2, 3, 2, dims=(0, 2)))),
    Case(
        "one matrix for all",
        solve(upper=False),
        (matrix(3, 3, kind=R, dims=(0, 1)), right_side(2, 3, 2, dims=(0, 1, 2))),
        tight=0.05,
    ),
    Case("one entry", solve(upper=False), (matrix(1, 1), right_side(1, 2))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


def test_the_last_entry_attains_it():
    a, b = LinfTensor.of(torch.full((5, 5), -0.5)), LinfTensor.of(torch.ones(5, 1))
    found = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    assert found.norm_size.item() == pytest.approx(found.backing.abs().max().item())


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=list(SYSTEMS))
@pytest.mark.parametrize("dims", [(-1,), (-2,), (-3,), (-3, -2, -1), ()])
@pytest.mark.parametrize("shape", [(3,), ()])
def test_sensitivity_at_the_data(options, dims, shape):
    """No direction moves the result further than the claim, to first order."""
    torch.manual_seed(seeded(0))
    a, b = torch.randn(*shape, 4, 4).double() * 0.5, torch.randn(3, *shape_of(options, 4, 2)).double()
    kind = RMSTensor if dims else LinfTensor
    kinds = ((LinfTensor, a, ()), (kind, b, dims))
    for i, name in enumerate(("A", "B")):
        given = [k(10.0, perturbation_size=float(j == i), backing=t, elem_dims=d) for j, (k, t, d) in enumerate(kinds)]
        with norm_sensitivity("local"):
            claimed = solve(**options)(*given)
        directions = [torch.randn((60, *t.shape)).double() for t in (a, b)]
        for d in directions[i]:
            unit = d.sign() if name == "A" else d / kind.measure(d, given[1].elem_dims)
            primals = (a, b)
            moved = torch.func.jvp(
                lambda t, i=i, primals=primals: solve(**options)(*(t if j == i else p for j, p in enumerate(primals))),
                (primals[i],),
                (unit,),
            )[1]
            assert type(claimed).measure(moved, claimed.elem_dims) <= claimed.perturbation_size * (1 + 1e-9)


def test_typical_size():
    """Of independent entries, over many of them."""
    torch.manual_seed(seeded(0))
    a, b = torch.randn(400, 16, 16) * 0.3, torch.randn(400, 16, 8)
    with norm_mode("typical"):
        found = solve(upper=False)(RMSTensor.of(a, (-3, -2, -1)), RMSTensor.of(b, (-3, -2, -1)))
    assert found.backing.square().mean().sqrt().item() == pytest.approx(found.norm_size.item(), rel=0.1)


def test_a_diagonal_that_may_be_0_is_refused():
    a = LinfTensor.of(torch.ones(2, 2))
    with pytest.raises(NormMismatchError, match="diagonal"):
        torch.linalg.solve_triangular(a, a, upper=False)
