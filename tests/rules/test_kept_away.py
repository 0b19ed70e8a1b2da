"""What norms keep away from 0, and from other places where a function is infinite: ends of ranges that depend on norms."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.range_programs import random_results
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, build_norm_map
from thunder_norm.audit import Ball, Case, search
from thunder_norm.core.context import norm_mode
from thunder_norm.core.known_ranges import range_within
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 4, "steps": 12, "seed": seeded()}
INF = math.inf

PROGRAMS = {
    "log of softplus": lambda x: F.softplus(x).log(),
    "over a sigmoid": lambda x: 1 / torch.sigmoid(x),
    "over an exponential and a bit": lambda x: x / (1e-6 + x.exp()),
    "log of a log": lambda x: (1 + x.exp()).log().log(),
    "log1p of minus a sigmoid": lambda x: torch.log1p(-x.sigmoid()),
    "power of a softplus": lambda x: F.softplus(x) ** -1.5,
    "root of a softplus": lambda x: F.softplus(x, beta=2.0).sqrt(),
    "rsqrt of a product": lambda x: torch.rsqrt(F.softplus(x) * x.sigmoid()),
    "softplus to the softplus": lambda x: F.softplus(x) ** F.softplus(-x),
    "elu and 1": lambda x: torch.reciprocal(F.elu(x) + 1),
    "odds": lambda x: x.sigmoid() / (1 - x.sigmoid()),
    "logit of a mean": lambda x: torch.logit(x.sigmoid().mean(-1)),
    "atanh of tanh": lambda x: torch.atanh(x.tanh()),
    "erfinv of a softsign": lambda x: torch.erfinv(F.softsign(x)),
    "quantiles": lambda x: torch.special.ndtri(x.sigmoid()),
    "acos of tanh": lambda x: torch.acos(x.tanh()),
    "lgamma of an exponential": lambda x: torch.lgamma(torch.exp(x) + x.sigmoid()),
    "log of a share of a softmax": lambda x: (0.5 * x.softmax(-1) + torch.linspace(0.0, 0.3, 3, dtype=D)).log2(),
    "negative": lambda x: x / (-F.softplus(x)),
    "over sums": lambda x: x / x.exp().sum(-1, keepdim=True).cumsum(0),
    "xlogy": lambda x: torch.xlogy(x, F.softplus(x)),
    "the smaller one": lambda x: torch.minimum(x.exp(), x.sigmoid()).log10(),
    "the larger one": lambda x: torch.maximum(x.relu(), x.exp()).log(),
    "a product of all": lambda x: x.sigmoid().cumprod(-1).log(),
    "a clamp": lambda x: x.exp().clamp(max=2.0).log(),
    "in places": lambda x: torch.cat([x.exp(), 0.1 + x.sigmoid()]).flip(0)[1:].mT.reshape(-1).log(),
    "in double precision": lambda x: torch.float_power(F.softplus(x), -0.5),
    "a tensor in double precision": lambda x: torch.float_power(x.exp() * x.sigmoid(), x),
    "a number over it": lambda x: torch.true_divide(2.0, F.softplus(x)),
    "by squares": lambda x: 1 / (x.square().neg().exp()),
    "gains of a filter": lambda x: gains(x, 3),
    "a share of three": lambda x: x.exp() / (x.square() + (1e-4 + x.exp()) + x.sigmoid()),
    "what a share leaves": lambda x: (1.5 - (s := F.softplus(x)) / (s + x.exp())).log(),
    "of squares": lambda x: (1.1 - (s := x.square()) / (1 + s)).log(),
}


def gains(x: torch.Tensor, steps: int) -> torch.Tensor:
    """A Kalman filter's, of one state: variances stay above 0 as each gain is at most 1."""
    p, noise, r = torch.ones_like(x), x.exp(), F.softplus(x)
    for _ in range(steps):
        p = 0.8 * p + noise
        gain = p / (p + r)
        p = (1 - gain) * p
    return gain


