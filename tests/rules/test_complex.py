"""Fourier transforms and complex tensors: norms against adversarial inputs, torch's own matrices, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    build_norm_map,
    norm_mode,
    norm_sensitivity,
    normed,
    with_perturbation,
)  # fmt: skip
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import MissingNormRuleError, NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform
import thunder

R, INF = RMSTensor, LinfTensor
D = torch.float64


def x(*shape, dims=None, kind=R, size=1.0, name="x"):
    return Ball(name, kind, shape, size, dims)


def pairs(*shape, dims=(-1,), size=1.0, name="x"):
    """Complex numbers as pairs of real ones: their norm is sqrt(2) times that of the pairs, if it runs over these."""
    return x(*shape, 2, dims=dims, size=size, name=name)


def of_pairs(f):
    """A function of complex tensors, of pairs of real numbers."""
    return lambda *tensors: f(*map(torch.view_as_complex, tensors))


def to_pairs(f):
    return lambda *tensors: torch.view_as_real(of_pairs(f)(*tensors))


def wave(*shape, k=1):
    """One frequency along the last dimension, as pairs."""
    t = torch.arange(shape[-1], dtype=D) * (2 * math.pi * k / shape[-1])
    return torch.view_as_real(torch.polar(torch.ones_like(t), t)).expand(*shape, 2).clone()


def spectrum(*shape, k=1):
    """All energy in one frequency, as pairs."""
    t = torch.zeros(*shape, 2, dtype=D)
    t[..., k, 0] = 1
    return t


def energy(*shape, k=1):
    return {"witnesses": [(spectrum(*shape, k=k),)]}


CASES = [
    # the norm runs over the dimension, or not; cut, or filled with zeros
    *[
        Case(f"{name} {norm} {n}, {dims}", of_pairs(lambda z, f=f, n=n, norm=norm: f(z, n=n, norm=norm)), (pairs(2, 6, dims=dims),))
        for name, f in (("fft", torch.fft.fft), ("ifft", torch.fft.ifft))
        for (norm, n), dims in zip(
            itertools.product(("backward", "ortho", "forward", None), (None, 4, 9)), itertools.cycle([(-1,), (-2, -1)])
        )
    ],
    *[
        Case(f"{name} {norm} {n}, {dims}", lambda a, f=f, n=n, norm=norm: f(a, n=n, norm=norm), (x(3, k, dims=dims),))
        for name, f in (("rfft", torch.fft.rfft), ("ihfft", torch.fft.ihfft))
        for (norm, n, k), dims in zip(
            [("backward", None, 6), ("ortho", None, 5), ("forward", 4, 6), (None, 8, 5), ("ortho", 9, 4), ("backward", 7, 3)],
            itertools.cycle([(-1,), (-2,)]),
        )
    ],
    *[
        Case(f"{name} {norm} {n}, {dims}", of_pairs(lambda z, f=f, n=n, norm=norm: f(z, n=n, norm=norm)), (pairs(2, 4, dims=dims),),
             options=energy(2, 4))
        for name, f in (("irfft", torch.fft.irfft), ("hfft", torch.fft.hfft))
        for (norm, n), dims in zip(
            [("backward", None), ("ortho", 7), ("forward", 4), (None, 9), ("ortho", 12)], itertools.cycle([(-1,), (-2, -1)])
        )
    ],
    Case("irfft of a constant", of_pairs(lambda z: torch.fft.irfft(z, n=2)), (pairs(2, 2, dims=(-2, -1)),), options=energy(2, 2, k=0)),
    Case("fft, another dimension", of_pairs(lambda z: torch.fft.fft(z, dim=0)), (pairs(4, 3, dims=(-2, -1)),)),
    Case("fft2", of_pairs(torch.fft.fft2), (pairs(2, 3, 4, dims=(-2, -1)),)),
    Case("fft2 of sizes", of_pairs(lambda z: torch.fft.fft2(z, s=(2, 5), norm="ortho")), (pairs(2, 3, 4, dims=(-3, -2, -1)),)),
    Case("ifft2", of_pairs(lambda z: torch.fft.ifft2(z, dim=(0, 1))), (pairs(3, 4, 2, dims=(-2, -1)),)),
    Case("fftn", of_pairs(torch.fft.fftn), (pairs(2, 2, 3, dims=(-1,)),)),
    Case("ifftn", of_pairs(lambda z: torch.fft.ifftn(z, s=(2, -1))), (pairs(2, 3, 4, dims=(-3, -2, -1)),)),
    Case("rfft2", lambda a: torch.fft.rfft2(a, norm="ortho"), (x(2, 4, 6, dims=(-2, -1)),)),
    Case("rfftn", lambda a: torch.fft.rfftn(a, dim=(0, 2)), (x(3, 2, 5, dims=(-2,)),)),
    Case("irfft2", of_pairs(lambda z: torch.fft.irfft2(z, s=(3, 5))), (pairs(2, 3, 3, dims=(-3, -2, -1)),), options=energy(2, 3, 3)),
    Case("irfftn", of_pairs(lambda z: torch.fft.irfftn(z, norm="forward")), (pairs(2, 3, dims=(-1,)),), options=energy(2, 3)),
    Case("hfft2", of_pairs(torch.fft.hfft2), (pairs(2, 3, dims=(-1,)),)),
    Case("hfftn", of_pairs(torch.fft.hfftn), (pairs(2, 3, dims=(-1,)),)),
    Case("ihfft2", torch.fft.ihfft2, (x(2, 4, 3, dims=(-2, -1)),)),
    Case("ihfftn", torch.fft.ihfftn, (x(2, 3, dims=()),)),
    Case("fftshift", torch.fft.fftshift, (x(2, 5),)),
    Case("ifftshift", to_pairs(torch.fft.ifftshift), (pairs(2, 5),)),
    # parts
    Case("real", of_pairs(torch.real), (pairs(2, 3),), options={"witnesses": [(torch.tensor([1.0, 0.0], dtype=D).expand(2, 3, 2),)]}),
    Case("imag", of_pairs(torch.imag), (pairs(2, 3),), options={"witnesses": [(torch.tensor([0.0, 1.0], dtype=D).expand(2, 3, 2),)]}),
    Case("conj", of_pairs(torch.conj), (pairs(2, 3, dims=(-2, -1)),)),
    Case("view_as_complex", torch.view_as_complex, (x(3, 4, 2, dims=(-2,)),)),
    Case("view_as_real", to_pairs(lambda z: z), (pairs(3, 4, dims=(-2, -1)),)),
    Case("complex", torch.complex, (x(3, 4), x(3, 4, size=0.5, name="imag")), options={"only": ()}),
    Case("complex, broadcast", torch.complex, (x(3, 4, dims=(-1,)), x(4, kind=INF, size=2.0, name="imag")), options={"only": ()}),
    Case("polar", torch.polar, (x(3, 4, size=2.0), x(3, 4, kind=INF, name="angle"))),
    Case("polar, angles in the mean", torch.polar, (x(3, 4, size=2.0), x(3, 4, name="angle"))),
    # rules for real tensors that hold for complex ones
    Case("add", of_pairs(torch.add), (pairs(3, 4, dims=(-2, -1)), pairs(3, 4, dims=(-2, -1), name="y"))),
    Case("mul", of_pairs(torch.mul), (pairs(3, 4, dims=(-2, -1)), pairs(4, name="y"))),
    Case("abs", of_pairs(torch.abs), (pairs(3, 4, dims=(-2, -1)),)),
    Case("square", of_pairs(torch.square), (pairs(3, 4),)),
    Case("sum", of_pairs(lambda z: z.sum(-1)), (pairs(3, 4, dims=(-2, -1)),)),
    Case("vector_norm", of_pairs(lambda z: torch.linalg.vector_norm(z, dim=-1)), (pairs(3, 4, dims=(-2, -1)),)),
    Case("matmul", of_pairs(torch.matmul), (pairs(3, 4, dims=(-2, -1)), pairs(4, 3, dims=(-3, -1), name="y"))),
    Case("einsum", of_pairs(lambda a, b: torch.einsum("bi,io->bo", a, b)), (pairs(3, 4, dims=(-2, -1)), pairs(4, 3, dims=(-3, -1), name="y"))),
    Case("linear by entries", of_pairs(lambda a, b: F.linear(a, b)), (pairs(3, 4, dims=(-2, -1)), pairs(2, 4, dims=(-2, -1), name="w"))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


# -- against the matrices of torch's transforms -------------------------------------------------------------------------------

REAL_TO_COMPLEX, COMPLEX_TO_REAL = ("rfft", "ihfft"), ("irfft", "hfft")


def real_matrix(f, size, is_complex):
    """The matrix of a transform of `size` numbers between pairs of real and imaginary parts; of real numbers, between these."""
    eye = torch.eye(size, dtype=D)
    rows = [f(e) for e in eye] if not is_complex else [f(e * c) for e in eye for c in (1, 1j)]
    out = torch.stack(rows, -1)
    return torch.cat([out.real, out.imag]) if out.is_complex() else out


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
@pytest.mark.parametrize("size, n", [(6, None), (5, None), (6, 4), (6, 5), (4, 9), (3, 8), (2, None), (1, 4)])
def test_the_growth_in_the_mean_is_the_largest_singular_value(name, norm, size, n):
    def f(t):
        return getattr(torch.fft, name)(t, n=n, norm=norm)

    dtype = D if name in REAL_TO_COMPLEX else torch.complex128
    y = f(RMSTensor(1.0, backing=torch.ones(size, dtype=dtype)))
    sigma = torch.linalg.matrix_norm(real_matrix(f, size, name not in REAL_TO_COMPLEX), 2)
    assert y.norm_size.item() == pytest.approx((sigma * math.sqrt(size / y.numel())).item(), rel=1e-9)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("size, n", [(6, None), (5, 9), (6, 4)])
def test_typical_norms_are_those_of_independent_numbers(name, size, n):
    is_real = name in REAL_TO_COMPLEX
    gaussian = torch.randn(
        40000, size, dtype=D if is_real else torch.complex128, generator=torch.Generator().manual_seed(seeded())
    )
    for dims in ((-1,), (-2,)):
        with norm_mode("typical"):
            y = getattr(torch.fft, name)(RMSTensor(1.0, backing=gaussian, elem_dims=dims), n=n)
        assert y.norm_size.item() == pytest.approx(y.backing.abs().square().mean().sqrt().item(), rel=0.03)


# -- what a norm of complex numbers is --------------------------------------------------------------------------------------------


def test_norms_are_those_of_the_moduli():
    z = torch.randn(3, 4, dtype=torch.complex64)
    moduli = torch.view_as_real(z).double().square().sum(-1).sqrt()
    torch.testing.assert_close(RMSTensor.of(z).norm_size, moduli.square().mean(-1).sqrt().max(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(LinfTensor.of(z).norm_size, moduli.max(), rtol=1e-6, atol=0.0)
    sigma = torch.linalg.svdvals(z.to(torch.complex128))[0]
    torch.testing.assert_close(RMSToRMSTensor.of(z).norm_size, sigma * math.sqrt(4 / 3), rtol=1e-6, atol=0.0)


def test_a_norm_is_differentiable_in_complex_entries():
    z = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    for kind in (RMSTensor, LinfTensor, RMSToRMSTensor):
        assert torch.autograd.gradcheck(lambda t, k=kind: k.of(t).norm_size, z)


def test_a_kind_of_ones_own_measures_real_tensors():
    class Mine(RMSTensor):
        @classmethod
        def measure(cls, t, elem_dims):
            return t.square().sum().sqrt()

    with pytest.raises(NormMismatchError, match="real tensors"):
        Mine.of(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "f",
    [torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.log1p, torch.sqrt, torch.sgn, torch.reciprocal, torch.angle,
     lambda z: z / (z.square().mean(-1, keepdim=True) + 1).sqrt(), lambda z: z.softmax(-1), lambda z: 1 / (z * z + 1)],
)  # fmt: skip
def test_rules_for_real_numbers_do_not_meet_complex_ones(f):
    with pytest.raises((MissingNormRuleError, NormMismatchError)):
        f(RMSTensor(1.0, backing=torch.ones(3, dtype=torch.complex64)))


def test_a_square_of_complex_numbers_is_not_said_to_be_positive():
    z = RMSTensor(2.0, backing=torch.tensor([[1j, 2.0]]), perturbation_size=1.0)
    with pytest.raises(NormMismatchError, match="sqrt"):
        torch.sqrt((z * z).real + 1e-3)


def test_casts():
    z = RMSTensor.of(torch.randn(3, 4)).to(torch.complex64)
    assert z.dtype == torch.complex64 and z.norm_size == RMSTensor.of(z.backing.real).norm_size
    coarse = RMSTensor.of(torch.randn(3, 4, dtype=torch.complex128)).to(torch.complex64)
    assert actual_norm(coarse) <= coarse.norm_size
    with pytest.raises(NormMismatchError, match="not covered by a norm"):
        z.to(torch.int64)


def test_zeros_filled_by_slices():
    z = torch.fft.rfft(RMSTensor.of(torch.randn(2, 4, 8)))
    filled = torch.zeros_like(z)
    filled[..., :2] = z[..., :2]
    assert filled.dtype == torch.complex64 and actual_norm(filled) <= filled.norm_size
    assert torch.equal(filled.backing[..., :2], z.backing[..., :2]) and not filled.backing[..., 2:].any()


# -- models ----------------------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Positions as complex numbers of modulus 1, as Llama's first code has them."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        angles = torch.outer(torch.arange(5.0, device=x.device), 10.0 ** -torch.arange(4.0, device=x.device))
        z = torch.view_as_complex(self.q(x).reshape(*x.shape[:-1], 4, 2))
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(5, 8, 6, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x):
        z = torch.fft.rfft(x, dim=1, norm="ortho") * self.gain
        return torch.fft.irfft(torch.einsum("bki,kio->bko", z, self.mix) + self.shift, n=8, dim=1, norm="ortho")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model, shape", [(Rotary, (2, 5, 8)), (Filter, (2, 8, 8))])
def test_models_in_every_way(model, shape):
    torch.manual_seed(seeded())
    m, given = model(), torch.randn(shape, generator=torch.Generator().manual_seed(seeded(1)))
    eager, traced = m(RMSTensor.of(given)), normed(thunder.jit(m, transforms=[NormTransform()]))(RMSTensor.of(given))
    for y in (eager, traced):
        assert isinstance(y, NormedTensor) and actual_norm(y) <= y.norm_size * (1 + 1e-5)
        torch.testing.assert_close(y.backing, m(given))
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item(), rel=1e-5)
    found = build_norm_map(model().to("meta"), given.to("meta"), parameters="unit")(RMSTensor(1.0))
    norm = ModularNorm(m, given)
    assert not norm.unreached and found.norm_size.item() == pytest.approx(norm.outputs.norm_size.item())


def test_sensitivities_to_complex_parameters_hold():
    """The output moves by at most the sum of what the modular norm says of each parameter."""
    torch.manual_seed(seeded())
    m, given = Filter(), torch.randn(2, 8, 8)
    given = given / RMSTensor.of(given).norm_size.float()
    norm = ModularNorm(m, given)
    norm.initialize_(torch.Generator().manual_seed(seeded(2)))
    for name, p in m.named_parameters():
        assert norm.balls[name].norm(p.detach()).item() == pytest.approx(1.0, rel=1e-5)
        assert p.detach().imag.any() or name == "gain"
    before = m(given)
    for name, p in m.named_parameters():
        step = norm.balls[name].draw(p.shape, torch.Generator().manual_seed(seeded(3)), True).to(p.dtype)
        with torch.no_grad():
            p.add_(step, alpha=-1e-4)
        moved = type(norm.outputs).of(m(given) - before, norm.outputs.elem_dims).norm_size
        assert moved <= norm.sensitivities[name] * 1e-4 * (1 + 1e-2)
        with torch.no_grad():
            p.add_(step, alpha=1e-4)


@pytest.mark.parametrize("name", ["gain", "mix", "shift"])
@pytest.mark.parametrize("method", ["newton_schulz", "newton_schulz_bf16", "svd"])
def test_steepest_steps_of_complex_parameters(name, method):
    """Of norm 1, and no tensor of norm 1 has a larger inner product with the gradient."""
    torch.manual_seed(seeded())
    ball = ModularNorm(Filter(), torch.randn(2, 8, 8)).balls[name]
    g = torch.randn(dict(Filter().named_parameters())[name].shape, dtype=torch.complex128)

    def product(a):
        return (g.conj() * a).real.sum().item()

    best = ball.lmo(g, method)
    assert best.is_complex() and 0.99 < ball.norm(best).item() <= 1 + 1e-9
    for seed in range(20):
        other = ball.draw(g.shape, torch.Generator().manual_seed(seeded(seed)), True)
        assert product(best) * 1.01 >= product(other)
    inside = ball.project(g)
    assert ball.norm(inside).item() <= 1 + 1e-9
    assert torch.allclose(ball.project(best * 0.5), best * 0.5)


def test_training_lowers_a_loss():
    torch.manual_seed(seeded())
    m, given, target = Filter(), torch.randn(2, 8, 8), torch.randn(2, 8, 6)
    norm = ModularNorm(m, given, mode="typical")
    optimizer = ModularOptimizer(norm, lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (m(given) - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "index",
    [(..., 0), (..., None), (..., slice(2)), (0, ...), (..., torch.tensor([2, 0]))],
    ids=["a number", "a new one", "a slice", "behind", "places"],
)
def test_an_ellipsis_in_a_trace(index):
    """In normed mode Thunder's inference of shapes met it."""
    torch.manual_seed(seeded(0))
    x, f = torch.randn(3, 4, dtype=torch.complex64), lambda x: 2 * x[index]
    y = normed(thunder.jit(f, transforms=[NormTransform()]))(RMSTensor.of(x))
    torch.testing.assert_close(y.backing, f(x))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-6)


