"""Functions that programs write out: recognised by where their tensors come from, bounded as what they are, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import Ball, Case, check
from thunder_norm.core.context import norm_mode, norm_sensitivity
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.errors import NormMismatchError

FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
ROOT = math.sqrt(2 / math.pi)


def gpt2(x):
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def jax(x):
    return x * (0.5 * (1.0 + torch.tanh(ROOT * (x + 0.044715 * (x * x * x)))))


def by_square(x):
    return 0.5 * x * (torch.tanh(ROOT * x * (1 + 0.044715 * x**2)) + 1)


def erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def scaled_erf(x):
    return (1.0 + torch.erf(x * math.sqrt(2.0))) * x


def by_name(x):
    return 0.5 * x * torch.add(1.0, torch.erf(x / math.sqrt(2.0)))


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def swish(x):
    return torch.sigmoid(x) * x


def halved(x):
    y = x / 2
    return y * y.sigmoid() * 3


def by_function(x):
    return torch.mul(x, torch.mul(0.5, 1.0 + torch.erf(x / math.sqrt(2.0))))


def of_half_the_gate(x):
    return 2 * x * (torch.sigmoid(x) / 2)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = [
    (gpt2, tanh_gelu),
    (fast, tanh_gelu),
    (jax, tanh_gelu),
    (by_square, tanh_gelu),
    (erf, F.gelu),
    (by_name, F.gelu),
    (by_function, F.gelu),
    (of_half_the_gate, F.silu),
    (scaled_erf, lambda x: F.gelu(x * 2)),
    (quick, lambda x: F.silu(x * 1.702) / 1.702),
    (swish, F.silu),
    (halved, lambda x: F.silu(x * 0.5) * 3),
]


def normed(n=0.7, shape=(3, 4), kind=RMSTensor, dims=None):
    t = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    return kind(n, backing=t * (n / t.abs().amax()), elem_dims=dims, perturbation_size=1.0)


@pytest.mark.parametrize("mode", ["bound", "typical"])
@pytest.mark.parametrize("size", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
@pytest.mark.parametrize("written, fused", ACTIVATIONS, ids=lambda f: f.__name__)
def test_activation_written_out_has_the_bound_of_the_fused_one(written, fused, kind, size, mode):
    with norm_mode(mode):
        a, b = written(normed(size, kind=kind)), fused(normed(size, kind=kind))
    torch.testing.assert_close(a.backing, b.backing, rtol=1e-9, atol=1e-9)
    assert type(a) is type(b)
    assert a.norm_size.item() == pytest.approx(b.norm_size.item(), rel=1e-6)
    assert a.perturbation_size.item() == pytest.approx(b.perturbation_size.item(), rel=1e-6)


@pytest.mark.parametrize("written, fused", [(gpt2, tanh_gelu), (erf, F.gelu), (swish, F.silu)], ids=lambda f: f.__name__)
def test_modula_mode_takes_the_whole_for_one_operation(written, fused):
    with norm_mode("modula"):
        a, b = written(normed(1.0)), fused(normed(1.0))
    assert a.norm_size.item() == b.norm_size.item() == 1.0
    assert a.perturbation_size.item() == pytest.approx(b.perturbation_size.item())


WRITTEN = [Case(written.__name__, written, (Ball("x", RMSTensor, (2, 3), 1.3),), 0.9, FEW) for written, _ in ACTIVATIONS]


@pytest.mark.parametrize("case", WRITTEN, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


def other_cubic(x):
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * x**3)))


def other_gate(x):
    return x * torch.sigmoid(-x)


def gate_of_another(x):
    return x * torch.sigmoid(x + 0.3)


def gate_of_a_permutation(x):
    return x * torch.sigmoid(x.flip(-1))


def half_open(x):
    return 0.5 * x * (0.5 + torch.tanh(ROOT * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("call", [other_cubic, other_gate, gate_of_another, gate_of_a_permutation, half_open])
def test_what_only_looks_like_it_is_sound(call):
    check(call, [Ball("x", RMSTensor, (2, 3), 0.7)], tight=0, **FEW)


def test_in_place_change_breaks_the_chain():
    def call(x):
        y = x * 1.5
        gate = torch.sigmoid(y)
        y *= -10
        return y * gate

    out = call(normed())
    assert RMSTensor.of(out.backing).norm_size <= out.norm_size
    assert out.norm_size > 5


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


# angles of three tokens: how tight the bound of what is no rotation is depends on them
ANGLES = torch.tensor([[0.3, 1.1], [2.0, -0.7], [0.9, -2.4]], dtype=torch.float64).repeat(1, 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def rotary(x):
    return x * COS + rotate_half(x) * SIN


def rotary_reversed(x):
    return SIN * rotate_half(x) + COS * x


def unequal_gains(x):
    return x * COS + rotate_half(x) * SIN.flip(-1).exp()


def of_another(x):
    return x * COS + rotate_half(x + 1) * SIN


def wrong_half(x):
    x1, x2 = x[..., :2], x[..., 2:]
    return x * COS + torch.cat((x2, x1), dim=-1) * SIN


def q(dims=(-1,)):
    return (Ball("q", RMSTensor, (2, 3, 4), 1.3, dims),)


ROTARY = [
    Case("rotary", rotary, q()),
    Case("rotary, other order", rotary_reversed, q()),
    Case("rotary, norm over heads", rotary, q((-3, -1))),
    Case("rotary, norm over tokens", rotary, q((-2, -1))),
    Case("rotate_half", rotate_half, q()),
    Case("rotate_half, largest entries", rotate_half, (Ball("q", LinfTensor, (2, 3, 4), 1.3),)),
    Case("rotary, largest entries", rotary, (Ball("q", LinfTensor, (2, 3, 4), 1.3),), 0.5),
    Case("not a rotation", unequal_gains, q(), 0.8),
    Case("of another tensor", of_another, q(), 0.4),
    Case("another permutation", wrong_half, q(), 0.4),
]


@pytest.mark.parametrize("case", ROTARY, ids=lambda c: c.name)
def test_rotary_embedding_bound_holds_and_is_attained(case):
    check(case.call, case.balls, tight=case.tight, **FEW)


def test_rotary_embedding_is_an_isometry():
    out = rotary(normed(1.0, (2, 3, 4)))
    assert out.norm_size.item() == pytest.approx(1.0)
    assert out.perturbation_size.item() == pytest.approx(1.0)


# -- exponentials -------------------------------------------------------------------------------------------------------------


def by_largest(x):
    e = torch.exp(x - x.max(-1, keepdim=True)[0])
    return e / e.sum(-1, keepdim=True)


def by_constant(x):
    e = (x - x.amax(dim=-1, keepdim=True).detach()).exp()
    return torch.div(e, torch.sum(e, dim=-1, keepdim=True))


def by_mean(x):
    shifted = x - torch.relu(x).mean(-1, keepdim=True)
    return shifted.exp() / shifted.exp().sum(-1, keepdim=True)


def unshifted(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def by_log_sum(x):
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))


def by_log_softmax(x):
    return F.log_softmax(x, dim=-1).exp()


def softmax(x):
    return torch.softmax(x, -1)


def logistic(x):
    return 1 / (1 + torch.exp(-x))


def silu_by_exponential(x):
    return x / (1 + torch.exp(-x))


def silu_by_reciprocal(x):
    return torch.reciprocal(torch.exp(-1.7 * x) + 1.0) * x


def softplus_by_log(x):
    return torch.log(torch.add(1.0, x.exp()))


def softplus_by_log1p(x):
    return torch.log1p(torch.exp(x))


EXPONENTIALS = [
    *((f, softmax) for f in (by_largest, by_constant, by_mean, unshifted, by_log_sum, by_log_softmax)),
    (logistic, torch.sigmoid),
    (silu_by_exponential, F.silu),
    (silu_by_reciprocal, lambda x: F.silu(1.7 * x) / 1.7),
    (softplus_by_log, F.softplus),
    (softplus_by_log1p, F.softplus),
]


@pytest.mark.parametrize("sensitivity", ["global", "local"])
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
@pytest.mark.parametrize("written, fused", EXPONENTIALS, ids=lambda f: f.__name__)
def test_exponentials_written_out_have_the_bounds_of_the_fused_ones(written, fused, kind, sensitivity):
    with norm_sensitivity(sensitivity):
        a, b = written(normed(1.3, kind=kind)), fused(normed(1.3, kind=kind))
    torch.testing.assert_close(a.backing, b.backing, rtol=1e-9, atol=1e-9)
    assert type(a) is type(b)
    if sensitivity == "global":  # at the data each operation has the norms that its arguments have
        assert a.norm_size.item() == pytest.approx(b.norm_size.item(), rel=1e-6)
    assert type(a).of(a.backing, a.elem_dims).norm_size <= a.norm_size * (1 + 1e-6)
    assert a.perturbation_size.item() == pytest.approx(b.perturbation_size.item(), rel=1e-6)


EXPONENTIAL_CASES = [
    Case(f.__name__, f, (Ball("x", kind, (2, 3), 0.8),), 0.0, FEW) for f, _ in EXPONENTIALS for kind in (RMSTensor, LinfTensor)
]


@pytest.mark.parametrize("case", EXPONENTIAL_CASES, ids=lambda c: c.name)
def test_bounds_of_exponentials_hold(case):
    case.check(seeded())


def other_sum(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(0, keepdim=True)


def sum_of_others(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / torch.exp(x - x.amax()).sum(-1, keepdim=True)


def without_keepdim(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1)


def largest_of_others(x):
    return torch.exp(x - x.flip(0).amax(-1, keepdim=True))


def two_and_exponential(x):
    return x / (2 + torch.exp(-x))


def wrong_sign(x):
    return x / (1 + torch.exp(x))


@pytest.mark.parametrize(
    "call",
    [other_sum, sum_of_others, without_keepdim, largest_of_others, two_and_exponential, wrong_sign],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
def test_what_only_looks_like_a_softmax_is_sound_or_refused(call, kind):
    try:
        check(call, [Ball("x", kind, (3, 3), 0.7)], tight=0, **FEW)
    except NormMismatchError as e:
        assert "division by a normed tensor" in str(e)


# -- what was scaled by a plain tensor is normalized as what it is -----------------------------------------------------------

PLAIN = {"a number": torch.tensor(3.0, dtype=torch.float64), "a gain": torch.tensor([3.0, -3.0, 0.5, 1.0], dtype=torch.float64)}
LENGTHS = {
    "power": lambda x: x.pow(2).mean(-1, keepdim=True) ** 0.5,
    "root": lambda x: (x * x).mean(-1, keepdim=True).sqrt(),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "normalized": lambda x: x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
}


@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("spelled", [lambda x, g: x * g, lambda x, g: g * x, torch.multiply], ids=["x * g", "g * x", "multiply"])
def test_what_a_plain_tensor_scaled_has_its_own_length(name, plain, spelled):
    ball = Ball("x", RMSTensor, (3, 4), 0.7, elem_dims=(-1,))
    check(lambda x: LENGTHS[name](spelled(x, PLAIN[plain])), [ball], tight=0.9 if plain == "a number" else 0, **FEW)
    scaled = RMSTensor(0.7 * 3, backing=torch.ones(3, 4, dtype=torch.float64), perturbation_size=3.0)
    found = LENGTHS[name](spelled(RMSTensor(0.7, backing=scaled.backing, perturbation_size=1.0), PLAIN[plain]))
    for size in ("norm_size", "perturbation_size"):
        assert getattr(found, size) == pytest.approx(getattr(LENGTHS[name](scaled), size).item())
