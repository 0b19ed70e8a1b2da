"""Writing with a reduction and at several indices: norms against adversarial inputs, plain tensors in either place."""

from __future__ import annotations

import pytest
import torch

from tests.rules.plain_arguments import check_plain_arguments
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
D = torch.float64
same = torch.tensor([1, 1, 1])
own = torch.tensor([0, 2])
onto_one = torch.ones(3, 4, dtype=torch.long)
a_place_each = torch.tensor([[1, 0, 0, 1], [1, 1, 2, 2]])
mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])


def x(*shape, dims=None, kind=R, size=1.0):
    return Ball("x", kind, shape, size, dims)


def src(*shape, dims=None, kind=R, size=0.6):
    return Ball("src", kind, shape, size, dims)


def index_reduce(reduce, dim, index, include_self=True):
    return lambda a, b: torch.index_reduce(a, dim, index, b, reduce, include_self=include_self)


def scatter_reduce(reduce, dim, index, include_self=True):
    return lambda a, b: torch.scatter_reduce(a, dim, index, b, reduce, include_self=include_self)


def index_put(*indices, accumulate=False):
    return lambda a, b: torch.ops.aten.index_put.default(a, indices, b, accumulate)


# x has its energy where the source has none: all of both is seen
APART = (
    torch.tensor([[0, 0, 0, 2.0]], dtype=D).expand(3, 4),
    0.6 * torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]], dtype=D),
)
beside = torch.tensor([[0, 2.0, 0, 0]], dtype=D).expand(3, 4)  # what the mask leaves of its first row
MORE = {"restarts": 16}

CASES = [
    Case("index_reduce mean", index_reduce("mean", 0, same), (x(3, 4), src(3, 4))),
    Case("index_reduce mean, larger source", index_reduce("mean", 0, same), (x(3, 4), src(3, 4, size=3.0))),
    Case("index_reduce mean without x", index_reduce("mean", 0, same, False), (x(3, 4), src(3, 4, size=3.0))),
    Case("index_reduce mean over", index_reduce("mean", 1, own, False), (x(3, 4), src(3, 2))),
    Case("index_reduce amax", index_reduce("amax", 0, same), (x(3, 4), src(3, 4)), options={"witnesses": [APART]}),
    Case("index_reduce amin entries", index_reduce("amin", 0, same), (x(3, 4, kind=INF), src(3, 4, kind=INF))),
    Case("index_reduce amax over", index_reduce("amax", 1, own), (x(3, 4), src(3, 2)), options=MORE),
    Case("index_reduce prod", index_reduce("prod", 0, same), (x(3, 4, kind=INF), src(3, 4, kind=INF, size=1.5))),
    Case("index_reduce prod, small", index_reduce("prod", 0, same[:2]), (x(3, 4, kind=INF), src(2, 4, kind=INF))),
    Case("index_reduce prod without x", index_reduce("prod", 0, same, False), (x(3, 2, kind=INF), src(3, 2, kind=INF, size=1.5))),
    Case("scatter_reduce sum", scatter_reduce("sum", 0, onto_one), (x(3, 4), src(3, 4))),
    # without x in the sum, what it has is seen only where nothing is added
    Case("scatter_reduce sum without x", scatter_reduce("sum", 0, onto_one, False), (x(3, 4), src(3, 4)), 0.6),
    Case("scatter_reduce mean entries", scatter_reduce("mean", 0, onto_one), (x(3, 4, kind=INF), src(3, 4, kind=INF, size=3.0))),
    # as for scatter: not all the energy that these indices would allow a mean to see
    Case("scatter_reduce mean", scatter_reduce("mean", 0, a_place_each), (x(3, 4), src(2, 4)), 0.45),
    Case("scatter_reduce amax", scatter_reduce("amax", 0, onto_one), (x(3, 4), src(3, 4)), options={"witnesses": [APART]}),
    Case("scatter_reduce amin over", scatter_reduce("amin", 1, torch.tensor([[0, 1]] * 3)), (x(3, 4), src(3, 2)), options=MORE),
    Case("scatter_reduce amax entries", scatter_reduce("amax", 0, a_place_each), (x(3, 4, kind=INF), src(2, 4, kind=INF))),
    Case("scatter_reduce prod", scatter_reduce("prod", 0, onto_one), (x(3, 4, kind=INF), src(3, 4, kind=INF, size=1.5))),
    Case("index_put rows", index_put(own), (x(3, 4), src(2, 4, size=1.5))),
    Case("index_put one row everywhere", index_put(own), (x(3, 4), src(4))),
    Case("index_put rows, added", index_put(same, accumulate=True), (x(3, 4), src(3, 4))),
    Case("index_put entries", index_put(same, same, accumulate=True), (x(3, 4, kind=INF), src(3, kind=INF))),
    Case("index_put a mask of entries", index_put(mask, accumulate=True), (x(3, 4, kind=INF), src(7, kind=INF))),
    # the rule takes whole rows to be written
    Case("index_put places", index_put(own, own), (x(3, 4), src(2, kind=INF)), 0.45),
    Case(
        "index_put a mask",
        index_put(mask),
        (x(3, 4), src(7, kind=INF)),
        0.95,
        {"witnesses": [[beside, 0.6 * torch.ones(7, dtype=D)]]},
    ),
    Case("index_put columns", index_put(None, own), (x(3, 4), src(3, 2, kind=INF)), 0.7),
    Case("put", lambda a, b: a.put(own, b), (x(3, 4, kind=INF), src(2, kind=INF))),
    Case("put, added", lambda a, b: a.put(same, b, accumulate=True), (x(3, 4, kind=INF), src(3, kind=INF))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_plain_tensor_in_either_place_is_measured(case):
    check_plain_arguments(case)


def test_two_masks_are_not_taken_for_one():
    """One place named by the one, five by the other: the five values are added to it."""
    a, values = torch.zeros(5, 5, dtype=D), torch.ones(5, dtype=D)
    first, second = torch.arange(5) == 2, torch.ones(5, dtype=torch.bool)
    out = torch.index_put(INF.of(a), (first, second), INF.of(values), accumulate=True)
    assert out.backing.abs().max() <= out.norm_size
    assert torch.equal(out.backing, a.index_put((first, second), values, accumulate=True))


def test_segments_are_refused():
    with pytest.raises(NormMismatchError, match="index_reduce"):
        torch.segment_reduce(R.of(torch.ones(4, 2)), "sum", lengths=torch.tensor([1, 3]))
