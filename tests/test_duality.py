"""Duality maps, projections and starts, against norms and dual norms written out here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ball, orthogonal, orthogonalize
from thunder_norm.modular.steepest import nonfinite, steepest_steps

D = torch.float64


@dataclass(frozen=True)
class Case:
    """A kind over dims, and a shape; `groups` of channels for kernels."""

    kind: type[NormedTensor]
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    groups: int = 1

    @property
    def ball(self):
        return ball(self.kind, self.dims, torch.Size(self.shape))

    def blocks(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The vectors or matrices the norm is the largest over."""
        if not issubclass(self.kind, RMSToRMSTensor):
            dims = tuple(d % t.ndim for d in self.dims)
            rest = [d for d in range(t.ndim) if d not in dims]
            return list(t.permute((*rest, *dims)).reshape(math.prod(t.shape[d] for d in rest), -1))
        out, into = (d % t.ndim for d in self.dims)
        rest = [d for d in range(t.ndim) if d not in (out, into)]
        matrices = t.permute((*rest, out, into)).reshape(-1, t.shape[out], t.shape[into])
        return [block for m in matrices for block in m.chunk(self.groups)]

    @property
    def taps(self) -> int:
        is_kernel = issubclass(self.kind, RMSToRMSConvTensor)
        return math.prod(self.shape) // (self.shape[self.dims[0]] * self.shape[self.dims[1]]) if is_kernel else 1

    def norm(self, t: torch.Tensor) -> float:
        """Largest of the blocks' norms."""
        return max(self._norm(b) for b in self.blocks(t.to(D)))

    def _norm(self, b: torch.Tensor) -> float:
        if issubclass(self.kind, RMSToRMSTensor):
            return torch.linalg.svdvals(b)[0].item() * math.sqrt(b.shape[1] / b.shape[0]) * self.taps
        if self.kind is RMSTensor:
            return math.sqrt((b**2).sum().item() / b.numel())
        return torch.linalg.vector_norm(b, {LinfTensor: math.inf, L2Tensor: 2, L1Tensor: 1}[self.kind]).item()

    def dual_norm(self, g: torch.Tensor) -> torch.Tensor:
        """Largest <g, D> over the ball: the sum of the blocks', differentiable."""
        return torch.stack([self._dual_norm(b) for b in self.blocks(g)]).sum()

    def _dual_norm(self, b: torch.Tensor) -> torch.Tensor:
        if issubclass(self.kind, RMSToRMSTensor):
            return torch.linalg.matrix_norm(b, "nuc") * math.sqrt(b.shape[0] / b.shape[1]) / self.taps
        if self.kind is RMSTensor:
            return torch.linalg.vector_norm(b) * math.sqrt(b.numel())
        return torch.linalg.vector_norm(b, {LinfTensor: 1, L2Tensor: 2, L1Tensor: math.inf}[self.kind])


CASES = {
    "rows": Case(RMSTensor, (-1,), (5, 7)),
    "several dims": Case(RMSTensor, (-3, -1), (4, 3, 2)),
    "l2": Case(L2Tensor, (-2,), (4, 3)),
    "l1": Case(L1Tensor, (-1,), (4, 6)),
    "entries": Case(LinfTensor, (), (3, 4)),
    "scalar": Case(LinfTensor, (), ()),
    "wide": Case(RMSToRMSTensor, (-2, -1), (4, 9)),
    "tall": Case(RMSToRMSTensor, (-2, -1), (9, 4)),
    "square": Case(RMSToRMSTensor, (-2, -1), (6, 6)),
    "transposed": Case(RMSToRMSTensor, (-1, -2), (4, 9)),
    "heads": Case(RMSToRMSTensor, (-2, -1), (3, 4, 5)),
    "kernel": Case(RMSToRMSConvTensor, (-4, -3), (6, 4, 3, 2)),
    "grouped kernel": Case(RMSToRMSConvTensor.grouped(2), (-3, -2), (6, 4, 3), groups=2),
    "depthwise kernel": Case(RMSToRMSConvTensor.grouped(4), (-3, -2), (4, 1, 3), groups=4),
    "transposed kernel": Case(RMSToRMSConvTensor, (-2, -3), (6, 4, 3)),
}
OPERATORS = [name for name, case in CASES.items() if issubclass(case.kind, RMSToRMSTensor)]
EACH = pytest.mark.parametrize("name", CASES)


@EACH
def test_norms_are_those_written_out(name):
    case = CASES[name]
    t = torch.randn(case.shape, dtype=D)
    assert case.ball.norm(t).item() == pytest.approx(case.norm(t), rel=1e-12)


