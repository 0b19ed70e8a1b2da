"""Reports of programs in low precision whose operations round more than their results: no error exceeds what is claimed at most."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz import bounds
from tests.report.test_precision import is_near, jitted
from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_report
from thunder_norm.errors import ThunderNormError

HALF = [torch.bfloat16, torch.float16]


def in_low_precision(program, x, dtype):
    found = norm_report(jitted(program), RMSTensor.of(x), precision=dtype).precision
    assert found is not None and found.measured is not None and found.measured_typical is not None, found
    return found, found.measured, found.measured_typical


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + 1002.1,
        lambda x: torch.sub(x, 1002.1),
        lambda x: x + torch.tensor(1002.1),
        lambda x: torch.add(x, x.flip(-1), alpha=0.3337),
        lambda x: (x + 3) ** 1.7037,
        lambda x: 1.3037**x,
        lambda x: F.tanhshrink(x * 0.01),
        lambda x: 1.37 / (x.abs() + 1),
        lambda x: x - 0.1234 + 0.1233,
        lambda x: torch.tanh(x * 1e-8) * 1e8 + 1e3 - 1e3,
    ],
)
def test_numbers_of_the_program_and_roundings_inside_count(program, dtype):
    """Of each of many entries: what a number of the program loses by being rounded is the same for all of them."""
    x = torch.rand(400, 1, generator=torch.Generator().manual_seed(seeded(0)), dtype=torch.float64) + 1.5
    found, measured, typical = in_low_precision(program, x, dtype)
    assert 0 < measured <= found.bound
    assert typical < 3 * found.typical


@pytest.mark.parametrize("dtype", HALF)
def test_a_rounding_that_makes_no_difference_at_the_data_counts_where_it_may_make_one(dtype):
    """``h`` times a power of 2, plus 1: the few entries at the data happen to be numbers of the format, those that are rounded before do not."""
    weight = nn.Parameter(torch.tensor([[1 + 2.0**-12]], dtype=torch.float64))

    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return F.linear(x, self.weight) + 1.0

    report = norm_report(jitted(Program()), RMSTensor.of(torch.tensor([[0.75]], dtype=torch.float64)), precision=dtype)
    added = {row.op: row.rounding for row in report}
    assert added["add"] is not None and added["add"].added > 0


def test_what_no_rounding_moves_adds_nothing_where_it_is_exact():
    x = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    found, measured, _ = in_low_precision(lambda x: (x + 1.0) * 3.0, x, torch.bfloat16)
    assert found.bound == measured == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_from_a_generator_of_the_program_are_drawn_once(dtype):
    """What is tried of an operation draws no numbers from a generator that the program gives it."""

    def mask():
        return torch.randn(64, 16, generator=torch.Generator().manual_seed(seeded(4))) > 0

    def program(x):
        return torch.where(mask(), x, -3 * x) * 1.1

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seeded(1)))
    found, measured, _ = in_low_precision(program, x, dtype)
    assert measured <= found.bound
    assert is_near(found)


@pytest.mark.parametrize("number", range(40))
def test_no_error_of_a_random_program_exceeds_its_bound(number):
    """Of numbers that are added, products of small ones and differences of large ones, among what else there is."""
    pick = random.Random(f"precision {seeded(number)}")
    drawn = bounds.draw(pick)
    statements = list(drawn.statements)
    for _ in range(2):
        statements.insert(pick.randint(0, len(statements)), f"x = {pick.choice(_CANCELLING)}")
    f = bounds.Bounded(tuple(statements), drawn.shape, drawn.kind, drawn.dims, drawn.sizes, drawn.scope, drawn.seed).function()
    now = [torch.float32]
    # constants in the dtype that the program is run in, as a program has them
    f.__globals__["c"] = lambda seed, *shape: bounds.c(seed, *shape).to(now[0])

    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("z", bounds.c(drawn.seed + 1, *drawn.shape).float())

        def forward(self, x):
            now[0] = self.z.dtype
            return f(x, self.z)

    x = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(seeded(number))) * pick.choice([1e-4, 1.0, 30.0])
    dtype = pick.choice([torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
    try:
        Program()(x)
    except (RuntimeError, IndexError):
        pytest.skip("it does not fit")
    try:
        report = norm_report(jitted(Program()), bounds.KINDS[drawn.kind].of(x, drawn.dims), precision=dtype)
    except ThunderNormError:
        pytest.skip("refused")
    found = report.precision
    assert found is not None
    if found.measured is not None and found.bound < float("inf"):
        assert found.measured <= found.bound * 1.01, (statements, dtype)


_CANCELLING = (
    "(x * 1e-8).tanh() * 1e8", "(x + 1e3) - 1e3", "x + 1002.1", "x * 1.0037", "1.37 / (x.abs() + 1)", "x * 1e-5 * 1e4",
    "(x.exp() - x.exp().mean()) * 1e3", "x - x.sum(-1, keepdim=True) * 0.01", "(x * 3e4).relu() * 1e-4", "x - 0.1234 + 0.1233",
    "torch.add(x, x.flip(-1), alpha=0.3)", "(x - x.mean(-1, keepdim=True)) / 0.37", "(x.abs() + 0.3) ** 1.7", "1.3 ** x",
    "x.softmax(-1) - x.softmax(-1).flip(-1)", "x.cumsum(-1)",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_results_that_are_infinite_in_both_are_no_error(dtype):
    """Logits of tokens that are ruled out, as programs return them."""
    ruled_out = torch.arange(8) % 3 == 0
    layer = nn.Linear(16, 8)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seeded(2)))
    found, measured, _ = in_low_precision(nn.Sequential(layer, _Masked(ruled_out)), x, dtype)
    assert 0 < measured <= found.bound < float("inf")
    assert is_near(found)


class _Masked(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        return x.masked_fill(self.where, float("-inf"))
