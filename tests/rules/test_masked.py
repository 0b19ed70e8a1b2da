"""torch.masked: written in Python, in operations that have rules.  Its bounds hold; the count of a mask is data they do not use."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor
D = torch.float64
ONE_OF_FOUR = torch.tensor([[True, True, False, True]] * 3)
NONE = torch.ones(3, 4, dtype=torch.bool)


def x(kind=INF, dims=None, size=1.0):
    return Ball("x", kind, (3, 4), size, dims)


def masked(name, *args, mask=ONE_OF_FOUR, **kwargs):
    return lambda a: getattr(torch.masked, name)(a, *args, mask=mask, **kwargs)


CASES = [
    Case("sum", masked("sum", 1, mask=NONE), (x(),)),
    # three of four entries are summed
    Case("sum of some", masked("sum", 1), (x(),), 0.74),
    Case("sum of some, rms", masked("sum", 1), (x(R),), 0.85),
    Case("mean", masked("mean", 1, mask=NONE), (x(),)),
    Case("mean of some", masked("mean", 1), (x(),), 0.74),
    Case("prod", masked("prod", 1, mask=NONE), (x(size=1.5),)),
    Case("cumsum", masked("cumsum", 1), (x(),), 0.74),
    Case("cumprod", masked("cumprod", 1), (x(size=1.2),), 0.3),
    Case("norm", masked("norm", 2.0, 1), (x(),), 0.86),
    Case("norm, rms", masked("norm", 2.0, 1), (x(R),)),
    Case("median", masked("median", 1), (x(),)),
    Case("amax", lambda a: torch.masked.amax(a, 1), (x(),)),
    Case("amin", lambda a: torch.masked.amin(a, (0, 1)), (x(),)),
    Case("logsumexp", lambda a: torch.masked.logsumexp(a, 1), (x(),)),
    Case("log_softmax", lambda a: torch.masked.log_softmax(a, 1), (x(),)),
    # as for softmax: sensitivity 1 where one entry has half of the weight
    Case("softmax", masked("softmax", 1), (x(size=2.0),), 0.9),
    Case("softmin", masked("softmin", 1), (x(size=2.0),), 0.9),
    # a mean, a difference and a square, each bounded by itself; 3 in the place of 4 entries
    Case("var", masked("var", 1, unbiased=False), (x(R),), 0.09),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


def test_indices_stay_plain():
    index = torch.masked.argmax(R.of(torch.eye(3, 4)), 1, mask=NONE)
    assert type(index) is torch.Tensor and index.tolist() == [0, 1, 2]


def test_a_deviation_has_a_value_and_no_sensitivity():
    """It is a square root, whose slope at 0 is infinite; without a mask torch.std is a seminorm, which is Lipschitz."""
    a = torch.randn(3, 4, dtype=D)
    out = masked("std", 1)(R.of(a))
    assert torch.equal(out.backing, masked("std", 1)(a)) and out.backing.max() <= out.norm_size
    with pytest.raises(NormMismatchError, match="infinite slope"):
        masked("std", 1)(R(1.0, backing=a, perturbation_size=1.0))


def test_a_quotient_has_the_bound_that_its_eps_gives():
    """Of ``x / max(|x|, eps)`` whose length is masked the rules know the eps alone."""
    a = torch.randn(3, 4, dtype=D)
    out = masked("normalize", 2.0, 1)(R.of(a))
    assert torch.equal(out.backing, masked("normalize", 2.0, 1)(a))
    assert out.backing.square().mean(-1).sqrt().max() <= out.norm_size <= R.of(a).norm_size * 1e12 * (1 + 1e-6)
