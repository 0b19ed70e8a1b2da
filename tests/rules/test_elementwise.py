"""Functions of each entry: bounds against adversarial inputs, constants by dense evaluation, typical sizes by Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, normed_op
from thunder_norm.audit import Ball, Case, Witness, norm, start
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._gaussian import absolute_moment, expected_maximum
from thunder_norm.transforms import NormTransform
import thunder

R, INF = RMSTensor, LinfTensor


def x(n=1.0, kind=R, shape=(2, 4), dims=None):
    return Ball("x", kind, shape, n, dims)


def quick_gelu(t):
    return t * torch.sigmoid(1.702 * t)


def prelu_kernel(t, a):
    return torch.ops.aten._prelu_kernel(t, a)


# name, function, how tight for RMS over 4 entries (from the largest entry everything is attained), norm sizes
FUNCTIONS = [
    ("relu", F.relu, 0.99, (1.0,)),
    ("leaky_relu", lambda t: F.leaky_relu(t, -1.5), 0.99, (1.0,)),
    ("rrelu", lambda t: F.rrelu(t, 1.2, 1.2), 0.99, (1.0,)),
    ("elu", F.elu, 0.97, (0.3, 2.0)),
    ("elu, steep", lambda t: F.elu(t, 2.0), 0.95, (0.02,)),
    ("celu", lambda t: F.celu(t, 0.5), 0.97, (0.3, 2.0)),
    ("selu", F.selu, 0.98, (0.02,)),
    ("abs", torch.abs, 0.99, (1.0,)),
    ("neg", torch.neg, 0.99, (1.0,)),
    ("positive", torch.positive, 0.99, (1.0,)),
    ("softshrink", lambda t: F.softshrink(t, 0.01), 0.97, (1.0,)),
    ("tanhshrink", F.tanhshrink, 0.95, (30.0,)),
    ("gelu", F.gelu, 0.99, (0.2, 1.0, 4.0)),
    ("gelu tanh", lambda t: F.gelu(t, approximate="tanh"), 0.99, (0.2, 1.0, 4.0)),
    ("silu", F.silu, 0.99, (0.2, 1.0, 4.0)),
    ("mish", F.mish, 0.99, (0.2, 1.0, 4.0)),
    ("hardswish", F.hardswish, 0.99, (0.2, 1.0, 4.0)),
    ("sigmoid", torch.sigmoid, 0.99, (0.2, 1.0, 4.0)),
    ("tanh", torch.tanh, 0.99, (0.2, 1.0, 4.0)),
    ("softsign", F.softsign, 0.99, (0.2, 4.0)),
    ("erf", torch.erf, 0.99, (0.2, 2.0)),
    ("erfc", torch.erfc, 0.99, (0.2, 2.0)),
    ("sinc", torch.sinc, 0.98, (0.2, 4.0)),
    ("deg2rad", torch.deg2rad, 0.99, (1.0,)),
    ("rad2deg", torch.rad2deg, 0.99, (1.0,)),
    ("threshold without a jump", lambda t: F.threshold(t, 0.5, 0.5), 0.9, (2.0,)),
    ("atan", torch.atan, 0.99, (0.2, 4.0)),
    ("asinh", torch.asinh, 0.99, (0.2, 4.0)),
    ("sin", torch.sin, 0.99, (0.2, 1.0, 4.0)),
    ("cos", torch.cos, 0.99, (0.2, 1.0, 4.0)),
    ("hardsigmoid", F.hardsigmoid, 0.99, (0.2, 4.0)),
    ("softplus", F.softplus, 0.94, (0.3, 1.0, 5.0)),
    ("softplus, sharp", lambda t: F.softplus(t, beta=3.0, threshold=100.0), 0.94, (0.3, 1.0)),
    ("logsigmoid", F.logsigmoid, 0.94, (0.3, 1.0)),
    ("hardtanh", F.hardtanh, 0.99, (0.2, 4.0)),
    ("hardtanh, lopsided", lambda t: F.hardtanh(t, -0.5, 2.0), 0.99, (0.2, 4.0)),
    ("relu6", F.relu6, 0.99, (1.0, 9.0)),
    ("clamp min", lambda t: torch.clamp(t, min=-0.5), 0.99, (1.0,)),
    ("clamp_min", lambda t: torch.clamp_min(t, 0.5), 0.99, (1.0,)),
    ("clamp_max", lambda t: t.clamp_max(0.5), 0.99, (1.0,)),
    ("clamp above 0", lambda t: torch.clamp(t, 0.5, 2.0), 0.99, (1.0, 4.0)),
    ("clamp below 0", lambda t: torch.clamp(t, -2.0, -0.5), 0.99, (1.0,)),
    ("square", torch.square, 0.99, (0.5, 2.0)),
    ("x ** 2", lambda t: t**2, 0.99, (0.5,)),
    ("x ** 3", lambda t: t**3, 0.99, (0.5, 2.0)),
    ("x ** 1", lambda t: t**1, 0.99, (2.0,)),
    ("x ** 0", lambda t: t**0, 0.99, (2.0,)),
    ("|x| ** 2.5", lambda t: t.abs() ** 2.5, 0.99, (2.0,)),
    ("quick gelu, op by op", quick_gelu, 0.3, (1.0,)),
]  # fmt: skip
LARGEST_ENTRY_ONLY = [
    ("exp", torch.exp),
    ("expm1", torch.expm1),
    ("sinh", torch.sinh),
    ("cosh", torch.cosh),
    ("2 ** x", lambda t: torch.pow(2.0, t)),
    ("exp2", torch.exp2),
    ("0.5 ** x", lambda t: 0.5**t),
]  # fmt: skip
# where the search does not find the summit by itself: the kink of hardswish, the top of sine
WITNESSES = {
    "hardswish": [[torch.full((2, 4), 2.99999)]],
    "sin": [[torch.full((2, 4), math.pi / 2)], [torch.zeros(2, 4)]],
}


def steepest(f, n):
    """One entry of each row where f is steepest, moved alone: at most twice the RMS of four."""
    t = torch.linspace(-2 * n, 2 * n, 4001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(f(t).sum(), t)
    entry = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(2, 4)
    return Witness([entry * t.detach()[slopes.abs().argmax()]], [entry])


CASES = [
    *[
        Case(f"{name}, {kind.__name__} {n}", f, (x(n, kind),), tight, {"witnesses": [steepest(f, n), *WITNESSES.get(name, ())]})
        for name, f, tight, sizes in FUNCTIONS
        for kind in (R, INF)
        for n in (sizes if kind is R else sizes[:1])
    ],
    *[Case(f"{name}, {n}", f, (x(n, INF),)) for name, f in LARGEST_ENTRY_ONLY for n in (0.5, 2.0)],
    *[
        Case(f"{name} of {kind.__name__}", f, (x(1.0, kind),))
        for name, f, *_ in FUNCTIONS
        for kind in (L1Tensor, L2Tensor)
        if name in ("relu", "abs", "neg", "leaky_relu")
    ],
    *[Case(f"{name} of RMS, {n}", f, (x(n),), 0.75) for name, f in LARGEST_ENTRY_ONLY for n in (0.2, 0.9)],
    Case("a number to the power of RMS", lambda t: 3.0**t, (x(0.6),), 0.75),
    Case("exp of l1", torch.exp, (x(0.5, L1Tensor),)),
    Case("neg of an operator", torch.neg, (x(1.0, RMSToRMSTensor, (3, 4)),)),
    Case("relu over two dims", F.relu, (x(1.0, R, (2, 3, 2), (-3, -1)),)),
    Case("gelu over two dims", F.gelu, (x(1.0, R, (2, 3, 2), (-3, -1)),)),
    Case("clamp between tensors", torch.clamp, (x(1.0), Ball("lo", R, (4,), 0.5), Ball("hi", R, (4,), 0.7)), 0.5),
    Case("clamp above a tensor", lambda t, lo: t.clamp(min=lo), (x(1.0, INF), Ball("lo", INF, (4,), 0.5))),
    Case("clamp_max of a tensor", torch.clamp_max, (x(1.0), Ball("hi", R, (4,), 0.7)), 0.98),
    Case("clamp_min of a tensor", torch.clamp_min, (x(0.6), Ball("lo", R, (2, 4), 0.7)), 0.98),
    Case("prelu", F.prelu, (x(1.5), Ball("a", INF, (4,), 2.0))),
    Case("prelu, flat", F.prelu, (x(1.5), Ball("a", INF, (1,), 0.5))),
    Case("prelu in aten", prelu_kernel, (x(1.5), Ball("a", INF, (4,), 2.0))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


# -- constants --------------------------------------------------------------------------------------------------------------

GLOBAL_SLOPES = [
    (F.gelu, 1.1289041451851548),
    (lambda t: F.gelu(t, approximate="tanh"), 1.1289930686587718),
    (F.silu, 1.0998393201288669),
    (F.mish, 1.0884981612517279),
    (F.hardswish, 1.5),
    (F.selu, 1.7580993408473766),
    (torch.erf, 2 / math.sqrt(math.pi)),
]


def slopes(f, points):
    points = points.detach().requires_grad_()
    return torch.autograd.grad(f(points).sum(), points)[0]


@pytest.mark.parametrize("f, expected", GLOBAL_SLOPES)
def test_largest_slope_is_exact(f, expected):
    dense = torch.linspace(-5, 5, 2_000_001, dtype=torch.float64)
    assert slopes(f, dense).abs().max().item() == pytest.approx(expected, rel=1e-9 if f is not F.hardswish else 1e-5)
    claimed = f(R(100.0, backing=torch.zeros(2, 4), perturbation_size=1.0)).perturbation_size.item()
    assert claimed == pytest.approx(expected, rel=1e-12)
    assert claimed >= slopes(f, dense).abs().max().item() * (1 - 1e-14)


@pytest.mark.parametrize("n", [0.05, 0.7, 1.3, 2.0, 3.0])
@pytest.mark.parametrize("f", [F.gelu, F.silu, F.mish, F.hardswish, F.softplus, torch.cos, torch.tanh])
def test_local_slope_is_the_largest_on_the_ball(f, n):
    inside = torch.linspace(-n, n, 100_001, dtype=torch.float64)
    claimed = f(INF(n, backing=torch.zeros(3), perturbation_size=1.0)).perturbation_size.item()
    assert claimed == pytest.approx(slopes(f, inside).abs().max().item(), rel=1e-4)
    assert claimed >= slopes(f, inside).abs().max().item() - 1e-12


# -- mode typical -------------------------------------------------------------------------------------------------------------

TYPICAL = [
    F.relu, F.gelu, F.silu, F.mish, F.hardswish, torch.sigmoid, torch.tanh, F.softsign, torch.erf, torch.atan, torch.sin,
    torch.cos, torch.asinh, F.hardsigmoid, F.softplus, F.logsigmoid, F.elu, F.selu, torch.abs, torch.square,
    lambda t: t**3, lambda t: F.leaky_relu(t, 0.1), lambda t: F.celu(t, 0.5), lambda t: F.elu(t, 2.0),
    lambda t: F.gelu(t, approximate="tanh"), lambda t: F.softplus(t, beta=2.0), lambda t: torch.expm1(0.3 * t),
    lambda t: torch.exp(0.3 * t), lambda t: 1.3**t,
]  # fmt: skip


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("f", TYPICAL)
def test_typical_size_is_that_of_gaussians(f, n):
    sample = n * torch.randn(400_000, dtype=torch.float64)
    with norm_mode("typical"):
        out = f(R(n, backing=torch.zeros(2, 4), perturbation_size=1.0))
    tolerance = {"rel": 0.02}
    assert out.norm_size.item() == pytest.approx(f(sample).square().mean().sqrt().item(), **tolerance)
    assert out.perturbation_size.item() == pytest.approx(slopes(f, sample).square().mean().sqrt().item(), **tolerance)


def test_typical_prelu_is_that_of_gaussians():
    sample = torch.randn(400_000, 1, dtype=torch.float64)
    with norm_mode("typical"):
        out = F.prelu(R(1.0, backing=torch.zeros(2, 4)), INF(0.5, backing=torch.zeros(4)))
    assert out.norm_size.item() == pytest.approx(
        F.prelu(sample, torch.tensor([0.5], dtype=torch.float64)).square().mean().sqrt().item(), rel=0.01
    )


@pytest.mark.parametrize("count", [1, 2, 9])
def test_expected_maximum(count):
    sample = torch.randn(200_000, count, dtype=torch.float64).amax(1)
    assert expected_maximum(count) == pytest.approx(sample.square().mean().sqrt().item(), rel=0.01)


@pytest.mark.parametrize("order", [1, 2, 3.5, 6])
def test_absolute_moment(order):
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    assert absolute_moment(order) == pytest.approx(torch.trapezoid(z.abs() ** order * density, z).item(), rel=1e-6)


def test_typical_is_differentiable_at_zero():
    n = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with norm_mode("typical"):
        F.gelu(R(n, backing=torch.zeros(3))).norm_size.backward()
    assert torch.isfinite(n.grad)


# -- mode modula ----------------------------------------------------------------------------------------------------------------


def test_modula_divides_gelu_by_its_largest_slope():
    with norm_mode("modula"):
        out = F.gelu(R(1.0, backing=torch.zeros(2, 4), perturbation_size=1.0)) / 1.1289
        assert out.norm_size.item() == 1.0
        assert out.perturbation_size.item() == pytest.approx(1.0, abs=1e-15)
        assert F.relu(R(1.0, backing=torch.zeros(2, 4), perturbation_size=1.0)).perturbation_size.item() == 1.0


# -- refusals -------------------------------------------------------------------------------------------------------------------


UNBOUNDED = [
    torch.rsqrt,
    torch.log,
    torch.log2,
    torch.log1p,
    torch.reciprocal,
    lambda t: t**-1,
    lambda t: t**0.5,
    lambda t: 1 / t,
]


@pytest.mark.parametrize("f", UNBOUNDED)
def test_what_a_norm_cannot_bound_is_refused(f):
    with pytest.raises(NormMismatchError):
        f(R(1.0, backing=torch.ones(2, 4)))


def test_square_root_has_a_value_but_no_sensitivity():
    assert torch.sqrt(R(4.0, backing=torch.ones(2, 4))).norm_size.item() == 2.0
    with pytest.raises(NormMismatchError, match="slope"):
        torch.sqrt(R(4.0, backing=torch.ones(2, 4), perturbation_size=1.0))


def test_own_rule_wins_over_a_refusal():
    op = normed_op(torch.log10)
    rules = list(op.rules)

    @op.register_norm
    def log10_above_one(input: RMSTensor) -> RMSTensor:
        return RMSTensor(input.norm_size, elem_dims=input.elem_dims)

    try:
        assert torch.log10(R(3.0, backing=torch.ones(2))).norm_size.item() == 3.0
    finally:
        op.rules[:] = rules


def to_hundredths(t):
    return torch.round(t, decimals=2)


def to_hundreds(t):
    return torch.round(t, decimals=-2)


def thresholded(t):
    return F.threshold(t, 0.2, -0.7)


def with_signs(t):
    return torch.copysign(t, torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=t.dtype))


def left_by_division(t):
    return torch.fmod(t, -0.7)


def remains(t):
    return torch.remainder(t, -0.7)


def quantized(t):
    return torch.fake_quantize_per_tensor_affine(t, 0.5, 1, -4, 3)


def quantized_by_channels(t):
    scales, zeros = torch.tensor([0.5, 0.25, 0.1, 0.3]), torch.tensor([0, 3, -2, 1], dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(t, scales, zeros, 1, -4, 3)


# for the audit, which knows no scales
QUANTIZED = [
    Case("quantized", quantized, (x(0.75),)),
    Case("quantized, largest entry", quantized, (x(0.75, INF),)),
    Case("quantized by channels", quantized_by_channels, (x(0.75),)),
    Case("quantized by channels, largest entry", quantized_by_channels, (x(0.75, INF),)),
]
STEPS = [
    *(torch.sign, torch.sgn, torch.trunc, torch.round, torch.floor, torch.ceil, torch.frac, F.hardshrink),
    *(to_hundredths, to_hundreds, thresholded, with_signs, left_by_division, remains),
    *dict.fromkeys(case.call for case in QUANTIZED),
]


def test_the_largest_quantized_values():
    """Half a step below an even multiple, and beyond the range: with zero point 1 it ends at -2.5 and 1."""
    for x, n in ((torch.full((2, 4), 0.75), 1.0), (torch.full((2, 4), -9.0), 2.5)):
        y = quantized(R.of(x))
        assert y.norm_size.item() == n == norm(R, y.backing, (-1,)).item()
        assert thunder.jit(quantized, transforms=[NormTransform()])(R.of(x)).norm_size.item() == n
    outside = torch.fake_quantize_per_tensor_affine(
        R(0.1, backing=torch.zeros(3)), torch.tensor(0.5), torch.tensor(9).int(), -4, 3
    )
    assert norm(R, outside.backing, (-1,)) == 3.0 <= outside.norm_size  # torch does not look at a zero point that is a tensor


@pytest.mark.parametrize("f", STEPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [0.001, 0.6, 1.0, 2.5])
def test_steps_have_a_value_but_no_sensitivity(f, n):
    for kind in (R, INF):
        ball = x(n, kind)
        for sort in range(8):
            t = start(ball, sort, torch.Generator().manual_seed(seeded(sort))) * n
            out = f(ball.normed(t))
            assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-12)
        with pytest.raises(NormMismatchError, match="jumps"):
            f(ball.normed(t, 1.0)) + 1  # of a sign, what it is multiplied by is waited for


def test_in_place_activation_replaces_an_intermediate():
    y = R(1.0, backing=torch.randn(2, 4)) * 2.0
    F.relu(y, inplace=True)
    y += 1.0
    assert y.norm_size.item() == 3.0
    assert torch.equal(y.backing, y.backing.clamp(min=1.0))


# -- options of any sign and size ---------------------------------------------------------------------------------------------


WITH_OPTIONS = {
    "celu": F.celu,
    "elu": F.elu,
    "elu of other scales": lambda x, c: torch.ops.aten.elu.default(x, 2.0, -0.5, c),
    "softplus": lambda x, c: F.softplus(x, beta=c),
    "leaky_relu": F.leaky_relu,
    "addcmul": lambda x, c: torch.addcmul(x, x, x, value=c),
    "clamp from below": lambda x, c: x.clamp(min=c),
    "clamp from above": lambda x, c: x.clamp(max=c),
    "hardtanh": lambda x, c: F.hardtanh(x, -abs(c), abs(c)),
    "threshold": lambda x, c: F.threshold(x, c, c),
    "smooth_l1_loss": lambda x, c: F.smooth_l1_loss(x, torch.zeros(x.shape, dtype=torch.float64), beta=abs(c)),
    "huber_loss": lambda x, c: F.huber_loss(x, torch.zeros(x.shape, dtype=torch.float64), delta=abs(c)),
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_of_any_sign_and_size_have_bounds_or_are_refused(name):
    torch.manual_seed(seeded(0))
    f, tried = WITH_OPTIONS[name], 0
    for scale in (1e-300, 1e-100, 1e-3, 1.0, 1e3, 1e100, 1e300):
        t = torch.randn(2, 3, dtype=torch.float64) * scale
        for c in (-1e300, -2.0, -0.3, -1e-100, 1e-300, 1e-100, 0.3, 2.0, 1e100, 1e300):
            real = f(t, c)
            for kind in (LinfTensor, RMSTensor):
                try:
                    y = f(kind.of(t), c)
                except NormMismatchError:
                    continue
                tried += 1
                if not real.isfinite().all():  # the result is no float, and its bound need not be one
                    continue
                assert type(y).of(real, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-6) + 1e-307, (scale, c)
    assert tried >= 60


def test_what_grows_exponentially_or_is_infinite_by_an_option_is_refused():
    x = RMSTensor.of(torch.ones(2, 3))
    for f in (lambda: F.celu(x, -1.0), lambda: torch.logit(x, eps=1e-8), lambda: torch.logit(x.double(), eps=1e-17)):
        with pytest.raises(NormMismatchError, match="exponentially|is 1"):
            f()
    assert torch.logit(x, eps=1e-7).norm_size.isfinite() and torch.logit(torch.ones(1), eps=1e-8).isinf()
