"""Normalizations in any spelling: the bound follows from what a program computes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import build_norm_map, norm_report, rules  # noqa: F401
from thunder_norm.audit import Ball, Case, check, search
from thunder_norm.core.context import norm_mode, norm_sensitivity
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform

EPS, SHIFT, FLOOR = 1e-3, 0.02, 0.3
FEW = {"steps": 12, "seed": seeded(), "restarts": 4}
Spelled = Callable[..., torch.Tensor]


def _count(x, dims):
    return math.prod(x.shape[d] for d in dims)


def _moved_to_end(t, dims):
    return t.movedim(dims, tuple(range(-len(dims), 0)))


def _summed(t, dims):
    for d in sorted((d % t.ndim for d in dims), reverse=True):
        t = t.sum(d)
    return t


def _is_last(t, dims):
    return min(d % t.ndim for d in dims) + len(dims) == t.ndim


def _flat(t, dims):
    """The last dimensions as one."""
    return t.view(*t.shape[: t.ndim - len(dims)], -1)


# -- a generator of spellings ---------------------------------------------------------------------------------------------

MEANS: dict[str, Spelled] = {
    "mean": lambda t, dims: t.mean(dims, keepdim=True),
    "sum / n": lambda t, dims: t.sum(dims, keepdim=True) / _count(t, dims),
    "sum * n**-1": lambda t, dims: _count(t, dims) ** -1 * torch.sum(t, dim=dims, keepdim=True),
    "one after the other": lambda t, dims: _kept(t.mean(dims), t, dims),
    "in double": lambda t, dims: t.double().mean(dims, keepdim=True),
    "each dimension": lambda t, dims: functools.reduce(lambda m, d: m.mean(d, keepdim=True), dims, t),
    "of a flat view": lambda t, dims: _kept(_flat(t, dims).mean(-1), t, dims) if _is_last(t, dims) else t.mean(dims, True),
    "sums of each dimension / n": lambda t, dims: _kept(_summed(t, dims) / _count(t, dims), t, dims),
}
SQUARES: dict[str, Spelled] = {
    "pow": lambda t: t.pow(2),
    "**": lambda t: t**2.0,
    "square": lambda t: t.square(),
    "t * t": lambda t: t * t,
    "of the negative": lambda t: (-t).pow(2),
    "halves": lambda t: (t / 2) ** 2 * 4,
    "in double": lambda t: t.double().square(),
    "of a copy": lambda t: t * t.clone(),
}
CENTRED: dict[str, Spelled] = {
    "x - m": lambda x, m: x - m,
    "-(m - x)": lambda x, m: -(m - x),
    "add alpha": lambda x, m: torch.add(x, m, alpha=-1),
    "shifted": lambda x, m: (x + 1.0) - (m + 1.0),
    "2 x - 2 m": lambda x, m: (2 * x - 2 * m) * 0.5,
}
VARIANCES: dict[str, Spelled] = {
    "var": lambda x, dims: x.var(dims, unbiased=False, keepdim=True),
    "correction": lambda x, dims: torch.var(x, dims, correction=0, keepdim=True),
    "of a flat view": lambda x, dims: (
        _kept(_flat(x, dims).var(-1, unbiased=False), x, dims) if _is_last(x, dims) else x.var(dims, False, True)
    ),
    "std squared": lambda x, dims: x.std(dims, correction=0, keepdim=True) ** 2,
    "var_mean": lambda x, dims: torch.var_mean(x, dims, correction=0, keepdim=True)[0],
    "unbiased, corrected": lambda x, dims: x.var(dims, keepdim=True) * ((_count(x, dims) - 1) / _count(x, dims)),
    "m2 - m1^2": lambda x, dims: x.square().mean(dims, keepdim=True) - x.mean(dims, keepdim=True) ** 2,
}
LENGTHS: dict[str, Spelled] = {
    "norm": lambda t, dims: t.norm(dim=dims, keepdim=True) / math.sqrt(_count(t, dims)),
    "vector_norm": lambda t, dims: torch.linalg.vector_norm(t, dim=dims, keepdim=True) * _count(t, dims) ** -0.5,
}
ROOTS: dict[str, Spelled] = {"sqrt": torch.sqrt, "pow": lambda q: q**0.5, "of 4 q": lambda q: (4 * q).sqrt() / 2}
BEHIND: dict[str, Spelled] = {
    "nothing": lambda r: r,
    "shift": lambda r: r + SHIFT,
    "shift before": lambda r: SHIFT + r,
    "clamp": lambda r: r.clamp(min=FLOOR),
    "clamp_min": lambda r: torch.clamp_min(r, FLOOR),
}
QUOTIENTS: dict[str, Spelled] = {
    "/": lambda t, r: t / r,
    "inverse": lambda t, r: t * (1 / r),
    "reciprocal": lambda t, r: r.reciprocal() * t,
    "** -1": lambda t, r: r**-1 * t,
    "expanded": lambda t, r: t / r.expand_as(t),
    "three halves": lambda t, r: (1.5 * t) / r / 1.5,
}


def _kept(m, t, dims):
    """Dimensions of size 1 put back, in one of several ways."""
    for d in sorted(d % t.ndim for d in dims):
        m = m.unsqueeze(d)
    return m


@dataclass
class Program:
    """One spelling, and what it computes: x, minus its mean if `is_centred`, over max(sqrt(mean square + eps) + shift, floor)."""

    seed: int

    def __post_init__(self):
        pick = random.Random(seeded(self.seed))
        self.dims = pick.choice([(-1,), (-2, -1), (1,), (1, 2)])
        self.is_centred = pick.random() < 0.6
        self.is_length = not self.is_centred and pick.random() < 0.3
        self.eps = pick.choice([EPS, 4 * EPS])
        self.spelled = {
            name: pick.choice(sorted(table))
            for name, table in (
                ("mean", MEANS), ("square", SQUARES), ("centred", CENTRED), ("variance", VARIANCES), ("root", ROOTS),
                ("behind", BEHIND), ("quotient", QUOTIENTS), ("length", LENGTHS),
            )
        }  # fmt: skip
        self.by_variance = self.is_centred and pick.random() < 0.5
        if self.is_length and self.spelled["behind"] == "nothing":  # it needs something to be away from 0
            self.spelled["behind"] = "shift"

    def __repr__(self):
        return f"{self.seed}: over {self.dims}, " + ", ".join(f"{k} {v!r}" for k, v in self.spelled.items())

    def __call__(self, x):
        say, dims = self.spelled, self.dims
        t = CENTRED[say["centred"]](x, MEANS[say["mean"]](x, dims)) if self.is_centred else x
        if self.is_length:
            root = LENGTHS[say["length"]](t, dims)
        else:
            square = (
                VARIANCES[say["variance"]](x, dims) if self.by_variance else MEANS[say["mean"]](SQUARES[say["square"]](t), dims)
            )
            root = ROOTS[say["root"]](square + self.eps)
        return QUOTIENTS[say["quotient"]](t, BEHIND[say["behind"]](root))

    def divisor(self, r):
        """By hand: what x is divided by where its mean square is r^2."""
        d = math.sqrt(r**2 + (0 if self.is_length else self.eps))
        d += SHIFT if "shift" in self.spelled["behind"] else 0
        return max(d, FLOOR) if "clamp" in self.spelled["behind"] else d

    def by_hand(self, x):
        """What it computes, in one way."""
        t = x - x.mean(self.dims, keepdim=True) if self.is_centred else x
        q = t.square().mean(self.dims, keepdim=True)
        d = (q + (0 if self.is_length else self.eps)).sqrt()
        d = d + SHIFT if "shift" in self.spelled["behind"] else d
        return t / (d.clamp(min=FLOOR) if "clamp" in self.spelled["behind"] else d)


PROGRAMS = [Program(i) for i in range(120)]


def normed(n, dims, shape=(2, 3, 4), kind=RMSTensor):
    t = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    return kind(n, backing=t * (n / t.abs().amax()), elem_dims=() if kind is LinfTensor else dims, perturbation_size=1.0)


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_bound_is_that_of_what_is_computed(program):
    for kind in (RMSTensor, LinfTensor):
        x = normed(0.7, program.dims, kind=kind)
        y = program(x)
        torch.testing.assert_close(y.backing, program.by_hand(x.backing), rtol=1e-9, atol=1e-12)
        assert y.norm_size.item() == pytest.approx(0.7 / program.divisor(0.7), rel=1e-9)
        assert y.perturbation_size.item() == pytest.approx(1 / program.divisor(0), rel=1e-9)


@dataclass
class Gained(Program):
    """A spelling in which the gain comes before the division."""

    def __call__(self, x, gain):
        quotient = QUOTIENTS[self.spelled["quotient"]]
        with pytest.MonkeyPatch.context() as m:
            m.setitem(QUOTIENTS, self.spelled["quotient"], lambda t, r: quotient(gain * t if self.seed % 2 else t * gain, r))
            return super().__call__(x)


GAINED = [p for p in map(Gained, range(60)) if p.spelled["quotient"] != "three halves"]


@pytest.mark.parametrize("program", GAINED, ids=repr)
def test_gain_before_the_division_multiplies_the_normalization(program):
    x, g = normed(0.7, program.dims), torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)[:, None]
    gain = LinfTensor(2.0, backing=g, perturbation_size=0.3)
    for given, moved in ((g, 0.0), (gain, 0.3)):
        y = program(x, given)
        torch.testing.assert_close(y.backing, g * program.by_hand(x.backing), rtol=1e-9, atol=1e-12)
        assert y.norm_size.item() <= 2 * 0.7 / program.divisor(0.7) * (1 + 1e-9)
        assert y.perturbation_size.item() <= (2 / program.divisor(0) + moved * 0.7 / program.divisor(0.7)) * (1 + 1e-9)


@pytest.mark.parametrize("program", GAINED[:10], ids=repr)
def test_bound_with_a_gain_before_the_division_holds(program):
    balls = [Ball("x", RMSTensor, (2, 3, 2), 0.4, elem_dims=program.dims), Ball("gain", LinfTensor, (3, 1), 1.5)]
    check(program, balls, tight=0, **FEW)


def test_gain_may_be_longer_than_what_is_normalized_and_a_length_of_another_tensor_is_none():
    x, z, gain = normed(0.7, (-1,)), normed(0.7, (-1,)), torch.full((5, 1, 1, 1), 3.0, dtype=torch.float64)
    length = x.square().mean(-1, keepdim=True).add(EPS).sqrt()
    assert (gain * x / length).norm_size.item() == pytest.approx(3 * 0.7 / math.sqrt(0.49 + EPS))
    assert (gain * z / length).norm_size.item() == pytest.approx(3 * 0.7 / math.sqrt(EPS))


@pytest.mark.parametrize("program", PROGRAMS[:12], ids=repr)
def test_bound_holds(program):
    check(program, [Ball("x", RMSTensor, (2, 3, 2), 0.4, elem_dims=program.dims)], tight=0, **FEW)


@pytest.mark.parametrize("program", PROGRAMS[12:24], ids=repr)
def test_local_sensitivity_is_that_of_the_smallest_group(program):
    x = normed(0.7, program.dims)
    with norm_sensitivity("local"):
        y = program(x)
    t = x.backing - x.backing.mean(program.dims, keepdim=True) if program.is_centred else x.backing
    smallest = t.square().mean(program.dims).sqrt().amin().item()
    assert y.perturbation_size.item() == pytest.approx(1 / program.divisor(smallest), rel=1e-6)


@pytest.mark.parametrize("program", PROGRAMS[24:36], ids=repr)
def test_typical_and_modula_modes_are_those_of_a_normalization(program):
    with norm_mode("modula"):
        y = program(normed(1.0, program.dims))
    assert y.norm_size.item() == 1.0
    assert y.perturbation_size.item() == pytest.approx(1.0)
    with norm_mode("typical"):
        y = program(normed(0.7, program.dims, shape=(4, 16, 9)))
    assert y.perturbation_size.item() == pytest.approx(1 / program.divisor(0.7), rel=0.1)


# -- programs with mistakes in them ---------------------------------------------------------------------------------------


@dataclass
class Mistaken(Program):
    """A spelling of which a part is done to another tensor, over other dimensions, or put beside the wrong entries."""

    def __call__(self, x):
        pick = random.Random(seeded(self.seed + 1))
        say, dims = self.spelled, self.dims
        other = pick.choice([(-1,), (-2,), (-2, -1), dims])
        source = pick.choice([x, x.flip(-1), x + 0.3, x.transpose(-1, -2), torch.relu(x), x])
        t = CENTRED[say["centred"]](x, MEANS[say["mean"]](source, other)) if self.is_centred else pick.choice([x, source])
        square = SQUARES[say["square"]](pick.choice([t, source]))
        # without keepdim, on a cube, the numbers broadcast beside other entries than their group's
        where = pick.choice([dims, other])
        q = square.mean(where[0]) if pick.random() < 0.5 else MEANS[say["mean"]](square, where)
        if pick.random() < 0.3:
            q = q.transpose(-1, -2)
        root = ROOTS[say["root"]](q * pick.choice([1, 3]) + self.eps * 100)
        y = QUOTIENTS[say["quotient"]](pick.choice([t, source, t * 2 - x]), BEHIND[say["behind"]](root))
        return y


@pytest.mark.parametrize("seed", range(40))
def test_programs_with_mistakes_are_sound_or_refused(seed):
    program = Mistaken(seed)
    ball = Ball("x", RMSTensor, (3, 3, 3), 0.4, elem_dims=random.Random(seeded(seed)).choice([(-1,), program.dims, (-3, -2, -1)]))
    try:
        found = search(program, [ball], sensitivity=True, steps=8, restarts=2, seed=seeded(seed))
    except NormMismatchError:
        return
    assert found.is_sound, (program, found)


# -- other forms ----------------------------------------------------------------------------------------------------------


def einsum(x):
    return x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + EPS)


def einsum_named(x):
    return x / torch.sqrt(torch.einsum("abc, abc -> ab", x, x).unsqueeze(2) / x.shape[-1] + EPS)


def viewed(x):
    return x * (x.pow(2).mean(-1).reshape(*x.shape[:2], 1) + EPS).pow(-0.5)


def squeezed(x):
    return x / (x.norm(dim=-1, keepdim=True).squeeze(-1).div(x.shape[-1] ** 0.5).square() + EPS).sqrt()[:, :, None]


def at_the_end(x):
    return torch.mul(torch.reciprocal((x * x).mean((-1,), True).add(EPS).sqrt()), x)


def detached(x):
    return x / (x.detach().pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("call", [einsum, einsum_named, viewed, squeezed, at_the_end, detached], ids=lambda f: f.__name__)
def test_other_ways_to_have_one_number_for_each_group(call):
    y = call(normed(0.7, (-1,)))
    assert y.norm_size.item() == pytest.approx(0.7 / math.sqrt(0.49 + EPS))
    assert y.perturbation_size.item() == pytest.approx(1 / math.sqrt(EPS))


def by_copies(x):
    q = x.double().clone().square().mean(-1, keepdim=True) + EPS
    return x.detach() / q.to(torch.float64).type(torch.float64).sqrt().contiguous()


def by_views(x):
    q = torch.squeeze(x.square().mean(-1, keepdim=True), -1).view(-1, 1).view_as(torch.empty(*x.shape[:-1], 1))
    q = torch.rsub(torch.rsub(q, 1.0), 1.0 + EPS).reshape_as(q)[..., :]
    return x * q.pow(-0.5).broadcast_to(x.shape)


def by_difference(x):
    y = torch.rsub(x.mean(-1, keepdim=True), x)
    return y / (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square() + EPS).sqrt().expand(x.shape)


def by_parts(x):
    variance, m = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.sub(x, m, alpha=1) * torch.rsqrt(variance.type_as(x) - (-EPS)).expand(-1, x.shape[-1])


def by_deviation(x):
    deviation, m = torch.std_mean(x, -1, unbiased=False, keepdim=True)
    return -(m - x) * torch.reciprocal(torch.clamp_min(deviation, 0.1))


def by_length(x):
    return x / torch.linalg.norm(x, dim=-1, keepdim=True).div(x.shape[-1] ** 0.5).clamp(min=0.1)


def by_norm(x):
    return x * (1 / (torch.norm(x, 2, -1).unsqueeze(0).squeeze(0)[:, None] * x.shape[-1] ** -0.5 + 0.1))


def by_vector_norm(x):
    return x / (0.1 + torch.linalg.vector_norm(x, dim=(-1,)).reshape(-1, 1) / x.shape[-1] ** 0.5).expand_as(x)


def by_half(x):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt().bfloat16().float().half().double()


def by_aten(x):
    aten = torch.ops.aten
    q = aten.alias(x).square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(torch.alias_copy(aten._to_copy(torch.ops.prims.convert_element_type(q, torch.float64))) + EPS)
    return x * inverse


WHOLE = [
    by_copies, by_views, by_difference, by_parts, by_deviation, by_length, by_norm, by_vector_norm, by_aten, einsum, einsum_named,
]  # fmt: skip


def gain_over_length(x, gain):
    return gain * (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()


def gain_by_inverse(x, gain):
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def inverse_by_gain(x, gain):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (x * gain)


CASES = [
    Case(f.__name__, f, (Ball("x", RMSTensor, (1, 2, 3) if "einsum" in f.__name__ else (2, 3), 0.4),), 0.0, FEW)
    for f in (*WHOLE, by_half)
] + [
    Case(f.__name__, f, (Ball("x", RMSTensor, (2, 3), 0.4), Ball("gain", LinfTensor, (3,), 1.5)), 0.0, FEW)
    for f in (gain_over_length, gain_by_inverse, inverse_by_gain)
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_of_each_way_holds(case):
    case.check(seeded())


@pytest.mark.parametrize("call", WHOLE[:-2], ids=lambda f: f.__name__)
def test_each_way_has_the_bound_of_the_whole(call):
    y = call(normed(0.7, (-1,), shape=(3, 4)))
    shift, floor, eps = ((0.1, 0, 0), (0, 0.1, 0), (0, 0, EPS))[
        0 if call in (by_norm, by_vector_norm) else 1 if call in (by_deviation, by_length) else 2
    ]
    assert y.norm_size.item() == pytest.approx(0.7 / max(math.sqrt(0.49 + eps) + shift, floor))
    assert y.perturbation_size.item() == pytest.approx(1 / max(math.sqrt(eps) + shift, floor))


def test_whole_tensor_and_leading_dimensions():
    x = normed(0.7, (-3, -2, -1))
    y = (x - x.mean()) / (x.std(unbiased=False) + SHIFT)
    assert y.perturbation_size.item() == pytest.approx(1 / SHIFT)
    x = normed(0.7, (-3,))
    y = x / (x.square().mean(0) + EPS).sqrt()
    assert y.perturbation_size.item() == pytest.approx(1 / math.sqrt(EPS))


def test_low_precision_divisor_claims_its_rounding():
    x = normed(0.7, (-1,))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS).to(torch.bfloat16)
    y = x * scale
    assert 0.7 / math.sqrt(0.49 + EPS) < y.norm_size.item() < 1.005 * 0.7 / math.sqrt(0.49 + EPS)
    assert RMSTensor.of(y.backing).norm_size <= y.norm_size


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8),
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8),
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-9),
    ],
)
def test_eps_that_a_dtype_rounds_to_zero_guards_nothing(call):
    def given(dtype):
        return RMSTensor(0.7, backing=torch.zeros(3, 4, dtype=dtype), elem_dims=(-1,), perturbation_size=1.0)

    assert call(given(torch.float16).backing).isnan().all()
    x = given(torch.float16)
    assert call(x).perturbation_size >= (x / x.norm(dim=-1, keepdim=True)).perturbation_size
    assert call(given(torch.float32)).perturbation_size < 1e9


def test_division_by_a_length_that_may_be_zero_has_a_local_bound_at_the_data():
    def unguarded(x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)

    x = normed(0.7, (-1,))
    still = unguarded(RMSTensor(0.7, backing=x.backing))
    assert still.norm_size.item() == pytest.approx(math.sqrt(3 / 4))
    with norm_sensitivity("local"):
        y = unguarded(x)
    smallest = x.backing.std(-1, unbiased=False).amin().item() * math.sqrt(4 / 3)
    assert y.norm_size.item() == pytest.approx(math.sqrt(3 / 4))
    assert y.perturbation_size.item() == pytest.approx(1 / smallest)


def test_lengths_and_variances_move_with_x():
    """A length is 1-Lipschitz, whatever is computed of it; a root of a mean square alone has an infinite slope at 0."""
    x = normed(0.7, (-1,))
    y = (x * x).sum(-1, keepdim=True).sqrt()
    assert y.norm_size.item() == pytest.approx(0.7 * 2)
    assert y.perturbation_size.item() == pytest.approx(2)
    y = (x.var(-1, unbiased=False) + EPS).sqrt()
    assert y.perturbation_size.item() == pytest.approx(1)


@pytest.mark.parametrize(
    "call, balls",
    [
        (lambda x: (x * x).sum(-1).sqrt(), (2, 3)),
        (lambda x: (x.square().mean((-2, -1)) + EPS).rsqrt(), (2, 3)),
        (lambda x: (x.square().mean(-1) - x.mean(-1) ** 2 + EPS).sqrt(), (2, 3)),
        (lambda x: x.mean(-1) ** 2 + x.square().mean(-1), (2, 3)),
        (lambda x: (x.var(-1) + 1).clamp(min=1.1), (2, 3)),
    ],
)
@pytest.mark.parametrize("dims", [(-1,), (-2,), (-2, -1)])
def test_numbers_of_groups_are_bounded(call, balls, dims):
    check(call, [Ball("x", RMSTensor, balls, 0.5, elem_dims=dims)], tight=0, **FEW)


@pytest.mark.parametrize("equation", ["a...d,a...d->...a", "ab...,ab...->...a", "abc,abc->ba"])
def test_einsum_that_puts_its_groups_elsewhere_is_no_length_of_them(equation):
    def call(x):
        return x * torch.rsqrt(torch.einsum(equation, x, x)[..., None] / 3 + EPS)

    ball = Ball("x", RMSTensor, (3, 3, 3), 0.4, elem_dims=(-1,))
    try:
        assert search(call, [ball], sensitivity=True, steps=12, restarts=4, seed=seeded()).is_sound
    except NormMismatchError:
        return


class Net(torch.nn.Module):
    """A normalization between two layers."""

    def __init__(self, f):
        super().__init__()
        self.a, self.f, self.b = torch.nn.Linear(8, 8), f, torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.f(self.a(x)).to(x.dtype))  # a part of some is in double


@pytest.mark.parametrize("program", [Program(200 + i) for i in range(3)], ids=repr)
def test_traced_eager_and_norm_map_agree(program):
    import thunder

    torch.manual_seed(seeded(1))
    model, x = Net(program), torch.randn(4, 8, 8)
    eager = norm_report(build_norm_map(model, x, parameters="measured"), RMSTensor.of(x), sensitivity="global")
    jitted = thunder.jit(model, transforms=[NormTransform()])
    torch.testing.assert_close(jitted(x), model(x))
    traced = norm_report(jitted, RMSTensor.of(x), sensitivity="global")
    on_meta = build_norm_map(model, torch.empty(4, 8, 8, device="meta"), parameters="measured")(RMSTensor.of(x))
    assert list(traced)[-1].norm_size == pytest.approx(list(eager)[-1].norm_size, rel=1e-5)
    assert float(on_meta.norm_size) == pytest.approx(list(eager)[-1].norm_size, rel=1e-5)
    assert on_meta.norm_size >= RMSTensor.of(model(x), elem_dims=on_meta.elem_dims).norm_size
