"""Conversions between kinds: never too small, and attained by the witness each constant is named after."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.audit import Ball, norm, start
from thunder_norm.core.conversions import can_convert, convert, factor
from thunder_norm.errors import NormMismatchError

R, INF, L1, L2, OP, CONV = RMSTensor, LinfTensor, L1Tensor, L2Tensor, RMSToRMSTensor, RMSToRMSConvTensor
D = torch.float64
SHAPE = (2, 3, 4)
DIMS = [(), (-1,), (-2,), (-2, -1), (-3, -1), (-3, -2, -1)]
VECTORS = [(k, d) for k in (R, L1, L2) for d in DIMS] + [(INF, ())]
OPERATORS = [(OP, (-2, -1)), (OP, (-1, -2)), (OP, (-3, -1))]
KINDS = VECTORS + OPERATORS


def witnesses(ball: Ball):
    """Starting points of all sorts, and tensors with one entry, row, column or block."""
    generator = torch.Generator().manual_seed(seeded(0))
    yield from (start(ball, sort, generator) for sort in range(24))
    for kept in itertools.product((False, True), repeat=len(ball.shape)):
        t = torch.zeros(ball.shape, dtype=D)
        t[tuple(slice(None) if k else 0 for k in kept)] = 1.0
        yield t
    eye = torch.eye(ball.shape[-2], ball.shape[-1], dtype=D)
    yield eye.expand(ball.shape).clone()
    yield torch.eye(ball.shape[0], ball.shape[-1], dtype=D).unsqueeze(1).expand(ball.shape).clone()


def worst_ratio(source: tuple, target: tuple) -> float:
    ball = Ball("x", source[0], SHAPE, 1.0, source[1])
    worst = 0.0
    for t in witnesses(ball):
        size = norm(source[0], t, ball.dims)
        worst = max(worst, (norm(target[0], t, Ball("y", target[0], SHAPE, 1.0, target[1]).dims) / size).item())
    return worst


def claimed(source: tuple, target: tuple) -> float | None:
    x = source[0](1.0, backing=torch.zeros(SHAPE, dtype=D), elem_dims=source[1])
    return factor(x, target[0], Ball("y", target[0], SHAPE, 1.0, target[1]).dims)


@pytest.mark.parametrize("source", KINDS, ids=lambda k: f"{k[0].__name__}{k[1]}")
def test_factors_are_sound_and_attained(source):
    for target in KINDS:
        c = claimed(source, target)
        if c is None:
            assert OP in (source[0], target[0])
            continue
        worst = worst_ratio(source, target)
        assert worst <= c * (1 + 1e-9), (target, worst, c)
        assert worst >= c * 0.999, (target, worst, c)


@pytest.mark.parametrize("d_out, d_in", [(3, 5), (5, 3), (4, 4)])
def test_operator_and_entries(d_out, d_in):
    """rms <= op sqrt(min) / in over all entries, sqrt(out) / in over rows; op <= in rms."""
    generator = torch.Generator().manual_seed(seeded(0))
    w = OP(1.0, backing=torch.zeros(d_out, d_in))
    assert convert(w, R, (-2, -1)).norm_size.item() == pytest.approx(math.sqrt(min(d_out, d_in)) / d_in)
    assert convert(w, R, (-1,)).norm_size.item() == pytest.approx(math.sqrt(d_out) / d_in)
    assert convert(w, R, (-2,)).norm_size.item() == pytest.approx(1 / math.sqrt(d_in))
    assert convert(R(1.0, backing=torch.zeros(d_out, d_in)), OP).norm_size.item() == d_in
    ball = Ball("w", OP, (d_out, d_in))
    orthogonal = start(ball, 4, generator)
    assert norm(R, orthogonal, (-2, -1)).item() == pytest.approx(math.sqrt(min(d_out, d_in)) / d_in)


def test_transposed_operator_reads_the_other_way():
    w = torch.randn(3, 5, dtype=D)
    there = OP.of(w)
    back = convert(there, OP, (-1, -2))
    assert back.norm_size.item() == pytest.approx(OP.of(w, (-1, -2)).norm_size.item())
    assert back.norm_size.item() == pytest.approx(there.norm_size.item() * 3 / 5)


def test_conversion_keeps_backing_and_scales_the_perturbation():
    x = R(2.0, backing=torch.zeros(3, 4), perturbation_size=0.5)
    y = convert(x, INF)
    assert y.backing is x.backing
    assert (y.norm_size.item(), y.perturbation_size.item()) == (4.0, 1.0)
    assert convert(x, R, (-1,)) is x


def test_conversion_is_differentiable():
    n = torch.tensor(2.0, dtype=D, requires_grad=True)
    convert(R(n, backing=torch.zeros(3, 4)), INF).norm_size.backward()
    assert n.grad.item() == 2.0


def test_what_has_no_conversion_is_refused():
    kernel = CONV(1.0, backing=torch.zeros(3, 2, 4))
    assert not can_convert(kernel, R)
    with pytest.raises(NormMismatchError, match="no conversion"):
        convert(kernel, R)
    with pytest.raises(NormMismatchError, match="no conversion"):
        convert(OP(1.0, backing=torch.zeros(2, 3, 4)), OP, (-3, -1))


def test_of_a_kind_that_a_user_defines_nothing_is_known():
    class OwnTensor(NormedTensor):
        """A norm that neither bounds another one nor is bounded by it."""

    own = OwnTensor(1.0, backing=torch.zeros(3, 4))
    for kind in (R, INF, L1, L2, OP):
        assert not can_convert(own, kind)
        assert not can_convert(kind(1.0, backing=torch.zeros(3, 4)), OwnTensor)


@pytest.mark.parametrize("source", [R, L1, L2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [*DIMS, (-3,)])
def test_entries_bound_a_kernel(dims, groups, source):
    """Soundly, and attained by a constant or by one tap, or one group, that has it all; of an l1 norm by fewer entries."""
    kind, shape = CONV.grouped(groups), (4, 2, 3)
    worst = 0.0
    for t in witnesses(Ball("x", R, shape, 1.0, dims)):
        for kept in (slice(None), slice(0, 4 // groups)):
            part = torch.zeros_like(t)
            part[kept] = t[kept]
            size = source.of(part, dims).norm_size
            worst = max(worst, (kind.of(part).norm_size / size).item() if size else 0.0)
    c = factor(source(1.0, backing=torch.zeros(shape), elem_dims=dims), kind, (-3, -2))
    assert worst <= c * (1 + 1e-9)
    assert source is L1 or c / 1.001 <= worst * (4 if dims and -3 not in dims else 1)


@pytest.mark.parametrize("dims", [(-4, -3), (-3, -4)], ids=str)
@pytest.mark.parametrize("taps", [(1, 1), (2, 3)], ids=str)
def test_operators_bound_a_kernel_of_them(taps, dims):
    """Attained where all taps are one matrix; a matrix viewed as a kernel of one tap has its own norm."""
    torch.manual_seed(seeded(0))
    matrix = torch.randn(4, 3, 1, 1, dtype=D)
    for t in (matrix.expand(4, 3, *taps), torch.randn(4, 3, *taps, dtype=D)):
        found, exact = convert(OP.of(t, dims), CONV, (-4, -3)).norm_size, CONV.of(t).norm_size
        assert exact <= found * (1 + 1e-9)
        if t.stride(-1) == 0:
            assert found.item() == pytest.approx(exact.item())
    assert not can_convert(OP(1.0, backing=matrix.new_zeros(4, 3, 2, 2), elem_dims=(-4, -3)), CONV.grouped(2))


def test_a_vector_is_no_operator():
    """Rules for several kinds ask whether a vector could be one."""
    for kind in (R, L1, L2, INF):
        assert not can_convert(kind(1.0, backing=torch.zeros(3)), OP)


def test_empty_tensors_have_norm_zero_in_every_kind():
    empty = R.of(torch.zeros(0, 4))
    assert empty.norm_size.item() == 0.0
    assert convert(empty, INF).norm_size.item() == 0.0
