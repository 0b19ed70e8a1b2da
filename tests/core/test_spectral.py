"""The largest singular value against torch's decomposition in float64, where Lanczos' method has a hard time; and its derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core import measuring, spectral
from thunder_norm.core.measuring import operator_norm


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seeded(seed)), dtype=torch.float64)


def orthogonal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(drawn(n, n, seed=seed)).Q


def with_singular_values(values: torch.Tensor, m: int = 150, n: int = 200) -> torch.Tensor:
    values = torch.nn.functional.pad(values.double(), (0, m - len(values)))
    return (orthogonal(m) * values) @ orthogonal(n, seed=1)[:m]


def _spread(top: list[float]) -> torch.Tensor:
    return torch.cat([torch.tensor(top, dtype=torch.float64), torch.linspace(0, 0.9, 100, dtype=torch.float64)])


MATRICES = {
    "gaussian": lambda: drawn(150, 200),
    "tall": lambda: drawn(300, 100),
    "square": lambda: drawn(128, 128),
    "one row": lambda: drawn(1, 9000),
    "one column": lambda: drawn(9000, 1),
    "few rows": lambda: drawn(5, 3000),
    "zero": lambda: torch.zeros(100, 120),
    "one entry": lambda: torch.zeros(100, 120).index_put((torch.tensor(7), torch.tensor(90)), torch.tensor(-3.0)),
    "rank one": lambda: torch.outer(drawn(150), drawn(200, seed=1)),
    "identity": lambda: torch.eye(130),
    "orthogonal": lambda: orthogonal(130),
    "diagonal": lambda: torch.diag(torch.arange(1.0, 131.0)),
    "hilbert": lambda: 1 / (torch.arange(100.0)[:, None] + torch.arange(100.0) + 1).double(),
    "top twice": lambda: with_singular_values(_spread([1.0, 1.0])),
    "top close": lambda: with_singular_values(_spread([1.0, 1 - 1e-9, 1 - 2e-9])),
    "top clustered": lambda: with_singular_values(torch.cat([1 - torch.arange(40) * 1e-6, torch.linspace(0, 0.9, 90)])),
    "no gap": lambda: with_singular_values(torch.linspace(1 - 1e-5, 1, 150)),
    "geometric": lambda: with_singular_values(0.5 ** torch.arange(150.0)),
    "tiny": lambda: drawn(150, 200) * 1e-30,
    "smallest": lambda: drawn(150, 200) * 1e-41,
    "huge": lambda: drawn(150, 200) * 1e30,
    "constant": lambda: torch.full((100, 120), 0.1),
}


def _reference(matrices: torch.Tensor) -> float:
    return torch.linalg.svdvals(matrices.double()).max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_it_is_that_of_the_decomposition_in_float64(name, dtype):
    matrix = MATRICES[name]().to(dtype)
    if not matrix.isfinite().all():
        pytest.skip("beyond the dtype")
    expected, found = _reference(matrix), spectral.largest_singular_value(matrix[None])
    assert expected * (1 - spectral.SLACK / 2) * (1 - 1e-12) <= found.value <= expected * (1 + 1e-12)
    smaller, other = (matrix, found.vector) if matrix.shape[0] <= matrix.shape[1] else (matrix.mT, found.vector)
    assert torch.linalg.vector_norm(found.vector).item() == pytest.approx(1)
    assert torch.linalg.vector_norm(smaller.double().mT @ other).item() == pytest.approx(expected, rel=2e-8)
    torch.testing.assert_close(spectral.other_vector(smaller, other), other @ smaller.double())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (64, 64), (65, 65), (65, 400), (191, 192), (192, 191), (200, 97)], ids=str)
def test_of_any_shape(shape, seed):
    matrix = drawn(*shape, seed=seed).float()
    assert spectral.largest_singular_value(matrix[None]).value == pytest.approx(_reference(matrix), rel=1e-12)


def test_a_start_orthogonal_to_the_vector_is_found_out(monkeypatch):
    left, right = orthogonal(150), orthogonal(200, seed=1)[:150]
    matrix = ((left * torch.linspace(2, 0, 150, dtype=torch.float64)) @ right).float()
    u, s, _ = torch.linalg.svd(matrix.double())
    for start in (u[:, 1], u[:, 100], u[:, 1:].sum(1), torch.zeros(150, dtype=torch.float64)):
        assert spectral.largest_singular_value(matrix[None], start).value == pytest.approx(s[0].item(), rel=1e-12)
    # even if what is drawn has nothing of it: not to rounding, so that no number of steps finds it
    diagonal = torch.diag(torch.linspace(2, 0.5, 150))
    without_it = torch.nn.functional.pad(torch.ones(149, dtype=torch.float64), (1, 0))
    monkeypatch.setattr(spectral, "_noise", lambda size: without_it)
    assert spectral.largest_singular_value(diagonal[None]).value == pytest.approx(2, rel=1e-12)


def test_no_number_of_failed_steps_is_taken_for_the_result(monkeypatch):
    monkeypatch.setattr(spectral, "_MAX_STEPS", 3)
    matrix = drawn(150, 200).float()
    assert spectral.largest_singular_value(matrix[None]).value == pytest.approx(_reference(matrix), rel=1e-12)


def test_a_certificate_is_given_only_to_bounds():
    gram = spectral._gram(drawn(200, 300).float())
    top = torch.linalg.eigvalsh(gram)[-1].item()
    assert spectral._factorized(gram, top) is not None
    for too_small in (top * (1 - 2 * spectral.SLACK), top / 2, 0.0):
        assert spectral._factorized(gram, too_small) is None


@pytest.mark.parametrize("size", [60, 96, 250, 389])
def test_the_gram_matrix_is_whole_however_it_is_cut(size, monkeypatch):
    matrix = drawn(size, 400).float()
    monkeypatch.setattr(spectral, "_CHUNK", 70 * size)
    torch.testing.assert_close(spectral._gram(matrix), matrix.double() @ matrix.double().mT)
    a = matrix.double() @ matrix.double().mT + torch.eye(size)
    factor = a.clone()
    assert spectral._factorize(factor)
    torch.testing.assert_close(factor.tril(), torch.linalg.cholesky(a))


@pytest.mark.parametrize("shape", [(7, 9, 20), (300, 9, 20), (5, 100, 80), (4, 80, 100)], ids=str)
def test_the_largest_of_several(shape, monkeypatch):
    monkeypatch.setattr(spectral, "_CHUNK", 5000)
    matrices = drawn(*shape).float()
    values = torch.linalg.svdvals(matrices.double())[:, 0]
    found = spectral.largest_singular_value(matrices)
    assert found.index == values.argmax()
    assert found.value == pytest.approx(values.max().item(), rel=1e-12)


def test_the_random_state_is_left_alone():
    spectral._noise.cache_clear()
    before = torch.get_rng_state()
    spectral.largest_singular_value(drawn(100, 100).float()[None])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(40, 90), (65, 66), (300, 70), (3, 80, 100), (1100, 1030)], ids=str)
def test_both_extremes_and_the_sum_of_all(shape, dtype):
    t = drawn(*shape).to(dtype)
    values = torch.linalg.svdvals(t.double())
    found = measuring.extreme_singular_values(t, (-2, -1))
    assert found == pytest.approx((values.max().item(), values.min().item()), rel=1e-6, abs=1e-8 * values.max().item())
    matrices = t.view(-1, *shape[-2:])
    if dtype != torch.float64 and spectral.has_fast_spectrum(matrices):
        assert spectral.sum_of_singular_values(matrices) == pytest.approx(values.sum().item(), rel=1e-6)


@pytest.mark.parametrize("spoil", [lambda t: t[3, 4].fill_(torch.nan), lambda t: t.mul_(1e36), lambda t: t.zero_()])
def test_extremes_of_what_is_not_finite_or_too_large_or_zero(spoil):
    t = drawn(80, 90).float()
    spoil(t)
    found = measuring.extreme_singular_values(t, (-2, -1))
    if t.isnan().any():
        assert found is None
        return
    values = torch.linalg.svdvals(t.double())
    assert found == pytest.approx((values.max().item(), values.min().item()), rel=1e-6)


def test_who_asked_for_the_extremes_has_the_norm_and_its_derivative(monkeypatch):
    t = drawn(80, 100, seed=5).float().requires_grad_()
    measuring.extreme_singular_values(t, (-2, -1))
    monkeypatch.setattr(spectral, "extreme_singular_values", None)
    norm = operator_norm(t, (-2, -1))
    assert norm.item() == pytest.approx(_reference(t), rel=1e-7)
    norm.backward()
    at = t.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(torch.linalg.matrix_norm(at, 2), at)
    torch.testing.assert_close(t.grad, want.float())
    with torch.no_grad():
        t.mul_(2)  # it is of what the tensor was
    assert operator_norm(t, (-2, -1)).item() == pytest.approx(2 * norm.item(), rel=1e-7)


# -- the operation ----------------------------------------------------------------------------------------------------

CASES = {
    "matrix": ((80, 100), (-2, -1), 1),
    "transposed": ((100, 80), (-1, -2), 1),
    "tall": ((300, 70), (-2, -1), 1),
    "heads": ((4, 80, 100), (-2, -1), 1),
    "first and last": ((80, 4, 100), (-3, -1), 1),
    "convolution": ((80, 70, 3, 3), (-4, -3), 1),
    "groups": ((160, 70, 3), (-3, -2), 2),
    "depthwise": ((512, 1, 3, 3), (-4, -3), 512),
    "small": ((8, 9), (-2, -1), 1),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _by_torch(t: torch.Tensor, dims: tuple[int, int], groups: int) -> torch.Tensor:
    """The definition, by torch's decomposition in float64."""
    pieces = t.double().chunk(groups, dims[0])
    return torch.stack([torch.linalg.matrix_norm(p, 2, dims).amax() for p in pieces]).amax()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_of_the_operation(case, dtype):
    shape, dims, groups = CASES[case]
    t = drawn(*shape).to(dtype)
    expected_at = t.detach().double().requires_grad_()
    expected = _by_torch(expected_at, dims, groups)
    (want,) = torch.autograd.grad(3 * expected, expected_at)
    t.requires_grad_()
    norm = operator_norm(t, dims, groups)
    assert norm.dtype is torch.float64 and norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    (got,) = torch.autograd.grad(3 * norm, t)
    assert got.dtype is dtype
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 2e-2)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    with torch.no_grad():
        assert operator_norm(t, dims, groups).item() == pytest.approx(norm.item(), rel=1e-6)


