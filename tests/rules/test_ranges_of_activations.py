"""Ranges of activations, sums of products, scatters, averages and running products: entries of random tensors are in them."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor, rules  # noqa: F401
from thunder_norm.core.context import norm_mode

D = torch.float64
INDEX = torch.tensor([0, 1, 1, 0])

# made of a first tensor: numbers of any sign, of one sign, and of a small interval
GIVEN = {
    "any": lambda x: x,
    "not negative": torch.abs,
    "not positive": lambda x: -x.abs(),
    "from 0.5": lambda x: x.abs() + 0.5,
    "fractions": torch.sigmoid,
    "of both signs": torch.tanh,
    "large": lambda x: x.abs() + 7.0,
}
CALLS = {
    "elu": F.elu, "elu by alpha": lambda x: F.elu(x, 0.3), "celu": lambda x: F.celu(x, 0.7), "celu of 0": lambda x: F.celu(x, 1e-9),
    "selu": F.selu, "leaky_relu": F.leaky_relu, "leaky_relu of 0": lambda x: F.leaky_relu(x, 0.0), "steeper": lambda x: F.leaky_relu(x, 3.0),
    "downwards": lambda x: F.leaky_relu(x, -1.0), "softsign": F.softsign, "exp2": torch.exp2, "atan": torch.atan, "sinh": torch.sinh,
    "log1p": lambda x: (x.tanh() * 0.9).log1p(), "log": lambda x: (x.abs() + 0.1).log(), "gelu": F.gelu, "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid, "relu6": F.relu6, "softplus": F.softplus, "logsigmoid": F.logsigmoid, "silu": F.silu, "mish": F.mish, "hardswish": F.hardswish, "hardtanh": F.hardtanh, "hardtanh by ends": lambda x: F.hardtanh(x, -0.2, 3.0),
    "sign": torch.sign, "normalize": lambda x: F.normalize(x, dim=-1), "softmin": lambda x: F.softmin(x, -1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1), "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.3),
    "minimum": lambda x: torch.minimum(x, x.flip(0)), "min": lambda x: x.min(-1)[0], "min of all": lambda x: x.min(),
    "matmul": lambda x: x @ x.mT, "matmul of both signs": lambda x: x @ torch.tanh(x), "mm": lambda x: torch.mm(x, x.T), "mv": lambda x: torch.mv(x, x[0]),
    "bmm": lambda x: torch.bmm(x[None], x[None].abs()), "addcmul": lambda x: torch.addcmul(x, x, x.abs(), value=-2.0),
    "scatter_add": lambda x: torch.zeros(4, 4, dtype=D).scatter_add(0, INDEX.expand(4, 4), x), "index_add": lambda x: x.new_ones(4, 4).index_add(0, INDEX, x),
    "index_add, less": lambda x: x.new_ones(4, 4).index_add(0, INDEX, x, alpha=-1.0), "full": lambda x: x.new_full((4, 4), -2.0).index_add(0, INDEX, x),
    "cumprod": lambda x: x.cumprod(-1), "prod": lambda x: x.prod(-1), "logsumexp": lambda x: x.logsumexp(-1), "tril": torch.tril, "triu": lambda x: x.triu(1),
    "avg_pool": lambda x: F.avg_pool1d(x, 2), "padded": lambda x: F.avg_pool1d(x, 3, padding=1), "adaptive": lambda x: F.adaptive_avg_pool1d(x, 3),
    "divided": lambda x: F.avg_pool2d(x[None], 2, divisor_override=1), "max_pool": lambda x: F.max_pool1d(x, 3, padding=1), "unfold": lambda x: F.unfold(x[None, None], 2, padding=1),
}  # fmt: skip
SAYING = [
    (lambda x: F.elu(x) + 1, 0.0, math.inf),
    (lambda x: F.elu(x, 0.5), -0.5, math.inf),
    (lambda x: x.abs() @ x.abs().mT, 0.0, math.inf),
    (lambda x: torch.sigmoid(x) @ torch.sigmoid(x), 0.0, 4.0),
    (lambda x: torch.zeros(4, 4, dtype=D).index_add(0, INDEX, x.exp()), 0.0, math.inf),
    (lambda x: torch.sigmoid(x).cumprod(-1), 0.0, 1.0),
    (lambda x: F.leaky_relu(x.abs()), 0.0, math.inf),
    (lambda x: F.gelu(x.abs()), 0.0, math.inf),
    (lambda x: F.hardsigmoid(-x.abs()), 0.0, 0.5),
    (lambda x: F.avg_pool1d(x.abs() + 1, 2), 1.0, math.inf),
    (lambda x: F.avg_pool1d(x.abs() + 1, 3, padding=1), 0.0, math.inf),
]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", GIVEN)
def test_entries_are_in_their_ranges(given, name):
    pick = random.Random(seeded())
    generator = torch.Generator().manual_seed(seeded())
    for _ in range(10):
        t = torch.randn(4, 4, dtype=D, generator=generator) * pick.choice([0.1, 1.0, 30.0])
        y = CALLS[name](GIVEN[given](RMSTensor(1.0, backing=t)))
        r = y._range
        if r is not None:
            margin = 1e-9 * (1 + y.backing.abs().max())
            assert y.backing.min() >= r.low - margin and y.backing.max() <= r.high + margin, r


@pytest.mark.parametrize("call, low, high", SAYING)
def test_ranges_are_as_narrow_as_one_expects(call, low, high):
    r = call(RMSTensor(1.0, backing=torch.randn(4, 4, dtype=D)))._range
    assert r is not None and (r.low, r.high) == (pytest.approx(low), high)


def test_a_sum_that_is_not_negative_has_the_size_of_its_norm_in_mode_modula():
    """There entries are as large as the norm says, and a small eps is no size."""
    x = RMSTensor(1.0, backing=torch.randn(4, 4), perturbation_size=1.0)
    with norm_mode("modula"):
        y = torch.reciprocal(torch.relu(x) + 1e-6)
    assert y.perturbation_size.item() == pytest.approx(1.0)
