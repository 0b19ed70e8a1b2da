"""Which numbers entries can be, and quotients, roots and logarithms of what stays away from 0."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

from tests.rules.range_programs import random_results
from tests.seeds import seeded
from thunder_norm import build_norm_map, rules, sensitivities, with_perturbation  # noqa: F401
from thunder_norm.audit import Ball, Case, search
from thunder_norm.core.context import norm_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.ranges import Range, union
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
INF = math.inf


def normed(t, dims=(-1,)):
    return RMSTensor(1.0, backing=t, elem_dims=dims)


# -- arithmetic of ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_of_ranges_contains_that_of_numbers(seed):
    pick = random.Random(seeded(seed))
    ends = [-INF, -3.0, -1.0, 0.0, 0.5, 2.0, INF]
    a, b = (Range(*sorted(pick.sample(ends, 2))) for _ in range(2))

    def inside(r):
        low, high = max(r.low, -5.0), min(r.high, 5.0)
        return min(max(pick.uniform(low, high), low), high)

    for _ in range(200):
        x, y = inside(a), inside(b)
        results = [(a.plus(b), x + y), (a.times(b), x * y), (a.negative(), -x), (a.scaled(-2.0), -2 * x), (union([a, b]), y)]
        results += [(a.between(-1, 1), min(max(x, -1), 1))]
        inverse = a.inverse()
        assert (inverse is None) == (a.low <= 0 <= a.high)
        results += [] if inverse is None else [(inverse, 1 / x)]
        for r, value in results:
            assert r.low <= value <= r.high
        assert abs(x) >= a.smallest_modulus


def test_ends_that_are_no_numbers_say_nothing():
    assert Range(math.nan, 1.0) == Range(-INF, 1.0)
    assert not Range().says_something
    assert Range(-INF, INF).plus(Range(-INF, INF)) == Range()


# -- ranges through programs ----------------------------------------------------------------------------------------------

UNARY = {
    "exp": torch.exp, "expm1": torch.expm1, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "abs": torch.abs,
    "square": torch.square, "neg": torch.neg, "relu": torch.relu, "relu6": F.relu6, "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x, 3.0), "hardsigmoid": F.hardsigmoid, "logsigmoid": F.logsigmoid,
    "softmax": lambda x: torch.softmax(x, -1), "log_softmax": lambda x: F.log_softmax(x, dim=0), "cosh": torch.cosh, "sin": torch.sin,
    "cos": lambda x: torch.cos(input=x), "reciprocal": torch.reciprocal, "sqrt": torch.sqrt, "x + 2": lambda x: x + 2,
    "1 - x": lambda x: 1 - x, "x - 0.5": lambda x: torch.sub(x, 0.25, alpha=2), "3 x": lambda x: 3 * x, "x / -2": lambda x: x / -2,
    "clamp": lambda x: x.clamp(-1, 2), "clamp_min": lambda x: torch.clamp_min(x, 0.1), "clamp max": lambda x: x.clamp(max=1.5),
    "x^2": lambda x: x**2, "x^3": lambda x: x.pow(3), "x^4": lambda x: torch.pow(x, 4.0), "sum": lambda x: x.sum(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1), "mean": lambda x: x.mean(0, keepdim=True), "amax": lambda x: x.amax(-1, keepdim=True), "view": lambda x: x.reshape(-1),
    "chunk": lambda x: x.chunk(2)[0], "index": lambda x: x[..., :1], "dropout": lambda x: F.dropout(x, 0.3, True),
    "fill": lambda x: x.masked_fill(x.backing > 0 if hasattr(x, "backing") else x > 0, -7.0), "x x": lambda x: x * x,
    "norm": lambda x: x.norm(dim=-1, keepdim=True), "var": lambda x: x.var(-1, unbiased=False, keepdim=True),
    "clone": torch.clone, "float": lambda x: x.double(), "transpose": lambda x: x.mT, "sort": lambda x: x.sort(-1)[0],
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "rsub": lambda a, b: torch.rsub(a, b), "mul": torch.mul, "div": torch.div, "max": torch.maximum,
    "add 2 b": lambda a, b: torch.add(a, b, alpha=2), "cat": lambda a, b: torch.cat([a, b]), "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(torch.arange(a.shape[-1]) > 1, a, b),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_entries_of_random_programs_are_in_their_ranges(seed):
    """Values of the tensors do not matter: they are drawn much larger than any norm says."""
    pick = random.Random(seeded(seed))
    generator = torch.Generator().manual_seed(seeded(seed))
    scale = pick.choice([0.1, 1.0, 5.0])
    found = [normed(torch.randn(4, 4, dtype=torch.float64, generator=generator) * scale) for _ in range(2)]
    for name, y in random_results(pick, found, UNARY, BINARY, (2, 7), 0.6):
        r = y._range or Range()
        entries = y.backing[~y.backing.isnan()]
        if entries.numel():
            assert entries.min() >= r.low - 1e-12 * abs(r.low), (name, r)
            assert entries.max() <= r.high + 1e-12 * abs(r.high), (name, r)


@pytest.mark.parametrize(
    "call, low, high",
    [
        (lambda x: torch.sigmoid(x) + 1, 1, 2),
        (lambda x: 1 / (1 + x.square()), 0, 1),
        (lambda x: -(F.softplus(x) + 1), -INF, -1),
        (lambda x: torch.softmax(x, -1).sum(-1), 1, 4),
        (lambda x: (torch.relu(x) + 1) * (torch.tanh(x) - 2), -INF, -1),
        (lambda x: x.abs().clamp(max=3).max(-1)[0], 0.0, 3.0),
        (lambda x: (x.square() + 1) / torch.ones_like(x), 1, INF),
        (lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0) + x.new_ones(4) + x.new_full((4,), fill_value=1.0), 4, 4),
        (lambda x: torch.ones_like(x).mul_(-torch.sigmoid(x)), -1, 0),
        (lambda x: torch.ones_like(x).index_fill_(-1, torch.tensor([0]), -3.0) + 1, -2, 2),
        (lambda x: x.new_zeros(3, 4).scatter_(-1, x.argmax(-1, keepdim=True), 1.0), 0, 1),
        (lambda x: torch.zeros_like(x).scatter(-1, torch.zeros(3, 1, dtype=torch.long), torch.tanh(x)), -1, 1),
        (lambda x: torch.ones_like(x).index_copy(0, torch.tensor([1]), torch.sigmoid(x[:1])), 0, 1),
        (lambda x: torch.ones_like(x).scatter(-1, torch.zeros(3, 1, dtype=torch.long), x), None, None),
    ],
)
def test_ranges_are_as_narrow_as_one_expects(call, low, high):
    found = call(normed(torch.randn(3, 4, dtype=torch.float64)))._range
    assert (found and (found.low, found.high)) == (None if low is None else (low, high))


def test_sums_of_fractions_are_away_from_zero():
    p = torch.softmax(normed(torch.randn(3, 8)), -1)
    assert p.sum(-1)._range == Range(1.0, 8.0, averaged=8)
    top = p.topk(2, dim=-1)[0]
    assert top.clone().sum(-1, keepdim=True)._range == Range(0.25, 2.0, averaged=2)
    assert top.backing.sum(-1).min() >= 0.25
    for other in (p.topk(2, largest=False)[0], top.transpose(0, 1).contiguous(), top[:, :1]):
        assert other.sum(-1)._range.low == 0.0
    assert p.topk(2, dim=0)[0].sum(-1)._range.low == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_of_ranges_is_that_of_torch(dtype):
    pick = random.Random(seeded())
    numbers = [pick.choice([-1, 1]) * 10 ** pick.uniform(-50, 40) for _ in range(300)] + [1e-8, 1e-5, 1.0001, 65520.0, 0.0, INF]
    for x in numbers:
        assert Range(x, x).rounded(dtype) == Range(*[torch.tensor(x, dtype=torch.float64).to(dtype).item()] * 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (torch.relu(x).half().abs() + 1e-8).reciprocal(),
        lambda x: 1 / (torch.relu(x) + 1e-8).half().float(),
        lambda x: x / (torch.relu(x) + 1e-50),
        lambda x: (((torch.relu(x).bfloat16() + 1e-4) + 1) - 1).float().rsqrt(),
        lambda x: (torch.relu(x).half() + 1e-9).log(),
        lambda x: torch.reciprocal(torch.relu(x.double()) + 1e-200),
    ],
)
def test_eps_that_a_dtype_rounds_to_zero_does_not_keep_away_from_zero(call):
    with pytest.raises(NormMismatchError):
        call(normed(torch.zeros(2, 4)))


def test_in_place_operation_has_the_range_of_its_result():
    y = normed(torch.randn(3, 4)) * 1.0
    y.square_().add_(1.0)
    assert y._range == Range(1.0, INF)
    y.sub_(normed(torch.randn(3, 4)))
    assert y._range is None


# -- rules ----------------------------------------------------------------------------------------------------------------


def x(*shape, n=0.7, kind=RMSTensor, dims=None, name="x"):
    return Ball(name, kind, shape, n, dims)


def reshaped(a):
    return a.unsqueeze(0).expand(2, *a.shape).permute(2, 0, 1).reshape(6, 2)


def renormalised(a):
    p = torch.topk(torch.softmax(a, -1), 2, -1)[0].float().double()
    p /= p.sum(-1, keepdim=True)
    return p


def _itself(p):
    return torch.xlogy(p, p)


CASES = [
    Case("1 / (1 + x^2)", lambda a: 1 / (1 + a.square()), (x(2, 3, kind=LinfTensor),), 0.0, FEW),
    Case("reciprocal", lambda a: torch.reciprocal(torch.relu(a) + 0.5), (x(2, 3),), 0.0, FEW),
    Case("of the negative", lambda a: (-torch.relu(a) - 0.5).reciprocal(), (x(2, 3),), 0.0, FEW),
    Case("a number over it", lambda a: torch.div(2.0, torch.relu(a) + 0.5), (x(2, 3),), 0.0, FEW),
    Case("quotient", lambda a, b: a / (b.abs() + 0.5), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("quotient, largest entry", lambda a, b: a / (b.abs() + 0.5), (x(2, 3), x(2, 1, name="b", kind=LinfTensor)), 0.9, FEW),
    Case("quotient, other dims", lambda a, b: a / (b.abs() + 0.5), (x(2, 3), x(2, 3, name="b", dims=(-2,))), 0.0, FEW),
    Case("renormalised", renormalised, (x(2, 4),), 0.0, FEW),
    Case("gate", lambda a, b: a * torch.sigmoid(b), (x(2, 3), x(2, 3, name="b", n=3.0)), 0.0, FEW),
    Case("gate first", lambda a, b: torch.tanh(a) * b, (x(2, 3), x(2, 3, name="b", dims=(-2,))), 0.0, FEW),
    Case("two gates", lambda a, b: torch.tanh(a) * torch.sigmoid(b), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("rsqrt", lambda a: torch.rsqrt(torch.relu(a) + 0.5), (x(2, 3),), 0.0, FEW),
    Case("sqrt", lambda a: torch.sqrt(torch.relu(a) + 0.5), (x(2, 3),), 0.0, FEW),
    Case("log", lambda a: torch.log(torch.relu(a) + 0.5), (x(2, 3),), 0.0, FEW),
    Case("xlogy", lambda a, b: torch.xlogy(a, b.abs() + 0.5), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("xlogy, other dims", lambda a, b: torch.xlogy(a, b.abs() + 0.5), (x(2, 3), x(1, 3, name="b", dims=())), 0.0, FEW),
    Case("xlog1py", lambda a, b: torch.special.xlog1py(a, b.abs() - 0.5), (x(2, 3), x(2, 3, name="b")), 0.0, FEW),
    Case("xlog1py of a number", lambda a: torch.special.xlog1py(-2.0, a.abs() - 0.5), (x(2, 3),), 0.0, FEW),
    Case("xlogy of itself", lambda a: _itself(a.abs() + 0.5), (x(2, 3),), 0.0, FEW),
    Case("xlogy of a softmax", lambda a: _itself(a.softmax(-1)), (x(2, 3),), 0.0, FEW),
    Case("xlogy of small numbers", lambda a: _itself(a.sigmoid() * 0.1 + 1e-3), (x(2, 3),), 0.0, FEW),
    Case("xlogy of a number", lambda a: torch.xlogy(-2.0, a.abs() + 0.5), (x(2, 3),), 0.0, FEW),
    Case("log1p", lambda a: torch.log1p(torch.relu(a)), (x(2, 3),), 0.0, FEW),
    Case("log1p below 0", lambda a: torch.log1p(torch.relu(a) - 0.5), (x(2, 3),), 0.0, FEW),
    Case("log of what stays an exponential", lambda a: (2 * reshaped(a.exp()) ** 2 / 3).sqrt().log(), (x(2, 3),), 0.5, FEW),
    Case("over a moved exponential", lambda a, b: b / (3 * reshaped(a.exp())), (x(2, 3), x(6, 2, name="b")), 0.0, FEW),
    Case("over its square", lambda a, b: b / (2 * a.exp().square()), (x(2, 3), x(2, 3, name="b", dims=(-2,))), 0.0, FEW),
    Case("powers of exponentials", lambda a: (a.exp() ** -1.5).log() + a.exp().rsqrt(), (x(2, 3, kind=LinfTensor),), 0.5, FEW),
    Case("root of an exponential", lambda a: torch.sqrt(a.exp()) * a.exp() ** 0.5, (x(2, 3),), 0.0, FEW),
    Case("density", lambda a, b: D.Normal(b, a.exp(), False).log_prob(0.3), (x(3), x(2, 3, name="b")), 0.0, FEW),
    Case("exp of what is negative", lambda a: torch.exp(-F.softplus(a)), (x(2, 3),), 0.0, FEW),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


def squash(s):
    """A capsule's, with its own guard."""
    square = s.square().sum(-1, keepdim=True)
    return square / (1 + square) * s / torch.sqrt(square + 1e-2)


