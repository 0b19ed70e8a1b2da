"""Rounded division, remainders, parts of floating point numbers, sums of exponentials: bounds against adversarial inputs."""

from __future__ import annotations

import math

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import Ball, Case, norm, start
from thunder_norm.core.context import norm_mode
from thunder_norm.core.known_ranges import known_range
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

R, INF = RMSTensor, LinfTensor
D = torch.float64


def x(*shape, n=1.0, dims=None, kind=R):
    return Ball("x", kind, shape, n, dims)


def y(*shape, n=0.6, dims=None, kind=R):
    return Ball("y", kind, shape, n, dims)


divisors = torch.tensor([0.5, -2.0, 1.0, 0.1], dtype=D)
integers = torch.tensor([1, -2, 3, 2])
positive = torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=D)
both = (x(2, 4), y(2, 4))
entries = (x(2, 4, kind=INF), y(2, 4, kind=INF))
APART = {"witnesses": [[torch.ones(2, 4), -0.6 * torch.ones(2, 4)], [torch.ones(2, 4), 0.6 * torch.ones(2, 4)]]}

at = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=D).expand(2, 4)


def heaviside_at(v):
    """What torch has no derivative of."""
    return torch.heaviside(at, v) if isinstance(v, NormedTensor) else torch.where(at == 0, v, 1.0)