CASES = [
    Case(f"{name}, {kind.__name__}", call, (Ball("x", kind, (2, 3), norm_size=1.3),), 0.0, FEW)
    for name, call in PROGRAMS.items()
    for kind in (LinfTensor, RMSTensor)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_tensor_exceeds_what_is_claimed(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found
    assert found.value > 1e-3, "a bound is finite, and no thousand times too large"


@pytest.mark.parametrize(
    "name, value, sensitivity",
    [
        ("over a sigmoid", 1 + math.exp(2), math.exp(2)),
        ("log of softplus", -math.log(math.log1p(math.exp(-2))), None),
        ("atanh of tanh", 2.0, None),
        ("elu and 1", math.exp(2), math.exp(2)),
        ("odds", math.exp(2), None),
        ("log1p of minus a sigmoid", math.log1p(math.exp(2)), None),
    ],
)
def test_values_of_the_largest_entry_are_attained(name, value, sensitivity):
    y = PROGRAMS[name](LinfTensor(2.0, backing=torch.zeros(3, dtype=D), perturbation_size=1.0))
    at_ends = PROGRAMS[name](torch.tensor([2.0, -2.0], dtype=D)).abs().max().item()
    assert y.norm_size.item() == pytest.approx(value) == at_ends or name == "odds"
    assert sensitivity is None or y.perturbation_size.item() >= sensitivity * 0.99


@pytest.mark.parametrize("kind", [LinfTensor, RMSTensor])
def test_a_share_of_a_sum_is_at_most_1_and_moves_as_far_as_its_terms_over_the_least_of_it(kind):
    def share(a, b):
        p = 0.25 + a.square()
        return p / (p + b.square())

    balls = [Ball("a", kind, (2, 3), norm_size=3.0), Ball("b", kind, (2, 3), norm_size=3.0)]
    found = search(share, balls, **FEW)
    assert found.is_sound and found.value > 0.99, found
    a, b = (LinfTensor(3.0, backing=torch.zeros(2, 3, dtype=D), perturbation_size=1.0) for _ in range(2))
    moved = 2 * 3.0 / 0.25 + (2 * 3.0 + 2 * 3.0) / 0.25  # |dp| / c + |ds| / c, as its docstring says
    assert share(a, b).perturbation_size.item() == pytest.approx(moved)


def test_what_is_no_term_any_more_is_no_share():
    x = LinfTensor(1.0, backing=torch.rand(4, dtype=D), perturbation_size=1.0)
    p = x.square()
    total = p + 0.5
    p.neg_()
    for other in (p / total, (2 * p) / total, x / total):
        assert range_within(other).low < 0


UNARY = {
    "exp": torch.exp, "expm1": torch.expm1, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "abs": torch.abs,
    "square": torch.square, "neg": torch.neg, "relu": torch.relu, "relu6": F.relu6, "softplus": F.softplus, "softplus 3": lambda x: F.softplus(x, 3.0),
    "logsigmoid": F.logsigmoid, "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: F.log_softmax(x, dim=0), "cosh": torch.cosh,
    "elu": F.elu, "celu": lambda x: F.celu(x, 0.5), "selu": F.selu, "leaky": lambda x: F.leaky_relu(x, 0.3), "softsign": F.softsign,
    "exp2": torch.exp2, "atan": torch.atan, "asinh": torch.asinh, "sinh": torch.sinh, "log": torch.log, "log1p": torch.log1p, "log2": torch.log2,
    "reciprocal": torch.reciprocal, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "x + 2": lambda x: x + 2, "1 - x": lambda x: 1 - x,
    "x - 0.5": lambda x: torch.sub(x, 0.25, alpha=2), "3 x": lambda x: 3 * x, "x / -2": lambda x: x / -2, "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1), "clamp max": lambda x: x.clamp(max=1.5), "x^3": lambda x: x.pow(3), "x^4": lambda x: x**4,
    "x^0.3": lambda x: x**0.3, "x^-2": lambda x: x**-2, "sum": lambda x: x.sum(-1, keepdim=True), "cumsum": lambda x: x.cumsum(-1),
    "mean": lambda x: x.mean(0, keepdim=True), "amax": lambda x: x.amax(-1, keepdim=True), "cumprod": lambda x: x.cumprod(0),
    "prod": lambda x: x.prod(-1, keepdim=True), "logsumexp": lambda x: x.logsumexp(-1, keepdim=True), "index": lambda x: x[..., :1],
    "x x": lambda x: x * x, "constant": lambda x: x + torch.linspace(0.0, 1.0, x.shape[-1], dtype=x.dtype),
    "dropout": lambda x: F.dropout(x, 0.3, training=False), "clamp to ones": lambda x: x.clamp(max=torch.ones_like(x)),
    "mask": lambda x: x.masked_fill(torch.arange(x.shape[-1]) > 0, -INF), "where": lambda x: torch.where(torch.arange(x.shape[-1]) > 0, x, 0.3),
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum, "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]), "addcmul": lambda a, b: torch.addcmul(a, a, b, value=-0.5),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_entries_of_random_programs_are_between_their_ends(seed):
    """Tensors have exactly the norms that are said of them."""
    pick = random.Random(seeded(seed))
    generator = torch.Generator().manual_seed(seeded(seed))
    kinds = [LinfTensor, RMSTensor]
    found = [
        pick.choice(kinds).of(torch.randn(4, 4, dtype=D, generator=generator) * pick.choice([0.1, 1.0, 3.0])) for _ in range(2)
    ]
    for name, y in random_results(pick, found, UNARY, BINARY, (3, 9), 0.7):
        entries = y.backing[~y.backing.isnan()]
        r = range_within(y)
        if entries.numel() and not y.norm_size.isnan():
            low, high = r.least_of(y.norm_size), r.most_of(y.norm_size)
            assert r.low <= low and high <= r.high
            assert entries.min() >= low - 1e-9 * (low.abs() + high.abs()).clamp(max=1e9) or low == -INF, name
            assert entries.max() <= high + 1e-9 * (low.abs() + high.abs()).clamp(max=1e9) or high == INF, name
            of_reals = y.norm_size.isfinite() and y.norm_size < 1e100
            assert not of_reals or not r.is_above(0.0) or entries.min() > 0 or low < 1e-300, name
        if y.norm_size.isfinite():
            assert type(y).measure(y.backing.nan_to_num(0.0), y.elem_dims) <= y.norm_size * (1 + 1e-9), name


def test_traced_and_eager_bounds_agree_and_are_differentiable_in_the_norm():
    """One program of all ends at once; its derivative in the norm is compared with a difference."""

    def program(x):
        return F.softplus(x).log() + 1 / x.sigmoid() + torch.atanh(x.tanh()) + torch.logit(x.softmax(-1))

    def claimed(n, call=program):
        return call(RMSTensor(n, backing=torch.randn(2, 3), perturbation_size=torch.tensor(0.1)))

    torch.manual_seed(seeded(0))
    n = torch.tensor(0.8, dtype=D, requires_grad=True)
    eager, traced = claimed(n), claimed(n, thunder.jit(program, transforms=[NormTransform()]))
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item(), rel=1e-5)
    assert traced.perturbation_size.item() == pytest.approx(eager.perturbation_size.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(eager.norm_size, n)
    step = 1e-3
    difference = (claimed(n.detach() + step).norm_size - claimed(n.detach() - step).norm_size) / (2 * step)
    assert slope.item() == pytest.approx(difference.item(), rel=1e-2)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.raw = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h = self.linear(x)
        return (h / F.softplus(self.raw) + 1 / F.softplus(h)) / (torch.linspace(0.5, 1.0, 3) + torch.sigmoid(self.raw))


def test_norm_maps_have_ends_that_grow_with_the_norms_they_are_given():
    torch.manual_seed(seeded(0))
    module = Gated()
    compute = build_norm_map(module, torch.randn(2, 3), parameters="unit")
    small, large = (compute(RMSTensor(n)).norm_size.item() for n in (0.5, 2.0))
    assert 0 < small < large < INF


def test_what_norms_do_not_keep_away_is_refused():
    t = RMSTensor(1.0, backing=torch.rand(2, 3))
    for call in (
        lambda: t.relu().log(),
        lambda: 1 / (t.exp() - 0.1),
        lambda: t.exp().tril().log(),
        lambda: torch.atanh(t.clamp(-1, 1)),
        lambda: (t.sigmoid() * t.relu()).reciprocal(),
        lambda: t.exp().masked_fill(torch.tensor([True, False, False]), 0.0).log(),
        lambda: torch.logit(t.exp()),
    ):
        with pytest.raises(NormMismatchError):
            call()


def test_rounding_leaves_nothing_of_a_small_difference():
    """In bfloat16 1 - sigmoid(x) is 0 from x = 6 on, and so its logarithm is infinite."""
    t = LinfTensor(8.0, backing=torch.zeros(2, dtype=torch.bfloat16))
    assert torch.log1p(-t.sigmoid()).norm_size == INF
    assert torch.log1p(-torch.tensor(8.0, dtype=torch.bfloat16).sigmoid()) == -INF


def test_other_modes_and_norms_at_the_data_are_as_they_were():
    t = RMSTensor(1.0, backing=torch.rand(2, 3), perturbation_size=0.1)
    with norm_mode("typical"):
        assert F.softplus(t).reciprocal().norm_size.item() == pytest.approx(1 / F.softplus(t).norm_size.item())


def test_many_steps_let_their_ends_go():
    """Programs of hundreds of positive factors neither recurse nor grow beyond bounds."""
    t = LinfTensor(0.1, backing=torch.zeros(3))
    y = t.exp()
    for _ in range(400):
        y = y * t.sigmoid() + y
    with pytest.raises(NormMismatchError):
        y.log()
