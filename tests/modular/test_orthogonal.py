"""Orthogonalized matrices: accuracy, products that are saved, and large tables in pieces."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from scipy.optimize import linprog
from torch.utils._python_dispatch import TorchDispatchMode

from tests.modular.balls import CASES, D
from thunder_norm import RMSToRMSTensor
from thunder_norm.modular import ball, orthogonal, orthogonalize

OPERATORS = [name for name, case in CASES.items() if issubclass(case.kind, RMSToRMSTensor)]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 0.005), (torch.float64, 0.005), (torch.bfloat16, 0.02)])
def test_newton_schulz_is_almost_as_steep_and_not_longer(name, dtype, tolerance):
    case = CASES[name]
    g = torch.randn(case.shape).to(dtype)
    step = case.ball.lmo(g)
    assert step.dtype == dtype
    assert case.norm(step) <= 1 + (0 if dtype.itemsize > 2 else 2**-8)
    steep = (g.to(D) * step.to(D)).sum().item() / case.dual_norm(g.to(D)).item()
    assert 1 - tolerance < steep <= 1 + (0 if dtype.itemsize > 2 else 2**-8)


@pytest.mark.parametrize("rows, least", [(2, 0.9954), (80, 0.9941)])
def test_newton_schulz_on_singular_values_of_all_sizes(rows, least):
    """The claims of the docstring, for the map of one singular value: the Gram matrix of a diagonal matrix is diagonal."""
    small = torch.logspace(-6, -0.0001, 4000, dtype=D)[:, None] / math.sqrt(rows - 1) * torch.linspace(0.5, 1, rows - 1, dtype=D)
    s = torch.cat([small, (1 - small.square().sum(-1, keepdim=True)).sqrt()], -1)[:: rows // 2]  # of Frobenius norm 1
    out = orthogonalize(torch.diag_embed(s)).diagonal(dim1=-2, dim2=-1)
    assert out.max() <= 0.99951
    assert out[s >= 0.004].min() >= least
    assert (orthogonalize(torch.diag_embed(s)) - torch.diag_embed(out)).abs().max() <= (0 if rows == 2 else 1e-12)


FOUR = (orthogonal._FOUR_QUINTICS[0].of_multiples(1 / orthogonal._ALIKE), *orthogonal._FOUR_QUINTICS[1:])
SEPTIC = (orthogonal._WITH_SEPTIC[0].of_multiples(1 / orthogonal._NOT_ALONE), *orthogonal._WITH_SEPTIC[1:])


@pytest.mark.parametrize(
    "steps, low",
    [
        (orthogonal._QUINTICS, 0.004),
        (FOUR, 0.01 * orthogonal._ALIKE),
        (SEPTIC, 0.01 * orthogonal._NOT_ALONE),
        (orthogonal._WITH_INVERSE, 0.004),
    ],
    ids=["polynomials", "four polynomials", "one of degree 7", "an inverse first"],
)
def test_each_step_is_the_best_of_its_degree(steps, low):
    """Found anew as a linear program: |1 - (a x + b x^3 + c x^5)| at most t on a grid of the interval that the steps before leave."""
    high = 1.0
    for k, step in enumerate(steps):
        is_last = k == len(steps) - 1
        x = np.linspace(low, high, 20_001)
        if isinstance(step, orthogonal._Rational):
            x = np.geomspace(low, high, 20_001)
            assert quotient(step, x).max() == pytest.approx(1)
            for i, factor in itertools.product(
                range(3), (0.999, 1.001)
            ):  # lowest over highest is a function without local maxima
                other = [t * factor if i == j else t for j, t in enumerate(step)]
                assert np.divide(*np.sort(quotient(other, x))[[0, -1]]) < np.divide(*np.sort(quotient(step, x))[[0, -1]])
            low, high = quotient(step, x).min(), 1.0
            continue
        degrees = [1, 3, 5, 7] if step.d else [1, 3, 5] if step.c else [1, 3]
        powers = np.stack([x**degree for degree in degrees], -1)
        sides = np.concatenate([np.c_[powers, -np.ones(len(x))], np.c_[-powers, -np.ones(len(x))]])
        bounds = [(None, None)] * len(degrees) + [(0, 1)]
        best = linprog([0] * len(degrees) + [1], sides, np.r_[np.ones(len(x)), -np.ones(len(x))], bounds=bounds)
        *coefficients, error = best.x
        larger = 1.0 if steps is orthogonal._WITH_INVERSE else 1.02
        taken = [0.9995 / (1 + error) if is_last else larger**-degree for degree in degrees]
        np.testing.assert_allclose(step[: len(degrees)], np.array(coefficients) * taken, rtol=1e-4)
        y = powers @ np.array(step[: len(degrees)])
        low, high = y.min(), y.max()
    assert low >= 0.9941 and high <= 0.99951


def quotient(step: Any, x: np.ndarray) -> np.ndarray:
    a, b, c = step
    return x * (a + b * x**2) / (1 + c * x**2)


def in_steps(s: torch.Tensor) -> torch.Tensor:
    """What becomes of singular values, of Frobenius norm 1."""
    steps = orthogonal._WITH_INVERSE if len(s) > 64 else orthogonal._QUINTICS
    s = s / s.pow(4).sum() ** 0.25 if len(s) > 64 else s
    for step in steps:
        a, b, c, *d = step
        s = (a * s + b * s**3) / (1 + c * s**2) if isinstance(step, orthogonal._Rational) else a * s + b * s**3 + c * s**5
        assert d in ([], [0.0])
    return s


def semi_orthogonal(rows: int, columns: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, dtype=D))[0]


SPECTRA = {
    "gaussian": lambda m: torch.linalg.svdvals(torch.randn(m, 2 * m, dtype=D)),
    "one large": lambda m: torch.cat([torch.ones(1, dtype=D), torch.linspace(0.0041, 0.02, m - 1, dtype=D)]),
    "two large": lambda m: torch.cat([torch.ones(2, dtype=D), torch.linspace(0.0145, 0.02, m - 2, dtype=D)]),
    "one large, equal small": lambda m: torch.cat([torch.ones(1, dtype=D), torch.full((m - 1,), 0.0041, dtype=D)]),
    "half small": lambda m: torch.cat(
        [torch.ones(m // 2, dtype=D), torch.full((m - m // 2,), 0.0041 * math.sqrt(m / 2), dtype=D)]
    ),
    "all sizes": lambda m: torch.logspace(0, -4, m, dtype=D),
    "rank deficient": lambda m: torch.cat([torch.ones(m // 2, dtype=D), torch.zeros(m - m // 2, dtype=D)]),
    "equal": lambda m: torch.ones(m, dtype=D),
    "one that the first step makes small": lambda m: torch.cat(
        [torch.ones(1, dtype=D), torch.full((m - 1,), math.sqrt((1 / 0.84**2 - 1) / (m - 1)), dtype=D)]
    ),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16), (80, 80), (80, 400), (400, 400), (390, 800)])
def test_float32_keeps_the_accuracy_of_the_polynomial(shape, spectrum):
    """Steps on the Gram matrix, on x itself, and in blocks: small singular values must not drown beside large ones."""
    m = min(shape)
    s = SPECTRA[spectrum](m)
    s = s / s.norm()
    u, v = semi_orthogonal(shape[0], m), semi_orthogonal(shape[1], m)
    found = orthogonalize((u * s @ v.mT).float()).to(D)
    along = torch.einsum("ik,ij,jk->k", u, found, v)
    torch.testing.assert_close(along, in_steps(s), atol=1e-3, rtol=0)  # half of it in fifteen seeds
    assert along[s >= 0.004].min() >= 0.994
    assert torch.linalg.svdvals(found)[0] <= 1
    assert torch.linalg.matrix_norm(found - u * in_steps(s) @ v.mT, 2) <= 1e-2  # half of it in four seeds


@pytest.mark.parametrize("m, n", [(8, 8), (8, 400), (64, 96), (64, 192), (400, 400), (400, 1300)])
def test_products_are_saved_where_that_is_cheaper_and_change_nothing(m, n):
    """In float64, where both ways are exact."""
    x = torch.randn(m, n, dtype=D)
    plain = orthogonalize(x.clone().requires_grad_()).detach()  # which is to be differentiable
    torch.testing.assert_close(orthogonalize(x), plain, atol=1e-11, rtol=0)
    torch.testing.assert_close(orthogonalize(x.mT, size=3.0), 3 * plain.mT, atol=1e-11, rtol=0)
    torch.testing.assert_close(orthogonalize(torch.stack([x, 2 * x]), size=3.0), 3 * plain.expand(2, m, n), atol=1e-11, rtol=0)


@pytest.mark.parametrize("m, n", [(64, 64), (64, 96), (64, 104), (64, 192), (400, 400), (400, 560), (400, 640)])
def test_the_count_of_products_is_the_one_that_is_minimized(m, n):
    """As torch counts floating point operations, in one batch that leaves out nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(is_on_itself: bool) -> int:
        with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
            patch.setattr(orthogonal, "_is_on_itself", lambda *_: is_on_itself)
            patch.setattr(orthogonal, "_BLOCKS_OF_OTHERS", (1000, 2))
            orthogonalize(torch.randn(m, n))
        return counter.get_total_flops()

    assert flops(
        orthogonal._is_on_itself(torch.empty(m, n), orthogonal._QUINTICS if m <= 64 else orthogonal._WITH_INVERSE)
    ) == min(flops(True), flops(False))


