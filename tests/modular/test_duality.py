"""Duality maps, projections and starts, against norms and dual norms written out here."""

from __future__ import annotations

import math

import pytest
import torch

from tests.modular.balls import CASES, D
from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ball, orthogonalize
from thunder_norm.modular.steepest import nonfinite, steepest_steps

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
def test_autocast_rounds_nothing(name):
    case = CASES[name]
    g = torch.randn(case.shape)
    maps = [case.ball.lmo, lambda t: case.ball.lmo(t, "svd"), lambda t: case.ball.project(5 * t), case.ball.norm]
    exact = [f(g) for f in maps]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(f(g), t) for f, t in zip(maps, exact, strict=True))
        assert case.ball.lmo(g.to("meta")).shape == g.shape


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