QUOTIENTS = {
    "a / b": lambda a, b: a / b,
    "a number / b": lambda a, b: 2.5 / b + 0 * a,
    "1 / b": lambda a, b: b.reciprocal() + 0 * a,
    "a real one / b": lambda a, b: a.abs() / b,
    "a / a real one": lambda a, b: a / b.abs(),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_of_complex_numbers_at_the_data(name):
    """Against moves of many directions, and the one in which the smallest divisor alone is moved."""
    torch.manual_seed(seeded(0))
    f, given = QUOTIENTS[name], [torch.randn(3, 4, dtype=torch.complex128) for _ in range(2)]
    for i, t in enumerate(given):
        normed_ones = [with_perturbation(RMSTensor.of(v), float(i == j)) for j, v in enumerate(given)]
        with norm_sensitivity("local"):
            y = f(*normed_ones)
        torch.testing.assert_close(y.backing, f(*given))
        assert actual_norm(y) <= y.norm_size * (1 + 1e-9)
        least = torch.zeros_like(t).flatten()
        least[given[1].abs().argmin()] = 1
        found = 0.0
        for direction in [least.reshape(t.shape), 1j * least.reshape(t.shape), *torch.randn(8, *t.shape, dtype=t.dtype)]:
            step = 1e-6 * direction / RMSTensor.of(direction).norm_size
            ahead, behind = (f(*(v + s * step if i == j else v for j, v in enumerate(given))) for s in (1, -1))
            found = max(found, RMSTensor.of((ahead - behind) / 2e-6).norm_size.item())
        assert found <= y.perturbation_size * (1 + 1e-6)
        assert name != "a / b" or y.perturbation_size <= 100 * found
    with norm_sensitivity("global"), pytest.raises(NormMismatchError, match="division by|infinite slope"):
        f(*(with_perturbation(RMSTensor.of(v)) for v in given))


KEPT_AWAY = {
    "a modulus and a number": lambda b: b.abs() + 0.5,
    "a root": lambda b: torch.sqrt(b.real**2 + b.imag**2 + 0.25),
    "a softplus": lambda b: F.softplus(b.real) + 0.5,
    "by the norm alone": lambda b: F.softplus(b.real),
}


@pytest.mark.parametrize("name", KEPT_AWAY)
def test_complex_numbers_over_real_ones_that_are_kept_away(name):
    """For all inputs of these norms: a in the direction of the least divisor, and a divisor that moves as far as it can."""
    f = KEPT_AWAY[name]
    torch.manual_seed(seeded(0))
    worst = torch.zeros(3, 4, dtype=torch.complex128)
    inputs = [torch.randn(3, 4, dtype=torch.complex128) for _ in range(2)]
    with norm_sensitivity("global"):
        a, b = (with_perturbation(RMSTensor(1.0, backing=t / RMSTensor.of(t).norm_size), float(i)) for i, t in enumerate(inputs))
        y = a / f(b)
    assert y.backing.is_complex()
    for at in (worst, worst - 1, b.backing):
        assert RMSTensor.of(a.backing / f(at)).norm_size <= y.norm_size * (1 + 1e-9)
        for direction in (torch.ones_like(at), 1j * torch.ones_like(at), -b.backing):
            ahead, behind = (a.backing / f(at + s * 1e-6 * direction) for s in (1, -1))
            assert RMSTensor.of((ahead - behind) / 2e-6).norm_size <= y.perturbation_size * (1 + 1e-6)
    least = (
        RMSTensor.of(a.backing / f(worst - 1)).norm_size
        if name == "by the norm alone"
        else RMSTensor.of(a.backing / f(worst)).norm_size
    )
    assert y.norm_size <= 10 * least