def test_derivatives_beyond_the_first():
    start = drawn(70, 80).float().requires_grad_()
    direction = drawn(70, 80, seed=1).float()

    def exact(t):
        return torch.linalg.matrix_norm(t, 2).double()

    def norm(t):
        return operator_norm(t, (-2, -1))

    def second(f):
        (first,) = torch.autograd.grad(f(start), start, create_graph=True)
        return torch.autograd.grad((first * direction).sum(), start)[0]

    torch.testing.assert_close(second(norm), second(exact))
    (through,) = torch.autograd.grad(norm(start).square(), start, create_graph=True)  # in the cotangent too
    (want,) = torch.autograd.grad(exact(start).square(), start, create_graph=True)
    torch.testing.assert_close(*(torch.autograd.grad((g * direction).sum(), start)[0] for g in (through, want)))


def test_transforms_of_torch_func():
    t, direction = drawn(70, 80).float(), drawn(70, 80, seed=1).float()
    exact = lambda t: torch.linalg.matrix_norm(t, 2).double()  # noqa: E731
    norm = lambda t: operator_norm(t, (-2, -1))  # noqa: E731
    for got, want in zip(torch.func.jvp(norm, (t,), (direction,)), torch.func.jvp(exact, (t,), (direction,)), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.grad(norm)(t), torch.func.grad(exact)(t))
    several = torch.stack([t, direction])
    torch.testing.assert_close(torch.func.vmap(norm)(several), torch.func.vmap(exact)(several))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(norm))(several), torch.func.vmap(torch.func.grad(exact))(several))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t, direction)
        tangents = [torch.autograd.forward_ad.unpack_dual(f(dual)).tangent for f in (norm, exact)]
    torch.testing.assert_close(*tangents)


