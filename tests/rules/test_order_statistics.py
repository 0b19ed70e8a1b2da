"""Running extrema and products, quantiles, modes, distinct entries: norms against adversarial inputs; histograms are refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case, norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules.reducing.running import largest_slope

R, INF, L1 = RMSTensor, LinfTensor, L1Tensor
D = torch.float64
SPIKES = 2 * torch.eye(4, dtype=D)


def x(*shape, dims=None, kind=R, size=1.0):
    return Ball("x", kind, shape, size, dims)


def first_of(op, *args, **kwargs):
    return lambda a: op(a, *args, **kwargs)[0]


# all energy in the entry that is shown, or a spike of its own for each element
AT_START = {"witnesses": [(torch.tensor([[2.0, 0, 0, 0]], dtype=D).expand(3, 4),)]}
EACH = {"witnesses": [(SPIKES,)]}

CASES = [
    Case("cummax over", first_of(torch.cummax, 1), (x(3, 4),), options=AT_START),
    Case("cummax beside", first_of(torch.cummax, 0), (x(4, 4),), options=EACH),
    Case("cummax entries", first_of(torch.cummax, 0), (x(3, 4, kind=INF),)),
    Case("cummin over", first_of(torch.cummin, 1), (x(3, 4),), options={"witnesses": [(-AT_START["witnesses"][0][0],)]}),
    Case("cumprod, n > 1", lambda a: torch.cumprod(a, 1), (x(2, 4, kind=INF, size=1.5),)),
    Case("cumprod, n < 1", lambda a: torch.cumprod(a, 1), (x(2, 6, kind=INF, size=0.8),)),
    Case("cumprod, n small", lambda a: torch.cumprod(a, 0), (x(4, 2, kind=INF, size=0.2),)),
    # the largest entry of a vector of RMS norm 1 is 2, but not of all four at a time
    Case("cumprod rms", lambda a: torch.cumprod(a, 1), (x(2, 4),), 0.06),
    Case("logcumsumexp entries", lambda a: torch.logcumsumexp(a, 1), (x(2, 4, kind=INF),)),
    # a constant makes the best of the spacing and a spike of the norm
    Case("logcumsumexp over", lambda a: torch.logcumsumexp(a, 1), (x(2, 4, size=3.0),), 0.85),
    Case("logcumsumexp over, large", lambda a: torch.logcumsumexp(a, 1), (x(2, 4, size=50.0),), 0.97),
    Case("logcumsumexp beside", lambda a: torch.logcumsumexp(a, 0), (x(4, 4, size=20.0),), 0.95, {"witnesses": [(20 * SPIKES,)]}),
    Case("nansum", lambda a: torch.nansum(a, 1), (x(2, 4),)),
    Case("nansum l1", lambda a: torch.nansum(a, 0), (x(2, 4, kind=L1),)),
    Case("nanmean", lambda a: torch.nanmean(a, (0, 1)), (x(2, 4),)),
    Case("nan_to_num", torch.nan_to_num, (x(2, 4),)),
    Case("msort over", torch.msort, (x(4, 3, dims=(0,)),)),
    Case("msort beside", torch.msort, (x(4, 4),), options=EACH),
    Case("quantile entries", lambda a: torch.quantile(a, 0.3, 1), (x(2, 5, kind=INF),)),
    Case("quantile all", lambda a: torch.quantile(a, 1.0), (x(2, 3, kind=INF),)),
    Case("quantile largest", lambda a: torch.quantile(a, 1.0, 1, keepdim=True), (x(3, 4),)),
    # half of the entries have to be as large as their median; the entry in the middle alone moves it
    Case("quantile median", lambda a: torch.quantile(a, 0.5, 1), (x(2, 5),), 0.5),
    Case("quantile several", lambda a: torch.quantile(a, torch.tensor([0.2, 1.0], dtype=a.dtype), 1), (x(3, 4),)),
    Case("quantile lower", lambda a: torch.quantile(a, 0.9, 1, interpolation="lower"), (x(2, 5, kind=INF),)),
    Case("nanquantile", lambda a: torch.nanquantile(a, 0.6, 0), (x(4, 3, kind=INF),)),
    Case("norm nuc", lambda a: torch.norm(a, "nuc"), (x(3, 4, dims=(0, 1)),)),
    Case("norm nuc rows", lambda a: torch.linalg.norm(a, "nuc"), (x(2, 2),)),
    Case("matrix_norm nuc", lambda a: torch.linalg.matrix_norm(a, "nuc", (0, 2), True), (x(3, 2, 4, dims=(0, 2)),)),
    Case("matrix_norm", torch.linalg.matrix_norm, (x(3, 4, dims=(0, 1)),)),
    Case("matrix_norm inf", lambda a: torch.linalg.matrix_norm(a, math.inf), (x(2, 3, 4),)),
    Case("norm -inf", lambda a: torch.linalg.norm(a, -math.inf), (x(3, 4),)),
    Case("norm 1", lambda a: torch.linalg.norm(a, 1, (1, 0), keepdim=True), (x(3, 4),)),
    Case("norm -1", lambda a: torch.linalg.norm(a, -1), (x(3, 4, dims=(0,)),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
def test_the_slope_of_a_product_is_that_of_its_best_length(count):
    for n in (0.0, 0.05, 0.3, 0.5, 0.9, 0.97, 1.0, 1.01):
        exact = max(k * n ** (k - 1) for k in range(1, count + 1))
        claimed = largest_slope(torch.tensor(n, dtype=D), count).item()
        assert exact * (1 - 1e-9) <= claimed <= 1.07 * exact, (n, exact, claimed)


# for the audit of every rule: what jumps has a value only
JUMPING = [Case("unique_dim", lambda a: torch.unique(a, dim=0), (x(3, 4, kind=INF),))]
JUMPS = {
    "mode": lambda a: torch.mode(a, 1)[0],
    "unique": torch.unique,
    "unique with counts": lambda a: torch.unique(a, return_counts=True)[0],
    "unique rows": lambda a: torch.unique(a, dim=0),
    "unique_consecutive": torch.unique_consecutive,
    "unique_consecutive with counts": lambda a: torch.unique_consecutive(a, return_counts=True)[0],
}


@pytest.mark.parametrize("name", JUMPS)
@pytest.mark.parametrize("kind, dims", [(INF, ()), (R, (-1,)), (R, (0, 1))])
def test_values_of_what_jumps_hold_and_it_has_no_sensitivity(name, kind, dims):
    call = JUMPS[name]
    tight = 0.0
    for a in (torch.randn(3, 4), torch.ones(3, 4), torch.eye(3, 4), torch.tensor([[0.0, 2, 2, 2]]).expand(3, 4)):
        out = call(kind.of(a, dims))
        assert torch.equal(out.backing, call(a))
        size = norm(type(out), out.backing.double(), out.elem_dims)
        assert size <= out.norm_size * (1 + 1e-6)
        tight = max(tight, (size / out.norm_size).item())
    assert tight > (0.99 if kind is INF else 0.25)
    with pytest.raises(NormMismatchError, match="jumps"):
        call(kind(1.0, backing=torch.ones(3, 4), elem_dims=dims, perturbation_size=1.0))


@pytest.mark.parametrize("op", [torch.histc, lambda a: torch.histogram(a, 3), lambda a: torch.histogramdd(a, [2, 2, 2, 2])])
def test_histograms_are_refused(op):
    with pytest.raises(NormMismatchError, match="histogram"):
        op(RMSTensor.of(torch.ones(3, 4)))