@EACH
def test_the_steepest_step_has_norm_1_and_attains_the_dual_norm(name):
    case = CASES[name]
    g = torch.randn(case.shape, dtype=D)
    step = case.ball.lmo(g, "svd")
    assert case.norm(step) == pytest.approx(1, rel=1e-12)
    assert (g * step).sum().item() == pytest.approx(case.dual_norm(g).item(), rel=1e-12)
    torch.testing.assert_close(step, torch.func.grad(case.dual_norm)(g))


@EACH
def test_no_tensor_of_the_ball_is_steeper(name):
    """Not by the dual norm's formula: by ascent from many places."""
    case = CASES[name]
    g = torch.randn(case.shape, dtype=D)
    best = (g * case.ball.lmo(g, "svd")).sum().item()
    found = []
    for _ in range(50):
        d = torch.randn(case.shape, dtype=D)
        for _ in range(20):
            d = d / case.norm(d)
            found.append((g * d).sum().item())
            d = d + 0.3 * g * torch.rand(()) + 0.05 * torch.randn(case.shape, dtype=D)
    assert max(found) <= best * (1 + 1e-12)
    assert max(found) > 0.5 * best


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


def test_newton_schulz_on_singular_values_of_all_sizes():
    """The claims of the docstring, for the map of one singular value: the Gram matrix of a diagonal matrix is diagonal."""
    small = torch.logspace(-6, -0.0001, 4000, dtype=D)
    pairs = torch.diag_embed(torch.stack([small, (1 - small**2).sqrt()], -1))  # of Frobenius norm 1
    out = orthogonalize(pairs).diagonal(dim1=-2, dim2=-1)
    assert out.max() <= 0.99934
    assert out[pairs.diagonal(dim1=-2, dim2=-1) >= 3e-3].min() >= 0.9955
    assert (orthogonalize(pairs) - torch.diag_embed(out)).abs().max() == 0


def in_six_steps(s: torch.Tensor) -> torch.Tensor:
    """What becomes of singular values, of Frobenius norm 1: Modula's six steps."""
    for a, b, c in (
        (3955, -8306, 5008),
        (3735, -6681, 3463),
        (3799, -6499, 3211),
        (4019, -6385, 2906),
        (2677, -3029, 1162),
        (2172, -1833, 682),
    ):
        s = (a * s + b * s**3 + c * s**5) / 1024
    return s


def semi_orthogonal(rows: int, columns: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, dtype=D))[0]


