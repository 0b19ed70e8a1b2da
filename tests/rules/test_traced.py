"""The rules in a trace: the tables of the families give the same norms and values under thunder.jit as in eager mode."""

from __future__ import annotations

import pytest
import torch

import tests.rules.test_binary as binary
import tests.rules.test_combining as combining
import tests.rules.test_copies as copies
import tests.rules.test_diagonals as diagonals
import tests.rules.test_distances as distances
import tests.rules.test_divisions as divisions
import tests.rules.test_elementwise as elementwise
import tests.rules.test_losses as losses
import tests.rules.test_order_statistics as order_statistics
import tests.rules.test_reductions as reductions
import tests.rules.test_replacing as replacing
import tests.rules.test_resampling as resampling
import tests.rules.test_shape as shape
import tests.rules.test_special as special
from tests.seeds import seeded
from thunder_norm.audit import start
from thunder_norm.transforms import NormTransform
import thunder

# What cannot be in a trace: functions that Thunder 0.2.6 does not know or takes for others (Tensor.unfold for F.unfold).
NOT_TRACED = {
    "add plain to an operator",
    "windows",
    "windows of other dims",
}
# operations whose own code looks at data: torch checks the sign of variances, lengths of sequences, places of quantiles
DATA_DEPENDENT = ("gaussian_nll,", "ctc", "quantile", "nanquantile", "cov")
FAMILIES = (
    elementwise, binary, shape, reductions, special, divisions, losses, diagonals, copies, order_statistics, replacing, combining,
    resampling, distances,
)  # fmt: skip
ALL = [
    case
    for family in FAMILIES
    for case in family.CASES
    if case.name not in NOT_TRACED and not case.name.startswith(DATA_DEPENDENT)
]
# the first for its float64 constants, the others because they are methods and properties written in C
ALWAYS = {
    "mask",
    "masked_select",
    "repeat_interleave by counts",
    "cumprod, n > 1",
    "T",
    "mT",
    "tile",
    "gather from one entry",
    "var, biased",
}
CASES = [case for i, case in enumerate(ALL) if i % 4 == 0 or case.name in ALWAYS]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_trace_agrees_with_eager(case):
    generator = torch.Generator().manual_seed(seeded(0))
    points = [start(b, 0, generator) * b.norm_size for b in case.balls]
    inputs = [b.normed(p, 1.0) for b, p in zip(case.balls, points, strict=True)]
    eager = case.call(*inputs)
    traced = thunder.jit(case.call, transforms=[NormTransform()])(*inputs)
    assert type(traced) is type(eager)
    assert traced.elem_dims == eager.elem_dims
    torch.testing.assert_close(traced.backing, eager.backing)
    torch.testing.assert_close(traced.norm_size, eager.norm_size)
    torch.testing.assert_close(traced.perturbation_size, eager.perturbation_size)
