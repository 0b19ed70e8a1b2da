"""Scatters, index_copy, index_add, index_fill: norms against adversarial inputs, plain tensors in either place."""

from __future__ import annotations

import pytest
import torch

from tests.rules.plain_arguments import check_plain_arguments
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case, norm
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
D = torch.float64
rows, same = torch.tensor([2, 0]), torch.tensor([1, 1, 1])
own = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1]])
onto_one = torch.ones(3, 4, dtype=torch.long)


def x(*shape, dims=None, kind=R):
    return Ball("x", kind, shape, 1.0, dims)


def src(*shape, dims=None, kind=R):
    return Ball("src", kind, shape, 0.6, dims)


CASES = [
    Case("slice_scatter over", lambda a, b: torch.slice_scatter(a, b, 1, 0, 2), (x(3, 4), src(3, 2))),
    Case("slice_scatter beside", lambda a, b: torch.slice_scatter(a, b, 0, 0, 2), (x(3, 4), src(2, 4))),
    Case("select_scatter over", lambda a, b: torch.select_scatter(a, b, 1, 2), (x(3, 4), src(3, dims=()))),
    Case("select_scatter over both", lambda a, b: torch.select_scatter(a, b, 1, 2), (x(3, 4, dims=(0, 1)), src(3))),
    Case("select_scatter beside", lambda a, b: torch.select_scatter(a, b, 0, 2), (x(3, 4), src(4))),
    Case("index_copy beside", lambda a, b: torch.index_copy(a, 0, rows, b), (x(3, 4), src(2, 4))),
    Case("index_copy over", lambda a, b: torch.index_copy(a, 1, rows, b), (x(3, 4), src(3, 2))),
    Case("index_fill beside", lambda a: torch.index_fill(a, 0, rows, 2.0), (x(3, 4),)),
    Case("index_fill over", lambda a: torch.index_fill(a, 1, rows, 2.0), (x(3, 4),)),
    Case("index_add beside", lambda a, b: torch.index_add(a, 0, same, b), (x(3, 4), src(3, 4))),
    Case("index_add over", lambda a, b: torch.index_add(a, 1, same, b, alpha=-2), (x(3, 4), src(3, 3))),
    Case("scatter over", lambda a, b: torch.scatter(a, 1, own, b), (x(3, 4), src(2, 4))),
    # each column picks a row of its own: with m rows and N columns sqrt(min(m, N)), which these indices do not make use of
    Case("scatter beside", lambda a, b: torch.scatter(a, 0, own, b), (x(3, 4), src(2, 4)), 0.7),
    Case("scatter entries", lambda a, b: torch.scatter(a, 0, own, b), (x(3, 4, kind=INF), src(2, 4, kind=INF))),
    # the rule takes every entry to be written, and here 3 of 4 are
    Case("scatter value", lambda a: torch.scatter(a, 0, own, 2.0), (x(3, 4),), 0.85),
    Case("scatter value, entries", lambda a: torch.scatter(a, 0, own, 2.0), (x(3, 4, kind=INF),)),
    Case("scatter_add over", lambda a, b: torch.scatter_add(a, 1, onto_one, b), (x(3, 4), src(3, 4))),
    Case("masked_scatter", lambda a, b: torch.masked_scatter(a, own > 0, b), (x(2, 4, kind=INF), src(2, 4, kind=INF))),
    Case("masked_scatter of RMS", lambda a, b: torch.masked_scatter(a, own > 0, b), (x(2, 4), src(2, 4)), 0.99),
    Case("scatter_add beside", lambda a, b: torch.scatter_add(a, 0, onto_one, b), (x(3, 4), src(3, 4))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_real_values_are_those_of_torch_also_beside_plain_tensors(case):
    check_plain_arguments(case)


def test_a_source_larger_than_the_index():
    """torch has no gradient for it, so no search: one row of all the energy, added onto one."""
    a, b = torch.zeros(3, 4, dtype=D), torch.zeros(3, 6, dtype=D)
    b[0, :4] = 1.0
    out = torch.scatter_add(R.of(a), 0, own, R.of(b))
    assert norm(R, out.backing, out.elem_dims) <= out.norm_size <= 3 * norm(R, out.backing, out.elem_dims)


def test_reductions_are_refused():
    with pytest.raises(NormMismatchError, match="reduce"):
        torch.scatter(R.of(torch.ones(3, 4)), 0, own, R.of(torch.ones(2, 4)), reduce="multiply")
