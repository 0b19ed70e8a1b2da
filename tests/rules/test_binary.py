"""Operations of several tensors: bounds against adversarial inputs, with broadcasting and mixed kinds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import LONG, seeded
from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSTensor, norm_mode
from thunder_norm.audit import Ball, Case, norm, start
from thunder_norm.errors import NormMismatchError

R, INF, L1, OP = RMSTensor, LinfTensor, L1Tensor, RMSToRMSTensor
D = torch.float64


def x(*shape, n=1.0, dims=None, kind=R):
    return Ball("x", kind, shape, n, dims)


def y(*shape, n=0.6, dims=None, kind=R):
    return Ball("y", kind, shape, n, dims)


def z(*shape, n=0.4, dims=None, kind=R):
    return Ball("z", kind, shape, n, dims)


gain = torch.tensor([0.5, -2.0, 1.0, 0.1], dtype=D)
mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
rows = torch.tensor([[True], [False]])

CASES = [
    Case("add", torch.add, (x(2, 4), y(2, 4))),
    Case("add alpha", lambda a, b: torch.add(a, b, alpha=-3), (x(2, 4), y(2, 4))),
    Case("sub", lambda a, b: a - b, (x(2, 4), y(2, 4))),
    Case("rsub", lambda a, b: torch.rsub(a, b, alpha=2), (x(2, 4), y(2, 4))),
    Case("add a largest entry", torch.add, (x(2, 4), y(2, 4, kind=INF))),
    Case("add a bias", torch.add, (x(3, 2, 4), y(4))),
    Case("add a bias to a mean over tokens", torch.add, (x(2, 3, 4, dims=(-2, -1)), y(4))),
    Case("add to a bias", torch.add, (x(4), y(3, 2, 4, dims=(-2, -1)))),
    Case("add a channel bias", torch.add, (x(2, 4, 3, dims=(-2,)), y(4, 1, dims=(-2,)))),
    Case("add across dims", torch.add, (x(3, 4, dims=(-1,)), y(3, 4, dims=(-2,)))),
    Case("add, outer", torch.add, (x(3, 1, dims=(-2,)), y(1, 4))),
    Case("add, both stretched", torch.add, (x(3, 1), y(1, 4))),
    Case("add a scalar", torch.add, (x(2, 4), y())),
    Case("add a number", lambda a: a + 0.7, (x(2, 4),)),
    Case("sub a number", lambda a: torch.sub(a, 0.7, alpha=2), (x(2, 4),)),
    Case("number minus", lambda a: 0.7 - a, (x(2, 4),)),
    Case("number plus", lambda a: 0.7 + a, (x(2, 4, kind=INF),)),
    Case("add plain", lambda a: a + gain, (x(2, 4),)),
    Case("plain minus", lambda a: gain - a, (x(2, 4),), 0.95),
    Case("add integers", lambda a: a + torch.arange(4), (x(2, 4),), 0.6),
    Case("add a mask", lambda a: a + mask, (x(2, 4),), 0.9),
    Case("add l1", torch.add, (x(2, 4, kind=L1), y(2, 4, kind=L1))),
    Case("add l2", lambda a, b: a - 2 * b, (x(2, 4, kind=L2Tensor), y(2, 4, kind=L2Tensor))),
    Case("add l1 over other dims", torch.add, (x(2, 4, kind=L1), y(2, 4, kind=L1, dims=(-2,))), 0.6),
    Case("add l1 and rms", torch.add, (x(2, 4, kind=L1), y(2, 4))),
    Case("add operators", torch.add, (x(3, 4, kind=OP), y(3, 4, kind=OP))),
    Case("add operator and entries", torch.add, (x(3, 4, kind=OP), y(3, 4)), 0.7),
    Case("add plain to an operator", lambda a: a + torch.eye(3, 4, dtype=D), (x(3, 4, kind=OP),)),
    Case("mul by a gain", torch.mul, (x(2, 4), y(4, kind=INF))),
    Case("mul by a gate", torch.mul, (x(2, 4, kind=INF), y(2, 4))),
    Case("mul largest entries", torch.mul, (x(2, 4, kind=INF), y(2, 4, kind=INF))),
    Case("mul", torch.mul, (x(2, 4), y(2, 4))),
    Case("mul different dims", torch.mul, (x(2, 4), y(2, 4, dims=(-2,)))),
    Case("mul row by column", torch.mul, (x(3, 1, dims=(-2,)), y(1, 4))),
    Case("mul by one factor a token", torch.mul, (x(2, 3, 4), y(2, 3, 1, dims=(-2,)))),
    Case("mul of one factor a token", torch.mul, (x(2, 3, 1, dims=(-2,)), y(2, 3, 4))),
    Case("mul broadcast over batches", torch.mul, (x(4), y(2, 3, 4))),
    Case("mul means over tokens", torch.mul, (x(2, 3, 4, dims=(-2, -1)), y(4))),
    Case("square as a product", lambda a: a * a, (x(2, 4, n=0.5),)),
    Case("mul number", lambda a: -3 * a, (x(2, 4),)),
    Case("mul number, operator", lambda a: a * -3, (x(2, 4, kind=OP),)),
    Case("mul number, l1", lambda a: a * 2.0, (x(2, 4, kind=L1),)),
    Case("mul plain", lambda a: a * gain, (x(2, 4),)),
    Case("mul plain, l1", lambda a: a * gain, (x(2, 4, kind=L1),)),
    Case("mul mask", lambda a: a * mask, (x(2, 4),)),
    Case("mask mul", lambda a: mask * a, (x(2, 4, kind=L1),)),
    Case("mul integers", lambda a: torch.arange(4) * a, (x(2, 4),)),
    Case("l1 by a gain", torch.mul, (x(2, 4, kind=L1), y(4, kind=INF))),
    Case("gain by l2", torch.mul, (y(4, kind=INF), x(2, 4, kind=L2Tensor))),
    Case("l1, stretched", torch.mul, (x(2, 1, kind=L1), y(2, 4, kind=INF))),
    Case("operator by rows", torch.mul, (x(3, 4, kind=OP), y(3, 1, kind=INF))),
    Case("operator by columns", torch.mul, (y(4, kind=INF), x(3, 4, kind=OP))),
    Case("operator by a scalar", torch.mul, (x(3, 4, kind=OP), y(kind=INF))),
    Case("operator by entries", torch.mul, (x(3, 4, kind=OP), y(3, 4, kind=INF)), 0.9),
    Case("div number", lambda a: a / -4, (x(2, 4),)),
    Case("div plain", lambda a: a / gain, (x(2, 4),)),
    Case("div integers", lambda a: a / torch.arange(1, 5), (x(2, 4, kind=L1),)),
    Case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=-2), (x(2, 4), y(2, 4), z(4, kind=INF))),
    Case("addcmul, rms", torch.addcmul, (x(2, 4), y(2, 4), z(2, 4))),
    Case("addcmul, other dims", torch.addcmul, (x(3, 4, dims=(-2,)), y(3, 4), z(4, kind=INF)), 0.7),
    Case("addcdiv", lambda a, b: torch.addcdiv(a, b, gain, value=0.5), (x(2, 4), y(2, 4))),
    Case("maximum", torch.maximum, (x(2, 4), y(2, 4)), 0.98),
    Case("minimum of largest entries", torch.minimum, (x(2, 4, kind=INF), y(2, 4, kind=INF))),
    Case("max of two", torch.max, (x(2, 4, n=0.6), y(2, 4)), 0.98),
    Case("where", lambda a, b: torch.where(mask, a, b), (x(2, 4), y(2, 4))),
    Case("where by rows", lambda a, b: torch.where(rows, a, b), (x(2, 4), y(2, 4))),
    Case("where, largest entries", lambda a, b: torch.where(mask, a, b), (x(2, 4, kind=INF), y(2, 4, kind=INF))),
    Case("where number", lambda a: torch.where(mask, a, -0.5), (x(2, 4),), 0.9),
    Case("where zero", lambda a: torch.where(mask, 0.0, a), (x(2, 4),)),
    Case("where the condition broadcasts", lambda a, b: torch.where(mask.unsqueeze(1), a, b), (x(4), y(2, 4))),
    Case("lerp", lambda a, b: torch.lerp(a, b, 0.3), (x(2, 4), y(2, 4))),
    Case("lerp by a tensor", lambda a, b: torch.lerp(a, b, gain.abs() / 2), (x(2, 4, kind=INF), y(2, 4, kind=INF)), 0.6),
    Case("hypot", torch.hypot, (x(2, 4), y(2, 4))),
    Case("glu", F.glu, (x(2, 4),), 0.6),
    Case("glu, largest entry", F.glu, (x(2, 4, kind=INF),), 0.94),
    Case("glu of other dims", lambda a: F.glu(a, -2), (x(2, 4, 3),), 0.7),
    Case("swiglu", lambda a, b: F.silu(a) * b, (x(2, 4), y(2, 4, kind=INF))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    torch.manual_seed(seeded(0))
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


DIMS = [(), (-1,), (-2,), (-2, -1), (-3, -1), (-3, -2, -1)]
SHAPES = [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4), (2, 1, 1)]


# each two of them meet
BROADCASTS = [
    (op, left, right)
    for (i, op), (j, left), (k, right) in itertools.product(*map(enumerate, ((torch.add, torch.mul, torch.maximum), DIMS, DIMS)))
    if LONG or (i + j + k) % 3 == 0
]


@pytest.mark.parametrize(("op", "left", "right"), BROADCASTS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_random_broadcasts_are_sound(op, left, right):
    """Spikes and signs show the wrong factors: no ascent is needed."""
    generator = torch.Generator().manual_seed(seeded(0))
    for shape in SHAPES:
        a_ball, b_ball = x(2, 3, 4, dims=left), y(*shape, dims=right)
        for sort in range(8):
            a, b = start(a_ball, sort, generator), start(b_ball, (sort * 3 + 2) % 8, generator) * 0.6
            out = op(a_ball.normed(a), b_ball.normed(b))
            actual = norm(type(out), out.backing, out.elem_dims)
            assert actual <= out.norm_size * (1 + 1e-9), (shape, sort)


def test_bias_is_measured_over_the_dims_of_the_other():
    activation = R(1.0, backing=torch.zeros(2, 3, 4, dtype=D))
    assert (activation + gain).norm_size.item() == pytest.approx(1 + gain.square().mean().sqrt().item())
    assert (activation * gain).norm_size.item() == 2.0
    assert (gain.unsqueeze(1) + R(1.0, backing=torch.zeros(3, 4, 5, dtype=D))).norm_size.item() == 3.0


def test_norm_keeps_the_elem_dims_of_its_operand():
    activation = R(1.0, backing=torch.zeros(2, 3, 1))
    assert (activation + 1).elem_dims == (-1,)
    assert (activation + torch.zeros(1)).elem_dims == (-1,)
    assert (R(1.0, backing=torch.zeros(2, 3, 4)) * torch.rand(3, 1)).elem_dims == (-1,)
    assert isinstance(INF(1.0, backing=torch.zeros(2, 3)) * torch.ones(3), LinfTensor)


def test_infinite_mask_has_infinite_size_and_sensitivity_one():
    logits = INF(1.0, backing=torch.zeros(2, 4), perturbation_size=1.0)
    masked = logits + torch.zeros(2, 4).masked_fill(mask, -math.inf)
    assert masked.norm_size.item() == math.inf
    assert masked.perturbation_size.item() == 1.0
    chosen = torch.where(mask, logits, -math.inf)
    assert chosen.norm_size.item() == math.inf
    assert F.softmax(chosen, -1).norm_size.item() == 1.0


def test_typical_products_and_dims_cost_nothing():
    a = R(2.0, backing=torch.zeros(3, 4), perturbation_size=1.0)
    with norm_mode("typical"):
        product = a * R(0.5, backing=torch.zeros(3, 4))
        assert product.norm_size.item() == 1.0
        assert product.perturbation_size.item() == 0.5
        assert (a + R(1.0, backing=torch.zeros(3, 4), elem_dims=(-2,))).norm_size.item() == 3.0


def test_comparisons_are_plain():
    a = R(1.0, backing=gain)
    for result in (a > 0, a == a, 0.5 >= a, a.lt(gain), torch.isnan(a), torch.logical_not(a), a != 1):
        assert type(result) is torch.Tensor
        assert result.dtype is torch.bool
    assert torch.equal(a > 0, gain > 0)


def test_division_by_a_normed_tensor_is_refused():
    a = R(1.0, backing=gain)
    for call in (lambda: a / a, lambda: gain / a, lambda: 1 / a, lambda: torch.addcdiv(a, a, a)):
        with pytest.raises((NormMismatchError, NotImplementedError)):
            call()


def test_operators_add_to_what_is_read_the_other_way_round_and_to_each_of_a_batch():
    wide = torch.zeros(2, 8)
    with pytest.raises(NormMismatchError):
        OP(1.0, backing=torch.zeros(3, 2, 8)) + OP(1.0, backing=wide.expand(3, 1, 2, 8), elem_dims=(-4, -1))
    assert (OP(1.0, backing=wide) + OP(1.0, backing=wide, elem_dims=(-1, -2))).norm_size == 5, "sigma / 2, and 2 sigma"
    assert (OP(1.0, backing=wide.expand(3, 2, 8)) + OP(2.0, backing=wide)).norm_size == 3


def test_real_values_are_those_of_torch():
    a, b = torch.randn(2, 4, dtype=D), torch.randn(4, dtype=D)
    normed = RMSTensor.of(a)
    for f in (lambda t: t + b, lambda t: 2 - t, lambda t: b * t, lambda t: t / b, lambda t: torch.where(mask, t, b)):
        out = f(normed)
        assert isinstance(out, NormedTensor)
        assert torch.equal(out.backing, f(a))