def test_batched_gradients():
    t = drawn(70, 80).float().requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    (got,) = torch.autograd.grad(operator_norm(t, (-2, -1)), t, weights, is_grads_batched=True)
    (one,) = torch.autograd.grad(torch.linalg.matrix_norm(t, 2), t)
    torch.testing.assert_close(got, weights.float()[:, None, None] * one)


def test_the_derivative_at_zero_is_that_of_the_decomposition():
    t = torch.zeros(80, 100, requires_grad=True)
    (got,) = torch.autograd.grad(operator_norm(t, (-2, -1)), t)
    (want,) = torch.autograd.grad(torch.linalg.matrix_norm(t, 2), t)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
def test_entries_that_are_not_finite(entry, dtype):
    t = drawn(80, 100).to(dtype)
    t[3, 4] = entry
    want = torch.tensor(entry, dtype=torch.float64).abs()
    torch.testing.assert_close(operator_norm(t, (-2, -1)), want, equal_nan=True)
    torch.testing.assert_close(operator_norm(t.requires_grad_(), (-2, -1)).detach(), want, equal_nan=True)


def test_entries_whose_sums_overflow():
    t = torch.full((80, 100), 3e38)
    assert operator_norm(t, (-2, -1)) >= _reference(t)  # infinite, as float32's own is
    t = drawn(80, 100).float() * 1e35
    assert operator_norm(t, (-2, -1)).item() == pytest.approx(_reference(t), rel=1e-6)


def test_autocast_and_precision_are_not_the_operations_affair():
    t = drawn(80, 100).float()
    expected = operator_norm(t.clone(), (-2, -1)).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operator_norm(t.clone(), (-2, -1)).item() == expected
        got = torch.autograd.grad(operator_norm(at := t.clone().requires_grad_(), (-2, -1)), at)[0]
    (want,) = torch.autograd.grad(torch.linalg.matrix_norm(at, 2), at)
    torch.testing.assert_close(got, want)


def test_tensors_without_data_and_empty_ones():
    assert operator_norm(torch.empty(80, 100, device="meta"), (-2, -1)).shape == ()
    assert RMSToRMSTensor.of(torch.empty(0, 80, 100)).norm_size.item() == 0
    assert RMSToRMSConvTensor.of(torch.empty(0, 3, 5)).norm_size.item() == 0


def test_only_coarse_and_large_tensors_are_measured_by_it(monkeypatch):
    def refuse(*args):
        raise AssertionError("not by Lanczos' method")

    monkeypatch.setattr(spectral, "largest_singular_value", refuse)
    for t in (drawn(80, 100), drawn(8, 9).float()):
        assert operator_norm(t, (-2, -1)).item() == pytest.approx(_reference(t), rel=1e-6)
    with pytest.raises(AssertionError, match="Lanczos"):
        measuring.operator_norm(drawn(80, 101).float(), (-2, -1))
