"""Typical sizes of quotients, roots and logarithms: what tensors whose entries are of the size of their norm have; refused as bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, rules, sensitivities  # noqa: F401
from thunder_norm.core.context import norm_mode
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer

OF_ONE = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "a root": lambda x: x**0.3,
    "an inverse square": lambda x: x**-2,
    "a number over it": lambda x: -3.0 / x,
}
LOGARITHMS = {"log": torch.log, "log2": torch.log2, "log10": torch.log10}


def moved(f, *sizes):
    """The norm of f of constants of those sizes, and how far it moves with each of them."""
    given = [
        RMSTensor(n, backing=torch.full((2, 3), n, dtype=torch.float64), perturbation_size=torch.tensor(1.0, requires_grad=True))
        for n in sizes
    ]
    y = f(*given)
    return y.norm_size.item(), [s.item() for s in sensitivities(y, given)]


@pytest.mark.parametrize("mode, sizes", [("typical", (0.2, 1.0, 7.0)), ("modula", (1.0,))])  # of Modula's activations
@pytest.mark.parametrize("name", OF_ONE)
def test_constants_have_their_own_slopes(name, mode, sizes):
    for n in sizes:
        x = torch.tensor(n, dtype=torch.float64)
        with norm_mode(mode):
            value, (slope,) = moved(OF_ONE[name], n)
        assert mode == "modula" or value == pytest.approx(OF_ONE[name](x).abs().item())
        assert slope == pytest.approx(torch.func.grad(OF_ONE[name])(x).abs().item())


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_have_their_slopes_and_at_least_their_values(name):
    for n in (1e-3, 0.2, 1.0, 7.0):
        x = torch.tensor(n, dtype=torch.float64)
        with norm_mode("typical"):
            value, (slope,) = moved(LOGARITHMS[name], n)
        exact = LOGARITHMS[name](x).abs().item()
        assert exact <= value <= exact + LOGARITHMS[name](torch.tensor(math.e)).item() * (1 + 1e-6)
        assert slope == pytest.approx(torch.func.grad(LOGARITHMS[name])(x).abs().item())


INSIDE = {
    "atanh": (torch.atanh, (0.01, 0.5, 0.9)),
    "acosh": (torch.acosh, (1.2, 3.0)),
    "erfinv": (torch.erfinv, (0.01, 0.5, 0.9)),
    "tan": (torch.tan, (0.01, 0.5, 1.4)),
}
WITH_LOGARITHMS = {
    "log1p": (torch.log1p, (1e-3, 0.5, 7.0)),
    "a number times log": (lambda x: torch.xlogy(-3.0, x), (1e-3, 0.5, 7.0)),
    "a number times log1p": (lambda x: torch.special.xlog1py(-3.0, x), (1e-3, 0.5, 7.0)),
    "logit": (torch.logit, (1e-3, 0.5, 0.9)),
    "quantile": (torch.special.ndtri, (1e-3, 0.5, 0.9)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_constants_inside_of_a_domain_have_their_values_and_slopes(name):
    f, sizes = INSIDE[name]
    for n in sizes:
        with norm_mode("typical"):
            value, (slope,) = moved(f, n)
        x = torch.tensor(n, dtype=torch.float64)
        assert (value, slope) == pytest.approx((f(x).item(), torch.func.grad(f)(x).item()))


@pytest.mark.parametrize("name", WITH_LOGARITHMS)
def test_constants_have_the_slopes_of_logarithms_and_no_smaller_values(name):
    f, sizes = WITH_LOGARITHMS[name]
    for n in sizes:
        with norm_mode("typical"):
            value, (slope,) = moved(f, n)
        x = torch.tensor(n, dtype=torch.float64)
        exact = f(x).abs().item()
        assert slope == pytest.approx(torch.func.grad(f)(x).abs().item())
        assert exact * (1 - 1e-9) <= value <= exact + 3 * (1 + 1e-9)


def test_a_logarithm_of_a_product_of_two():
    with norm_mode("typical"):
        value, slopes = moved(torch.xlogy, 3.0, 0.1)
        logarithm, (slope,) = moved(torch.log, 0.1)
    assert (value, *slopes) == pytest.approx((3 * logarithm, logarithm, 3 * slope))


@pytest.mark.parametrize("n", [0.3, 4.0])
def test_triangular_systems_of_multiples_of_orthogonal_matrices(n):
    """Of the identity, which is triangular: sizes, and how far results move by its largest directions."""
    torch.manual_seed(seeded(0))
    eye, b = torch.eye(4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def solve(a, b):
        return torch.linalg.solve_triangular(a, b, upper=True)

    matrix, right = RMSToRMSTensor(n, backing=n * eye, perturbation_size=1.0), RMSTensor.of(b, (-2, -1))
    with norm_mode("typical"):
        y = solve(matrix, right)
    assert y.norm_size.item() == pytest.approx(RMSTensor.of(solve(n * eye, b), y.elem_dims).norm_size.item())
    moved = torch.func.jvp(lambda a: solve(a, b), (n * eye,), (eye,))[1]
    assert y.perturbation_size.item() == pytest.approx(RMSTensor.of(moved, y.elem_dims).norm_size.item())
    with pytest.raises(NormMismatchError, match="divides by the diagonal"):
        solve(matrix, right)


def test_what_is_known_not_to_be_positive_is_not():
    x = RMSTensor(0.5, backing=torch.rand(2, 3), perturbation_size=1.0).sigmoid()
    with norm_mode("typical"):
        y = (-x).log1p()
    n = x.norm_size
    assert y.perturbation_size.item() == pytest.approx((x.perturbation_size / (1 - n)).item())


@pytest.mark.parametrize("n", [0.7, 3.0, 40.0])
def test_draws_have_the_moments_of_their_distributions(n):
    torch.manual_seed(seeded(0))
    count, width = 40_000, 4
    shape = torch.full((count, width), n, dtype=torch.float64, requires_grad=True)
    given = RMSTensor(n, backing=shape.detach()[:2], perturbation_size=1.0)
    for draw in (torch._standard_gamma, torch._sample_dirichlet):
        with norm_mode("typical"):
            y = draw(given)
        assert y.norm_size.item() == pytest.approx(draw(shape.detach()).square().mean().sqrt().item(), rel=0.05)
    with norm_mode("typical"):
        y = torch._standard_gamma(given)
    (slopes,) = torch.autograd.grad(torch._standard_gamma(shape).sum(), shape)
    assert y.perturbation_size.item() == pytest.approx(slopes.square().mean().sqrt().item(), rel=0.3)
    with pytest.raises(NormMismatchError, match="no number bounds"):
        torch._standard_gamma(given)


def test_quotients_of_constants():
    with norm_mode("typical"):
        value, (by_a, by_b) = moved(torch.div, 3.0, 0.5)
    assert (value, by_a, by_b) == (pytest.approx(6.0), pytest.approx(2.0), pytest.approx(12.0))


@pytest.mark.parametrize("name", [*OF_ONE, *LOGARITHMS, "div"])
def test_as_bounds_they_are_refused(name):
    f = {**OF_ONE, **LOGARITHMS, "div": lambda x: x / x.flip(0)}[name]
    with pytest.raises(NormMismatchError):
        moved(f, 1.0)


def test_what_stays_away_from_zero_keeps_its_bound():
    x = RMSTensor(1.0, backing=torch.ones(2, 3))
    with norm_mode("typical"):
        assert (x / (x.sigmoid() + 2)).norm_size <= 0.5
        assert (torch.exp(LinfTensor(9.0, backing=torch.ones(3)).tanh() * 2)).norm_size <= math.exp(2) * (1 + 1e-6)


# what an epsilon keeps from 0, of entries of the size of the norm
GUARDED = {
    "a quotient": lambda x: 3.0 / x,
    "an inverse": torch.reciprocal,
    "an inverse root": torch.rsqrt,
    "a root": torch.sqrt,
}


@pytest.mark.parametrize("eps", [1e-4, 1e-7, 1e-20])
@pytest.mark.parametrize("name", GUARDED)
def test_an_epsilon_is_no_typical_entry(name, eps):
    f = GUARDED[name]
    for n in (0.2, 1.0, 7.0):
        x = torch.tensor(n, dtype=torch.float64)
        with norm_mode("typical"):
            value, (slope,) = moved(lambda t: f(t.abs() + eps), n)
        assert value == pytest.approx(f(x).abs().item(), rel=1e-2)
        assert slope == pytest.approx(torch.func.grad(f)(x).abs().item(), rel=1e-2)


def test_a_logarithm_of_what_an_epsilon_keeps_from_zero():
    with norm_mode("typical"):
        value, (slope,) = moved(lambda t: (t.abs() + 1e-20).log(), 3.0)
    assert math.log(3) <= value <= math.log(3) + 1 and slope == pytest.approx(1 / 3)


def test_the_logarithm_of_a_mean_of_many_moves_as_that_of_its_size():
    """An epsilon beside it was taken for its least entry: the slope was 1e6."""
    n, count = 0.7, 16
    generator = torch.Generator().manual_seed(seeded(0))
    means = (n * torch.randn(50_000, count, dtype=torch.float64, generator=generator)).square().mean(-1)
    x = RMSTensor(n, backing=torch.ones(2, count), perturbation_size=torch.tensor(1.0, requires_grad=True))
    with norm_mode("typical"):
        m = x.square().mean(-1, keepdim=True) + 1e-6
        y = m.log()
    slope = (y.perturbation_size / m.perturbation_size).item()
    assert means.reciprocal().mean() / 3 <= slope <= 3 * means.reciprocal().square().mean().sqrt()
    assert y.norm_size <= means.log().abs().mean() + 2


def test_an_epsilon_counts_where_the_norm_is_smaller_and_in_bounds():
    def inverse(t):
        return 1 / t.abs().clamp(min=1e-7)

    with norm_mode("typical"):
        assert moved(inverse, 0.0)[0] <= 1e7 * (1 + 1e-6)
        assert moved(lambda t: 1 / t.abs().clamp(min=0.5), 7.0)[0] == pytest.approx(2.0)  # a lower bound that entries may have
    assert moved(inverse, 1.0)[0] == pytest.approx(1e7)  # mode "bound"


@pytest.mark.parametrize(
    "f", [lambda x: x / (1 + 300 * x**2), lambda x: 1 / (x.abs() * 50 + 0.03)], ids=["attractor", "temperature"]
)
def test_a_least_number_far_below_the_norm_is_no_typical_entry(f):
    """ZoeDepth's bins and temperatures, and Student's kernels: 1 / 1 was taken for 1 / (1 + 300 x^2), and targets were 1e-19."""
    n = 5.0
    x = n * torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    with norm_mode("typical"):
        value, _ = moved(f, n)
    assert f(x).square().mean().sqrt() / 3 <= value <= 10 * f(x).square().mean().sqrt()


def test_slope_of_a_cosine_is_that_of_lengths_of_gaussians():
    n, count, draws = 0.7, 16, 100_000
    generator = torch.Generator().manual_seed(seeded(0))
    inverse = 1 / (n * torch.randn(draws, count, dtype=torch.float64, generator=generator)).square().sum(-1)
    x, y = (RMSTensor(s, backing=torch.ones(2, count), perturbation_size=torch.tensor(1.0, requires_grad=True)) for s in (n, 2.0))
    with norm_mode("typical"):
        slope = sensitivities(torch.cosine_similarity(x, y, dim=-1), x).item()
    error = inverse.std().item() / math.sqrt(draws) / inverse.mean().item()
    assert slope**2 == pytest.approx((count - 1) * inverse.mean().item(), rel=6 * error)


EXPONENTIALS = {"exp": (torch.exp, 1.0), "exp2": (torch.exp2, math.log(2)), "10^x": (lambda x: 10**x, math.log(10))}


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_of_large_sizes_grow_as_the_sizes_do(name):
    f, rate = EXPONENTIALS[name]
    with norm_mode("typical"):
        for n in (1.0 / rate, 3.0 / rate, 40.0 / rate):
            value, (slope,) = moved(f, n)
            assert value == pytest.approx(math.e * rate * n) and slope == pytest.approx(rate * value)


@pytest.mark.parametrize("op", [torch.exp, torch.expm1, torch.exp2, torch.sinh, torch.cosh, torch.i0])
def test_typical_exponentials_grow_without_a_jump(op):
    with norm_mode("typical"):
        found = [moved(op, n) for n in (0.5, 0.999999, 1.000001, 1.4426, 1.4428, 5.0)]
    sizes = [(value, slope) for value, (slope,) in found]
    assert sizes == sorted(sizes) and [s for _, s in sizes] == sorted(s for _, s in sizes)
    assert all(b[0] < 1.01 * a[0] for a, b in ((sizes[1], sizes[2]), (sizes[3], sizes[4])))


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        z = 1 / (torch.einsum("bnd,bd->bn", q, k.sum(1)) + 1e-6)
        return torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), z)


class MatchingNetwork(nn.Module):
    """Vinyals et al.'s: logarithms of labels that attention reads."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.register_buffer("labels", nn.functional.one_hot(torch.tensor([0, 1, 2, 0, 1, 2]), 3).float())

    def forward(self, x):
        support, query = (nn.functional.normalize(self.embed(t), dim=-1) for t in x)
        return torch.log((query @ support.t()).softmax(-1) @ self.labels + 1e-6)


class SpectrallyNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("make", [LinearAttention, MatchingNetwork, SpectrallyNormed])
def test_models_that_divide_by_what_they_compute_have_targets_and_train(make):
    torch.manual_seed(seeded(0))
    model, x = make().eval(), torch.randn(2, 6, 8)
    target = model(torch.randn(2, 6, 8)).detach()
    norm = ModularNorm(model, x, mode="typical")
    assert not norm.unreached and min(norm.targets.values()) > 1e-6
    optimizer = ModularOptimizer(norm, lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