CASES = [
    Case("logaddexp", torch.logaddexp, entries, 0.99, APART),
    Case("logaddexp, large", torch.logaddexp, (x(2, 4, n=20.0), y(2, 4, n=20.0)), 0.95, APART),
    Case("logaddexp, RMS", torch.logaddexp, both, 0.75, APART),
    Case("logaddexp2", torch.logaddexp2, entries, 0.99, APART),
    Case("logaddexp2, RMS", torch.logaddexp2, both, 0.75, APART),
    Case("logaddexp, broadcast", torch.logaddexp, (x(3, 2, 4), y(4)), 0.7),
    Case("xlogy", lambda a: torch.xlogy(a, positive), (x(2, 4),)),
    Case("xlogy of integers", lambda a: torch.xlogy(a, torch.tensor([1, 2, 3, 4])), (x(2, 4),)),
    Case("xlogy of a number", lambda a: torch.xlogy(a, 0.3), (x(2, 4),)),
    Case("xlog1py", lambda a: torch.special.xlog1py(a, positive), (x(2, 4),)),
    Case("xlog1py of a number", lambda a: torch.special.xlog1py(a, -0.3), (x(2, 4),)),
    Case("ldexp", lambda a: torch.ldexp(a, integers), (x(2, 4),)),
    Case("ldexp, broadcast", lambda a: torch.ldexp(a, integers), (x(4),)),
    Case("ldexp by a normed tensor", torch.ldexp, (x(2, 4), y(2, 4, kind=INF))),
    Case("heaviside's values", heaviside_at, (x(2, 4, n=20.0),)),
    Case("heaviside's values, entries", heaviside_at, (x(2, 4, n=2.0, kind=INF),)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())
    case.check_at(2.0, seeded())


def zeros_in(t):
    return torch.where(t > 0.5, torch.zeros_like(t), t)


# name, function, inputs, what of the value some start attains: less than the least of 400 seeds
STEPS = [
    ("trunc", lambda a: torch.div(a, 0.3, rounding_mode="trunc"), (x(2, 4),), 0.8),
    ("floor", lambda a: torch.div(a, -0.3, rounding_mode="floor"), (x(2, 4),), 0.8),
    ("floor of a little", lambda a: torch.div(a, 3, rounding_mode="floor"), (x(2, 4, n=0.01),), 0.99),
    ("trunc by a tensor", lambda a: torch.div(a, divisors, rounding_mode="trunc"), (x(2, 4),), 0.5),
    ("floor by integers", lambda a: torch.div(a, integers, rounding_mode="floor"), (x(2, 4),), 0.35),
    ("floor_divide", lambda a: torch.floor_divide(a, 0.3), (x(2, 4),), 0.8),
    ("//", lambda a: a // 0.25, (x(2, 4),), 0.7),
    ("floor_divide by a tensor", lambda a: torch.floor_divide(a, divisors), (x(2, 4, kind=INF),), 0.8),
    ("fmod", lambda a: torch.fmod(a, -0.7), (x(2, 4),), 0.5),
    ("fmod of two", torch.fmod, both, 0.7),
    ("fmod by a plain tensor", lambda a: torch.fmod(a, divisors), (x(2, 4),), 0.5),
    ("fmod by integers", lambda a: torch.fmod(a, integers), (x(2, 4),), 0.9),
    ("fmod of a plain tensor", lambda b: torch.fmod(divisors, b), (x(2, 4),), 0.3),
    ("fmod, broadcast", torch.fmod, (x(2, 3, 4), y(3, 1)), 0.3),
    ("remainder", lambda a: torch.remainder(a, -0.7), (x(2, 4),), 0.5),
    ("%", lambda a: a % 0.7, (x(2, 4),), 0.5),
    ("remainder of two", torch.remainder, (x(2, 4, n=0.01), y(2, 4)), 0.9),
    ("remainder by a plain tensor", lambda a: torch.remainder(a, divisors), (x(2, 4, n=0.01),), 0.75),
    ("remainder by integers", lambda a: torch.remainder(a, integers), (x(2, 4, n=0.01),), 0.7),
    ("remainder of a number", lambda b: torch.remainder(-0.001, b), (x(2, 4),), 0.9),
    ("number %", lambda b: -0.001 % b, (x(2, 4),), 0.9),
    ("remainder of a plain tensor", lambda b: torch.remainder(-0.001 * torch.ones(4, dtype=D), b), (x(2, 4),), 0.9),
    ("remainder, broadcast", torch.remainder, (x(2, 3, 4, n=0.01), y(3, 1)), 0.9),
    ("atan2", torch.atan2, (x(2, 4, n=1e-3), y(2, 4)), 0.7),
    ("arctan2 of a plain tensor", lambda b: torch.arctan2(torch.full((4,), 1e-9, dtype=D), b), (x(2, 4),), 0.99),
    ("igamma", lambda a: torch.igamma(a.abs() if not isinstance(a, NormedTensor) else a, positive), (x(2, 4, n=1e-3),), 0.9),
    ("igammac", lambda a: torch.igammac(positive, a.abs() if not isinstance(a, NormedTensor) else a), (x(2, 4, n=1e-3),), 0.9),
    ("nextafter", torch.nextafter, (x(2, 4, n=1.0), y(2, 4, n=2.0)), 0.999),
    ("nextafter, plain", lambda a: torch.nextafter(a, divisors), (x(2, 4),), 0.999),
    ("frexp", lambda a: torch.frexp(a)[0], (x(2, 4),), 0.7),
    ("heaviside", lambda a: torch.heaviside(zeros_in(a) if not isinstance(a, NormedTensor) else a, divisors), (x(2, 4),), 0.5),
    ("angle", torch.angle, (x(2, 4),), 0.99),
    ("above the integer below", lambda a: a - a.floor(), (x(2, 4, n=7.0),), 0.4),
    ("below the next one", lambda a: (1 + a.floor()) - a, (x(2, 4, n=7.0),), 0.4),
    ("below the integer above", lambda a: torch.rsub(a, a.ceil()), (x(2, 4, n=7.0),), 0.4),
    ("from the nearest", lambda a: a.round() - a, (x(2, 4, n=7.0),), 0.4),
    ("beyond the one towards 0", lambda a: torch.sub(a, torch.trunc(a)), (x(2, 4, n=7.0),), 0.4),
]  # fmt: skip


VALUE_ONLY = {"sensitivity": False}
VALUES = [
    Case("floor", lambda a: torch.div(a, -0.3, rounding_mode="floor"), (x(2, 4),), 0.8, VALUE_ONLY),
    Case("floor by integers", lambda a: torch.div(a, integers, rounding_mode="floor"), (x(2, 4),), 0.49, VALUE_ONLY),
    Case("floor_divide", lambda a: torch.floor_divide(a, 0.3), (x(2, 4),), 0.8, VALUE_ONLY),
    Case("fmod", lambda a: torch.fmod(a, -0.7), (x(2, 4),), 0.75, VALUE_ONLY),
    Case("fmod by integers", lambda a: torch.fmod(a, integers), (x(2, 4),), 0.9, VALUE_ONLY),
    Case("remainder", lambda a: torch.remainder(a, -0.7), (x(2, 4),), 0.7, VALUE_ONLY),
    Case("remainder by integers", lambda a: torch.remainder(a, integers), (x(2, 4, n=0.01),), 0.7, VALUE_ONLY),
    Case("remainder of a number", lambda b: torch.remainder(-0.001, b), (x(2, 4),), 0.9, VALUE_ONLY),
]  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=lambda c: c.name)
def test_value_against_a_search(case):
    case.check(seeded())


@pytest.mark.parametrize("f, balls, attained", [s[1:] for s in STEPS], ids=[s[0] for s in STEPS])
def test_steps_have_a_value_but_no_sensitivity(f, balls, attained):
    best = 0.0
    for seed in range(24):
        generator = torch.Generator().manual_seed(seeded(seed))
        points = [start(b, seed + j * (seed // 8), generator) * b.norm_size for j, b in enumerate(balls)]
        out = f(*[b.normed(p) for b, p in zip(balls, points, strict=True)])
        real = f(*points)
        actual = norm(type(out), torch.nan_to_num(real, nan=0.0), out.elem_dims)
        assert out.shape == real.shape
        assert actual <= out.norm_size * (1 + 1e-12)
        best = max(best, actual.item() / out.norm_size.item())
    assert best >= attained, best
    with pytest.raises(NormMismatchError, match="jumps"):
        f(*[b.normed(p, 1.0) for b, p in zip(balls, points, strict=True)])
    size = torch.tensor(0.0, dtype=D, requires_grad=True)
    claim = f(*[b.kind(size, backing=p, elem_dims=b.elem_dims) for b, p in zip(balls, points, strict=True)]).norm_size
    assert torch.isfinite(claim)
    if claim.requires_grad:
        assert torch.isfinite(torch.autograd.grad(claim, size, allow_unused=True)[0] or torch.zeros(()))


CELLS = {
    "floor, long": (lambda t: t - t.floor().long(), 0.0, 1.0),
    "long of what is not negative": (lambda t: (s := t.square()) - s.to(torch.int64), 0.0, 1.0),
    "int": (lambda t: t - t.int(), -1.0, 1.0),
    "round, type": (lambda t: t.round().type(torch.int32) - t, -0.5, 0.5),
    "corners": (lambda t: 1 - (t - t.floor().long()), 0.0, 1.0),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_what_integers_leave_of_a_tensor_is_typically_no_larger_than_a_step(name, traced):
    call, low, high = CELLS[name]
    f = thunder.jit(call, transforms=[NormTransform(mode="typical")]) if traced else call
    t = torch.randn(3, 50, generator=torch.Generator().manual_seed(seeded(0)), dtype=D) * 40
    with norm_mode("typical"):
        y = f(RMSTensor.of(t))
    assert low <= y.backing.min() and y.backing.max() <= high
    torch.testing.assert_close(y.backing, call(t))
    assert y.norm_size <= max(-low, high)


@pytest.mark.parametrize("write", [lambda t, i: i.add_(3), lambda t, i: t.mul_(-2), lambda t, i: t.neg_()])
@pytest.mark.parametrize("cast", [lambda i: i, lambda i: i.long()])
def test_what_was_written_into_is_not_what_was_rounded(write, cast):
    with norm_mode("typical"):
        t = RMSTensor.of(torch.linspace(-9, 9, 8, dtype=D)) + 0.25
        i = cast(t.floor())
        write(t, i)
        left = t - i
    found = known_range(left)
    assert found.low <= left.backing.min() and left.backing.max() <= found.high


def test_what_is_left_of_infinity_by_itself_is_no_number_and_has_no_bound():
    t = RMSTensor.of(torch.tensor([1.5, math.inf]))
    assert not (t - t.floor()).norm_size < math.inf


def test_the_next_number_beyond_a_power_of_two():
    """Float64 norms of float32 numbers see the last bit."""
    for at in (1.0, 2.0**-126, 0.0):
        out = torch.nextafter(INF(torch.tensor(at, dtype=D), backing=torch.full((2,), at)), torch.full((2,), 9.0))
        assert out.backing.double().max() <= out.norm_size <= at * (1 + 2.0**-23) + 2.0**-126


def test_exponents_are_plain():
    mantissa, exponent = torch.frexp(R(3.0, backing=torch.tensor([3.0, 4.0])))
    assert isinstance(mantissa, NormedTensor) and not isinstance(exponent, NormedTensor)
    assert exponent.tolist() == [2, 3]


REFUSED = [
    (lambda a: torch.div(a, a, rounding_mode="floor"), "lower bound"),
    (lambda a: torch.div(1.0, a, rounding_mode="trunc"), "lower bound"),
    (lambda a: a // a, "lower bound"),
    (lambda a: 2.0 // a, "lower bound"),
    (lambda a: 2.0 / a, "lower bound"),
    (lambda a: a / 0, "by 0"),
    (lambda a: a // 0, "by 0"),
    (lambda a: torch.xlogy(a, a), "logarithm"),
    (lambda a: torch.xlogy(2.0, a), "logarithm"),
    (lambda a: torch.xlogy(a, -2.0), "positive"),
    (lambda a: torch.special.xlog1py(a, -1.0), "above -1"),
    (lambda a: torch.special.xlog1py(a, a), "logarithm"),
    (lambda a: torch.ldexp(a, a), "LinfTensor"),
]


@pytest.mark.parametrize("f, why", REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_bound_is_refused(f, why):
    with pytest.raises(NormMismatchError, match=why):
        f(R(1.0, backing=torch.ones(2, 4, dtype=D)))


def test_an_infinite_logarithm_is_an_infinite_bound():
    assert torch.xlogy(R(1.0, backing=torch.ones(2)), torch.tensor([0.0, 1.0])).norm_size.item() == math.inf
