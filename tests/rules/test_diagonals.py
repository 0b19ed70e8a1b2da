"""Diagonals, blocks and traces: norms against adversarial inputs."""

from __future__ import annotations

import pytest
import torch

from tests.rules.plain_arguments import check_plain_arguments
from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.audit import Ball, Case

R, INF, L1, L2, OP = RMSTensor, LinfTensor, L1Tensor, L2Tensor, RMSToRMSTensor


def x(*shape, dims=None, kind=R, size=1.0, name="x"):
    return Ball(name, kind, shape, size, dims)


def y(*shape, dims=None, kind=R):
    return x(*shape, dims=dims, kind=kind, size=0.6, name="y")


CASES = [
    Case("diag_embed", torch.diag_embed, (x(2, 3),)),
    Case("diag_embed offset", lambda a: torch.diag_embed(a, 1, 0, 2), (x(2, 3),)),
    Case("diag_embed beside", torch.diag_embed, (x(2, 3, dims=(0,)),)),
    Case("diag_embed all", lambda a: torch.diag_embed(a, -1, 1, -1), (x(2, 3, dims=(0, 1)),)),
    Case("diag_embed entries", torch.diag_embed, (x(2, 3, kind=INF),)),
    Case("diag_embed l1", torch.diag_embed, (x(2, 3, kind=L1),)),
    Case("diag_embed l2", torch.diag_embed, (x(2, 3, kind=L2, dims=(0, 1)),)),
    Case("diag of a vector", lambda a: torch.diag(a, 1), (x(3),)),
    Case("diag of a matrix", torch.diag, (x(3, 4),)),
    Case("diagflat", lambda a: torch.diagflat(a, 2), (x(2, 3, dims=(0, 1)),)),
    # rows of RMS n: over everything, which is what is left of them, each may have it
    Case("diagflat rows", torch.diagflat, (x(2, 3),)),
    Case("diagflat entries", torch.diagflat, (x(2, 3, kind=INF),)),
    Case("diagonal_scatter both", torch.diagonal_scatter, (x(3, 4, dims=(0, 1)), y(3))),
    Case("diagonal_scatter rows", torch.diagonal_scatter, (x(3, 4), y(3, kind=INF))),
    Case("diagonal_scatter entries", torch.diagonal_scatter, (x(3, 4, kind=INF), y(3, kind=INF))),
    Case("diagonal_scatter beside", lambda a, b: torch.diagonal_scatter(a, b, 1, 0, 1), (x(3, 4, 2), y(2, 3, dims=(0,)))),
    # RMS over the rows of x is read as RMS over all of it, which src's norm needs
    Case("diagonal_scatter mixed", torch.diagonal_scatter, (x(3, 4), y(3))),
    Case("block_diag rows", torch.block_diag, (x(2, 3), y(1, 2))),
    Case("block_diag columns", torch.block_diag, (x(2, 3, dims=(0,)), y(1, 2, dims=(0,)))),
    Case("block_diag all", torch.block_diag, (x(2, 3, dims=(0, 1)), y(1, 2, dims=(0, 1)))),
    Case("block_diag entries", torch.block_diag, (x(2, 3, kind=INF), y(2, kind=INF))),
    Case("trace entries", torch.trace, (x(3, 4, kind=INF),)),
    Case("trace rows", torch.trace, (x(3, 4),), options={"restarts": 20}),
    Case("trace columns", torch.trace, (x(4, 3, dims=(0,)),)),
    Case("trace all", torch.trace, (x(4, 3, dims=(0, 1)),)),
    Case("trace operator", torch.trace, (x(4, 3, kind=OP),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("case", [c for c in CASES if len(c.balls) > 1], ids=lambda c: c.name)
def test_a_plain_tensor_in_either_place_is_measured(case):
    check_plain_arguments(case)


def test_aten_takes_blocks_in_a_list():
    a, b = torch.ones(2, 3), torch.ones(1, 2)
    out = torch.ops.aten.block_diag.default([RMSTensor.of(a), RMSTensor.of(b)])
    assert torch.equal(out.backing, torch.block_diag(a, b))
    assert torch.equal(out.norm_size, torch.block_diag(RMSTensor.of(a), RMSTensor.of(b)).norm_size)