SPECTRA = {
    "gaussian": lambda m: torch.linalg.svdvals(torch.randn(m, 2 * m, dtype=D)),
    "one large": lambda m: torch.cat([torch.ones(1, dtype=D), torch.linspace(0.0031, 0.02, m - 1, dtype=D)]),
    "one large, equal small": lambda m: torch.cat([torch.ones(1, dtype=D), torch.full((m - 1,), 0.0031, dtype=D)]),
    "half small": lambda m: torch.cat(
        [torch.ones(m // 2, dtype=D), torch.full((m - m // 2,), 0.0031 * math.sqrt(m / 2), dtype=D)]
    ),
    "all sizes": lambda m: torch.logspace(0, -4, m, dtype=D),
    "rank deficient": lambda m: torch.cat([torch.ones(m // 2, dtype=D), torch.zeros(m - m // 2, dtype=D)]),
    "equal": lambda m: torch.ones(m, dtype=D),
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
    torch.testing.assert_close(along, in_six_steps(s), atol=1e-3, rtol=0)  # half of it in fifteen seeds
    assert along[s >= 0.003].min() >= 0.995
    assert torch.linalg.svdvals(found)[0] <= 1
    assert torch.linalg.matrix_norm(found - u * in_six_steps(s) @ v.mT, 2) <= 4e-3


@pytest.mark.parametrize("m, n", [(8, 8), (8, 12), (8, 24), (8, 400), (400, 400), (400, 1300)])
def test_products_are_saved_where_that_is_cheaper_and_change_nothing(m, n):
    """In float64, where both ways are exact."""
    x = torch.randn(m, n, dtype=D)
    plain = orthogonalize(x.clone().requires_grad_()).detach()  # which is to be differentiable
    torch.testing.assert_close(orthogonalize(x), plain, atol=1e-11, rtol=0)
    torch.testing.assert_close(orthogonalize(x.mT, size=3.0), 3 * plain.mT, atol=1e-11, rtol=0)
    torch.testing.assert_close(orthogonalize(torch.stack([x, 2 * x]), size=3.0), 3 * plain.expand(2, m, n), atol=1e-11, rtol=0)


@pytest.mark.parametrize("m, n", [(8, 8), (8, 24), (400, 400)])
def test_the_count_of_products_is_the_one_that_is_minimized(m, n):
    """As torch counts floating point operations, in one batch that leaves out nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(steps: int) -> int:
        with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
            patch.setattr(orthogonal, "_steps_on_x", lambda m, n: steps)
            patch.setattr(orthogonal, "_BLOCK", 1000)
            orthogonalize(torch.randn(m, n))
        return counter.get_total_flops()

    chosen = orthogonal._steps_on_x(m, n)
    assert flops(chosen) == min(flops(steps) for steps in range(1, 7))


@pytest.mark.parametrize("spectrum", ["gaussian", "one large", "half small", "equal"])
@pytest.mark.parametrize("shape", [(16, 64), (64, 64), (64, 16)])
def test_products_in_bfloat16_are_within_one_per_cent(spectrum, shape):
    m = min(shape)
    s = SPECTRA[spectrum](m).clamp(min=0.01)
    u, v = semi_orthogonal(shape[0], m), semi_orthogonal(shape[1], m)
    g = u * s @ v.mT
    found = torch.linalg.svdvals(orthogonalize(g.float(), "newton_schulz_bf16").to(D))
    assert found[-1 if (s / s.norm()).min() >= 0.01 else 0] >= 0.99 and found[0] <= 1.01
    assert (orthogonalize(g.float(), "newton_schulz_bf16") - orthogonalize(g.float())).norm() > 0  # it is another way


@EACH
@pytest.mark.parametrize("method", ["newton_schulz", "newton_schulz_bf16", "svd"])
def test_the_size_of_a_step_multiplies_it(name, method):
    case = CASES[name]
    g = torch.randn(case.shape)
    torch.testing.assert_close(case.ball.lmo(g, method, 0.3), 0.3 * case.ball.lmo(g, method), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, dims", [(RMSTensor, (-1,)), (L2Tensor, (-1,)), (L1Tensor, (-1,)), (LinfTensor, ()), (RMSTensor, (-2,))]
)
def test_large_tables_go_through_the_map_in_pieces(kind, dims):
    g = torch.randn(1537, 203)
    table = ball(kind, dims, g.shape)
    pieces = table.pieces(g)
    assert len(pieces) == (3 if dims != (-2,) else 1)
    assert torch.equal(torch.cat(list(pieces)), g)
    whole = table.lmo(g.clone().requires_grad_()).detach()  # which is to be differentiable, in one piece
    torch.testing.assert_close(table.lmo(g), whole, atol=1e-6, rtol=1e-6)


def test_steps_of_many_are_those_of_each():
    tall, wide, rows = (CASES[name].ball for name in ("tall", "wide", "rows"))
    parts = [
        (tall, (9, 4)),
        (rows, (5, 7)),
        (wide, (4, 9)),
        (tall, (9, 4)),
        (wide, (130, 140)),
        (wide, (130, 140)),
        (rows, (5, 7)),
    ]
    parts = [(of_kind, torch.randn(shape), 0.1 * i) for i, (of_kind, shape) in enumerate(parts)]
    for (of_kind, g, size), step in zip(parts, steepest_steps(parts), strict=True):
        torch.testing.assert_close(step, size * of_kind.lmo(g), atol=1e-6, rtol=1e-5)


def test_entries_that_are_not_finite_are_found_and_large_ones_are_not():
    largest = torch.finfo(torch.float32).max
    tensors = {
        "large": torch.full((3, 4), largest),
        "large half": torch.full((400,), 6e4, dtype=torch.float16),
        "infinite": torch.tensor([1.0, math.inf, -math.inf]),
        "nan": torch.eye(100).index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(math.nan)),
        "both signs": torch.tensor([largest, -largest]),
        "empty": torch.empty(0),
        "half": torch.tensor([1.0, -math.inf], dtype=torch.bfloat16),
    }
    assert nonfinite(tensors) == ["infinite", "nan", "half"]


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


@EACH
@pytest.mark.parametrize("method", ["newton_schulz", "svd"])
def test_zeros_give_zeros(name, method):
    case = CASES[name]
    assert case.ball.lmo(torch.zeros(case.shape), method).abs().sum() == 0
    assert case.ball.project(torch.zeros(case.shape)).abs().sum() == 0


@EACH
@pytest.mark.parametrize("method", ["newton_schulz", "svd"])
def test_blocks_without_a_gradient_stay_and_the_others_do_not_notice(name, method):
    case = CASES[name]
    g = torch.randn(case.shape, dtype=D)
    first = case.blocks(torch.arange(g.numel()).reshape(case.shape))[0].reshape(-1)
    g.view(-1)[[i for i in range(g.numel()) if i not in first]] = 0
    blocks = case.blocks(case.ball.lmo(g, method))
    assert case._norm(blocks[0]) == pytest.approx(1, abs=0.01)
    assert all(block.abs().sum() == 0 for block in blocks[1:])


@EACH
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e18, 1e37])
def test_steps_do_not_depend_on_the_size_of_the_gradient(name, scale):
    case = CASES[name]
    g = torch.randn(case.shape)
    torch.testing.assert_close(case.ball.lmo(g * scale), case.ball.lmo(g), atol=2e-5, rtol=2e-5)


@EACH
@pytest.mark.parametrize("method", ["newton_schulz", "svd"])
def test_stacked_tensors_are_mapped_one_by_one(name, method):
    case = CASES[name]
    g = torch.randn(2, 3, *case.shape, dtype=D)
    for f in (lambda t: case.ball.lmo(t, method), case.ball.project):
        single = torch.stack([f(t) for t in g.flatten(0, 1)]).view(g.shape)
        torch.testing.assert_close(f(g), single, atol=1e-12, rtol=1e-12)


@EACH
@pytest.mark.parametrize("size", [0.3, 1.5, 20.0])
def test_a_projection_is_the_nearest_tensor_of_the_ball(name, size):
    """Optimal if and only if no tensor q of the ball has <t - p, q> > <t - p, p>."""
    case = CASES[name]
    t = torch.randn(case.shape, dtype=D)
    t = t * (size / case.norm(t))
    p = case.ball.project(t)
    assert case.norm(p) <= 1 + 1e-12
    assert case.dual_norm(t - p).item() <= ((t - p) * p).sum().item() + 1e-9
    if size <= 1:
        assert torch.equal(p, t)


@EACH
def test_starts_have_norm_exactly_1_in_every_block(name):
    case = CASES[name]
    t = case.ball.draw(torch.Size(case.shape), torch.Generator().manual_seed(seeded(3)))
    assert t.shape == case.shape and t.dtype == D
    assert [case._norm(b) for b in case.blocks(t)] == pytest.approx([1.0] * len(case.blocks(t)), rel=1e-12)
    assert torch.equal(t, case.ball.draw(torch.Size(case.shape), torch.Generator().manual_seed(seeded(3))))
    if issubclass(case.kind, RMSToRMSTensor):  # all singular values are the largest
        for b in case.blocks(t):
            s = torch.linalg.svdvals(b)
            torch.testing.assert_close(s, s[:1].expand_as(s))


def test_starts_prefer_no_direction():
    matrices = CASES["square"].ball.draw(torch.Size((4000, 6, 6)), torch.Generator().manual_seed(seeded(0)))
    assert matrices.mean(0).abs().max() < 7 * math.sqrt(1 / 6 / 4000)  # 36 entries: 7 standard errors
    assert torch.linalg.det(matrices).mean().abs() < 7 / math.sqrt(4000)


@pytest.mark.parametrize("name", ["rows", "l2", "wide", "tall", "grouped kernel"])
def test_steps_are_differentiable_in_the_gradient(name):
    case = CASES[name]
    g = torch.randn(case.shape, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(case.ball.lmo, (g,))


@EACH
def test_zeros_have_finite_derivatives(name):
    g = torch.zeros(CASES[name].shape, dtype=D, requires_grad=True)
    (found,) = torch.autograd.grad(CASES[name].ball.lmo(g).sum(), g, allow_unused=True, materialize_grads=True)
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ["rows", "l2", "l1", "wide"])
@pytest.mark.parametrize("dtype, scales", [(torch.float32, (1e-45, 1e-40, 3e38)), (torch.float64, (5e-324, 1e-200, 1e300))])
def test_gradients_at_the_ends_of_a_dtype_never_give_longer_steps(name, dtype, scales):
    case = CASES[name]
    for scale in scales:
        step = case.ball.lmo(torch.rand(case.shape, dtype=dtype) * scale)
        assert step.isfinite().all() and case.norm(step) <= 1 + 1e-6


@pytest.mark.parametrize("name", ["wide", "rows", "entries", "l1"])
def test_empty_tensors_stay_empty(name):
    case = CASES[name]
    for shape in ((0, 4), (4, 0)):
        of_shape = ball(case.kind, case.dims, torch.Size(shape))
        for method in ("newton_schulz", "svd"):
            assert of_shape.lmo(torch.empty(shape), method).shape == shape
        assert of_shape.project(torch.empty(shape)).shape == shape
        assert of_shape.draw(torch.Size(shape)).shape == shape


def test_what_is_not_known_is_refused():
    class Other(NormedTensor):
        pass

    with pytest.raises(NormMismatchError, match="Other has no duality map"):
        ball(Other, (-1,), torch.Size((3,)))
    with pytest.raises(NormMismatchError, match="one of 'newton_schulz', .*'svd', got 'qr'"):
        orthogonalize(torch.eye(2), "qr")  # type: ignore[arg-type]