def selective_scan(x):
    """A state that forgets by exp of a negative number."""
    state, states = torch.zeros(()), []
    for t in range(x.shape[0]):
        state = torch.exp(-F.softplus(x[t])) * state + x[t]
        states.append(state)
    return torch.stack(states)


def linear_attention(x):
    """With the feature map elu + 1 replaced by a softplus, and a guard."""
    q, k = F.softplus(x), F.softplus(-x)
    return (q @ (k.mT @ x)) / ((q @ k.sum(0).unsqueeze(-1)) + 1.0)


def fractions(x):
    """Of what is never negative, guarded."""
    p = torch.softmax(x, -1)
    return p / (p.sum(-1, keepdim=True) + 0.1)


@pytest.mark.parametrize("call", [squash, selective_scan, fractions], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
def test_programs_are_bounded(call, kind):
    found = search(call, [x(3, 3, kind=kind)], sensitivity=True, **FEW)
    assert found.is_sound


def test_gate_bounds_a_product():
    a = RMSTensor(0.7, backing=torch.randn(3, 16), perturbation_size=1.0)
    y = a * torch.sigmoid(normed(torch.randn(3, 16)))
    assert y.norm_size.item() == pytest.approx(0.7)
    assert y.perturbation_size.item() == pytest.approx(1.0)


def test_exponential_of_what_is_negative_is_at_most_one_in_every_mode():
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            y = torch.exp(-F.softplus(RMSTensor(3.0, backing=torch.randn(3, 16), perturbation_size=1.0)))
        assert y.norm_size.item() <= 1.0
        assert y.perturbation_size.item() <= 1.0


def test_parameters_have_the_ranges_of_what_made_them():
    class Decay(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return torch.exp(-torch.exp(self.rate) * F.softplus(x)) * x

    from thunder_norm import build_norm_map

    decay, given = Decay(), RMSTensor(0.7, backing=torch.randn(3, 4))
    for parameters in ("measured", "unit"):
        y = build_norm_map(decay, torch.randn(3, 4), parameters=parameters)(given)
        assert y.norm_size.item() == pytest.approx(0.7)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(
    "total",
    [
        lambda s: s[:, :, -1:],
        lambda s: s[..., -1:],
        lambda s: s[:, :, 5:],
        lambda s: s.narrow(-1, 5, 1),
        lambda s: s.narrow(2, -1, 1),
    ],
)
def test_what_is_left_of_partial_sums_has_their_sign(total, sign):
    x = sign * normed(torch.randn(2, 3, 6)).abs()
    s = x.cumsum(-1)
    for left, of in ((total(s) - s, sign), (s - total(s), -sign)):
        assert left._range == (Range(0.0, INF) if of > 0 else Range(-INF, 0.0))
        assert (of * left.backing).min() >= -1e-9
    for other in (
        s[:, -1:] - s,
        s[:, :, :1] - s,
        total(x.cumsum(-1)) - s,
        s - 2 * total(s),
        total(s.flip(-1)) - s.flip(-1),
        s - s.roll(1, -1),
    ):
        assert other._range is None or not (other._range.low >= 0 or other._range.high <= 0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("number", range(12))
def test_differences_of_partial_sums(number, sign):
    """With a mask, and dimensions, at random: the range is right, and says something where only earlier places are kept."""
    pick = random.Random(seeded(number))
    x = sign * normed(torch.randn(3, 3, generator=torch.Generator().manual_seed(seeded(number)))).abs()
    s = x.cumsum(pick.choice([0, 1]))
    dims = [[pick.randrange(-3, 3)] + [pick.randrange(-4, 4)] * pick.randint(0, 1) for _ in range(2)]
    a, b = (s.unsqueeze(d[0]) if len(d) == 1 else s.unsqueeze(d[0]).unsqueeze(d[1]) for d in dims)
    mask = pick.choice([torch.ones(3, 3).triu(1), torch.ones(3, 3).triu(0), torch.ones(3, 3).tril(-1), torch.ones(3, 3).triu(2)])
    left = (a - b).masked_fill(mask.bool(), pick.choice([0.0, sign * 1e9, -sign]))
    found = left._range or Range()
    assert found.low - 1e-6 <= left.backing.min() and left.backing.max() <= found.high + 1e-6


def gated_delta_decays(decay):
    s = decay.cumsum(dim=2)
    hidden = torch.ones(6, 6, dtype=torch.bool, device=decay.device).triu(1)
    return (s.unsqueeze(3) - s.unsqueeze(2)).masked_fill(hidden, float("-inf")).exp()


def test_decays_between_places_are_at_most_one():
    """As gated delta networks have them: in eager mode, in a trace, in a norm map without data."""
    x = -F.softplus(torch.randn(2, 3, 6) * 3)
    f = lambda x: gated_delta_decays(-F.softplus(x))  # noqa: E731
    runs = {
        "eager": lambda: gated_delta_decays(-F.softplus(normed(x))),
        "trace": lambda: thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x)),
        "map": lambda: build_norm_map(f, torch.empty(2, 3, 6, device="meta"))(RMSTensor(1.0)),
    }
    for name, run in runs.items():
        assert run().norm_size.item() == 1.0, name


def test_decays_of_a_chunk_are_at_most_one():
    """As Mamba-2 has them."""
    a = -F.softplus(normed(torch.randn(2, 8)) * 30)
    s = a.cumsum(-1)
    decay = torch.exp(s[:, -1:] - s)
    assert decay.backing.max() <= 1 and decay.norm_size.item() == 1.0


GATES = {  # and the largest entry of each
    "rest": (lambda x: 1 - torch.sigmoid(x), 1.0),
    "rest of the rest": (lambda x: 1 - (1 - torch.sigmoid(x)), 1.0),
    "negative": (lambda x: torch.sigmoid(x) - 1, 1.0),
    "centred": (lambda x: torch.sigmoid(x) - 0.5, 0.5),
    "two gates": (lambda x: torch.sigmoid(x) - torch.sigmoid(-x), 1.0),
    "with alpha": (lambda x: torch.rsub(torch.sigmoid(x), 1, alpha=2), 1.0),
    "opacity": (lambda x: 1 - torch.exp(-torch.relu(x) * 3), 1.0),
    "transmittance": (lambda x: torch.cumprod(1 - torch.sigmoid(x), -1), 1.0),
    "product": (lambda x: (1 - torch.sigmoid(x)).prod(-1), 1.0),
    "in place": (lambda x: torch.sigmoid(x).sub_(1), 1.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GATES)
def test_sums_and_products_of_what_is_bounded_are_no_larger_than_their_entries(name, dtype):
    """A gate and its rest: 1 - sigmoid(x) is at most 1, whatever the norm of the sigmoid is."""
    f, largest = GATES[name]
    for sign in (1, -1):
        x = torch.full((2, 4), 12.0 * sign, dtype=dtype)
        for kind in (RMSTensor, LinfTensor):
            y = f(kind.of(x))
            assert y.norm_size.item() == pytest.approx(largest, rel=1e-2 if dtype.itemsize == 2 else 1e-6)
            assert type(y).of(f(x), y.elem_dims).norm_size <= y.norm_size
        with norm_mode("typical"):
            assert f(RMSTensor.of(x)).norm_size <= largest * 1.01
    reached = max(f(torch.full((2, 4), 12.0 * sign, dtype=dtype)).abs().max() for sign in (1, -1))
    assert reached >= 0.98 * largest


def test_traced_sums_of_what_is_bounded_have_the_norms_of_eager_ones():
    x = torch.full((2, 4), 12.0)
    y = thunder.jit(lambda x: [f(x) for f, _ in GATES.values()], transforms=[NormTransform()])(RMSTensor.of(x))
    assert [t.norm_size.item() for t in y] == [pytest.approx(f(RMSTensor.of(x)).norm_size.item()) for f, _ in GATES.values()]


def test_rest_of_a_gate_moves_as_before():
    """The cap says nothing of sensitivities: the slope of 1 - sigmoid is 1/4 at 0, where the value's own derivative is 0."""
    x = with_perturbation(RMSTensor(40.0, backing=torch.zeros(2, 4)))
    assert sensitivities(1 - torch.sigmoid(x), [x])[0].item() == pytest.approx(0.25)


def test_entropies_of_what_may_be_zero_have_bounds_where_nothing_moves():
    """Of codes that are chosen (perplexities of wav2vec 2.0's codebooks, in eval mode)."""
    torch.manual_seed(seeded(0))
    scores = RMSTensor.of(torch.randn(6, 4))
    one_hot = scores.new_zeros(6, 4).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0).mean(0)
    for p in (one_hot, RMSTensor.of(torch.rand(6, 4) * 9).abs()):
        found = torch.xlogy(p, p)
        actual = RMSTensor.of(torch.xlogy(p.backing, p.backing), found.elem_dims).norm_size
        assert actual <= found.norm_size * (1 + 1e-6)
        assert found.norm_size.isfinite()