class ProductsInTF32(TorchDispatchMode):
    """Matrix products round what they multiply to 10 bits, as a GPU does where torch is allowed to have it so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            args = [*map(self._rounded, args)]
        elif func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.baddbmm, torch.ops.aten.addmm_):
            args = [args[0], *map(self._rounded, args[1:])]
        return func(*args, **(kwargs or {}))

    def _rounded(self, t: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = t.frexp()
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


@pytest.mark.parametrize("spectrum", ["one large", "half small", "all sizes"])
def test_where_products_of_float32_are_rounded_no_gram_matrix_is_relied_on(spectrum):
    s = SPECTRA[spectrum](64)
    s = (s / s.norm()).clamp(min=0.01)
    g = (semi_orthogonal(64, 64) * s @ semi_orthogonal(200, 64).mT).float()
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        with ProductsInTF32():
            found = torch.linalg.svdvals(orthogonalize(g).to(D))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert found[-1] >= 0.99 and found[0] <= 1.01
    assert torch.get_float32_matmul_precision() == "highest"  # as it was


@pytest.mark.parametrize(
    "spectrum", ["gaussian", "one large", "two large", "half small", "equal", "one that the first step makes small"]
)
@pytest.mark.parametrize("shape", [(80, 96), (72, 300), (300, 72), (512, 512)])
def test_products_in_bfloat16_are_within_one_per_cent(spectrum, shape):
    m = min(shape)
    s = SPECTRA[spectrum](m).clamp(min=0.01)
    u, v = semi_orthogonal(shape[0], m), semi_orthogonal(shape[1], m)
    g = u * s @ v.mT
    found = torch.linalg.svdvals(orthogonalize(g.float(), "newton_schulz_bf16").to(D))
    assert found[-1 if (s / s.norm()).min() >= 0.01 else 0] >= 0.99 and found[0] <= 1.01
    assert (orthogonalize(g.float(), "newton_schulz_bf16") - orthogonalize(g.float())).norm() > 0  # it is another way


def test_in_bfloat16_a_batch_takes_as_many_steps_as_its_worst_matrix_needs():
    """Beside one whose singular values differ, one where they are alike takes five steps as well, and ends no worse."""
    u, v = semi_orthogonal(80, 80), semi_orthogonal(80, 80)
    alike, not_alike = ((u * (s / s.norm()) @ v.mT).float() for s in (SPECTRA["equal"](80), SPECTRA["one large"](80)))
    sizes = torch.tensor([1e-30, 1.0, 1e12])[:, None, None]  # and of sizes whose squares float32 does not have
    for some in (torch.stack([alike, alike, alike]), torch.stack([alike, not_alike, alike]), torch.stack([alike] * 3) * sizes):
        found = orthogonalize(some, "newton_schulz_bf16").to(D)
        s = torch.linalg.svdvals(found)
        assert s[:, 0].max() <= 1.01 and s[[0, 2], -1].min() >= 0.99
        torch.testing.assert_close(found[0], found[2], atol=1e-2, rtol=0)


def test_derivatives_of_steps_in_bfloat16_in_both_modes():
    """Numbers of x are read on a CPU, and memory is given to operations, which derivatives cannot follow: then nothing is read."""
    x, along = torch.randn(66, 70), torch.randn(66, 70)
    f = functools.partial(orthogonalize, method="newton_schulz_bf16")
    _, moved = torch.func.jvp(f, (x,), (along,))
    weights = torch.randn(66, 70)
    gradient = torch.func.grad(lambda t: (f(t) * weights).sum())(x)
    with fwAD.dual_level():
        by_duals = fwAD.unpack_dual(f(fwAD.make_dual(x, along))).tangent
    exact, in_64 = torch.func.jvp(functools.partial(orthogonalize, method="svd"), (x.to(D),), (along.to(D),))
    scale = in_64.norm()
    for found in (moved, by_duals):
        assert (found.to(D) - in_64).norm() <= 0.3 * scale
    a, b = (gradient * along).sum().item(), (moved * weights).sum().item()
    assert abs(a - b) <= 0.1 * scale * weights.norm()


def test_small_matrices_on_a_cpu_are_no_coarser_in_bfloat16_than_without():
    g = torch.randn(3, 64, 200)
    before = g.clone()
    found = [orthogonalize(g, method, 0.5) for method in ("newton_schulz", "newton_schulz_bf16")]
    assert torch.equal(*found) and torch.equal(g, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (80, 300)])
def test_forward_derivatives_and_vmap_go_through(shape):
    wide = ball(RMSToRMSTensor, (-2, -1), torch.Size(shape))
    g, u = torch.randn(3, *shape, dtype=D), torch.randn(3, *shape, dtype=D)
    _, found = torch.func.jvp(wide.lmo, (g,), (u,))
    expected = (wide.lmo(g + 1e-6 * u) - wide.lmo(g - 1e-6 * u)) / 2e-6
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.func.vmap(wide.lmo)(g), wide.lmo(g), atol=1e-11, rtol=0)
    (backward,) = torch.func.vjp(wide.lmo, g)[1](u)
    torch.testing.assert_close((backward * u).sum(), (found * u).sum(), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("method", ["newton_schulz", "svd"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_rank_deficient_matrices_keep_their_kernel(shape, method):
    g = torch.randn(shape[0], 2, dtype=D) @ torch.randn(2, shape[1], dtype=D)
    u, s, vh = torch.linalg.svd(g)
    torch.testing.assert_close(orthogonalize(g, method), u[:, :2] @ vh[:2], atol=0.006, rtol=0)
    assert orthogonalize(g, method).matmul(vh[2:].mT).abs().max() < 1e-9
