"""Reductions, pooling and losses: bounds against adversarial inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L1Tensor, LinfTensor, RMSTensor, norm_mode, normed_op
from thunder_norm.audit import Ball, Case, norm, start
from thunder_norm.errors import NormMismatchError

R, INF, L1 = RMSTensor, LinfTensor, L1Tensor
D = torch.float64


def x(*shape, n=1.0, dims=None, kind=R):
    return Ball("x", kind, shape, n, dims)


def y(*shape, n=0.6, dims=None, kind=R):
    return Ball("y", kind, shape, n, dims)


def image(*shape, dims=(-3,), kind=R, n=1.0):
    return Ball("x", kind, shape, n, dims if kind is R else None)


IMAGE = (-3, -2, -1)

REDUCTIONS = [
    Case("mean", lambda t: t.mean(-1), (x(3, 4),)),
    Case("mean over other dims", lambda t: t.mean(0, keepdim=True), (x(3, 4),)),
    Case("mean over both", lambda t: t.mean((0, 2)), (x(2, 3, 4),)),
    Case("mean of all", torch.mean, (x(3, 4, kind=INF),)),
    Case("mean l1", lambda t: t.mean(-1), (x(3, 4, kind=L1),)),
    Case("mean l1 over other dims", lambda t: t.mean(0), (x(3, 4, kind=L1),)),
    Case("sum", lambda t: t.sum(-1, keepdim=True), (x(3, 4),)),
    Case("sum over other dims", lambda t: t.sum(0), (x(3, 4),)),
    Case("sum of all", torch.sum, (x(3, 4),)),
    Case("sum l1", lambda t: t.sum(-1), (x(3, 4, kind=L1),)),
    Case("sum l1 over other dims", lambda t: t.sum(0), (x(3, 4, kind=L1),)),
    Case("cumsum", lambda t: t.cumsum(-1), (x(3, 4),)),
    Case("cumsum over other dims", lambda t: t.cumsum(0), (x(3, 4),)),
    Case("cumsum of an l1 norm", lambda t: t.cumsum(-1), (x(3, 4, kind=L1Tensor),)),
    Case("cumsum of an l1 norm over other dims", lambda t: t.cumsum(0), (x(3, 4, kind=L1Tensor),)),
    Case("cumsum, largest entry", lambda t: t.cumsum(-1), (x(3, 4, kind=INF),)),
    Case("amax", lambda t: t.amax(-1), (x(3, 4),)),
    Case("amax over other dims", lambda t: t.amax(0), (x(3, 4),)),
    Case("amax, fewer positions", lambda t: t.amax(0), (x(2, 4),)),
    Case("amax over all", torch.amax, (x(3, 4),)),
    Case("amin, largest entry", lambda t: t.amin(-1, keepdim=True), (x(3, 4, kind=INF),)),
    Case("amax over some of both", lambda t: t.amax((0, 2)), (x(3, 2, 2, dims=(-2, -1)),)),
    Case("max", lambda t: t.max(-1)[0], (x(3, 4),)),
    Case("min", lambda t: torch.min(t, 0).values, (x(3, 4),)),
    Case("max of all", lambda t: t.max(), (x(3, 4),)),
    Case("median", lambda t: t.median(-1).values, (x(2, 3),), 0.5),
    Case("kthvalue", lambda t: t.kthvalue(2, -1).values, (x(2, 3),), 0.5),
    Case("var", lambda t: t.var(-1), (x(3, 4),)),
    Case("var, biased", lambda t: t.var(-1, unbiased=False), (x(3, 4),)),
    Case("var over other dims", lambda t: t.var(0, correction=0), (x(4, 3),), 0.85),
    Case("var over some elem_dims", lambda t: t.var(-1, correction=0), (x(3, 4, dims=(-2, -1)),), 0.98),
    Case("var of all", lambda t: torch.var(t), (x(3, 4),)),
    Case("std", lambda t: t.std(-1, keepdim=True), (x(3, 4),)),
    Case("std over some elem_dims", lambda t: t.std(-1, correction=0), (x(3, 4, dims=(-2, -1)),)),
    Case("var_mean", lambda t: torch.var_mean(t, -1)[0], (x(3, 4),)),
    Case("std_mean", lambda t: torch.std_mean(t, -1)[1], (x(3, 4),)),
    Case("2-norm", lambda t: t.norm(dim=-1), (x(3, 4),)),
    Case("1-norm", lambda t: torch.linalg.vector_norm(t, 1, dim=-1), (x(3, 4),)),
    Case("1.5-norm", lambda t: torch.linalg.norm(t, 1.5, dim=-1), (x(3, 4),)),
    Case("3-norm", lambda t: t.norm(3, dim=-1, keepdim=True), (x(3, 4),)),
    Case("inf-norm", lambda t: torch.linalg.vector_norm(t, math.inf, dim=-1), (x(3, 4),)),
    Case("2-norm over other dims", lambda t: torch.linalg.vector_norm(t, dim=0), (x(3, 4),)),
    Case("Frobenius", torch.linalg.norm, (x(3, 4),)),
    Case("prod", lambda t: t.prod(-1), (x(3, 4, n=1.2),)),
    Case("prod, largest entry", lambda t: t.prod(-1), (x(3, 4, n=1.2, kind=INF),)),
    Case("prod over other dims", lambda t: t.prod(0), (x(3, 4, n=1.2),)),
    Case("sort", lambda t: t.sort(-1)[0], (x(3, 4),)),
    Case("sort over other dims", lambda t: t.sort(0, descending=True).values, (x(3, 4),)),
    Case("stable sort", lambda t: torch.sort(t, stable=True).values, (x(3, 4),)),
    Case("topk", lambda t: t.topk(2).values, (x(3, 4),)),
    Case("topk over other dims", lambda t: t.topk(2, 0).values, (x(4, 4),), 0.7),
    Case("topk, largest entry", lambda t: t.topk(2).values, (x(3, 4, kind=INF),)),
]  # fmt: skip

POOLING = [
    Case("avg_pool2d", lambda t: F.avg_pool2d(t, 2), (image(1, 3, 4, 4),)),
    Case("avg_pool2d, image", lambda t: F.avg_pool2d(t, 2), (image(1, 3, 4, 4, dims=IMAGE),)),
    Case("avg_pool2d, image, overlapping", lambda t: F.avg_pool2d(t, 3, 1), (image(1, 2, 5, 5, dims=IMAGE),), 0.7),
    Case("avg_pool2d, cropped", lambda t: F.avg_pool2d(t, 2, 2, 1, count_include_pad=False), (image(1, 2, 4, 4, dims=IMAGE),)),
    Case("avg_pool2d, padded", lambda t: F.avg_pool2d(t, 2, 2, 1, ceil_mode=True), (image(1, 2, 5, 4),)),
    Case("avg_pool2d, other divisor", lambda t: F.avg_pool2d(t, 2, divisor_override=3), (image(1, 2, 4, 4),)),
    Case("avg_pool2d, largest entry", lambda t: F.avg_pool2d(t, 2), (image(1, 3, 4, 4, kind=INF),)),
    Case("avg_pool2d, rows", lambda t: F.avg_pool2d(t, 2), (image(1, 2, 4, 4, dims=(-2,)),), 0.5),
    Case("avg_pool1d", lambda t: F.avg_pool1d(t, 3, 2), (x(1, 2, 7, dims=(-2,)),)),
    Case("avg_pool1d, signal", lambda t: F.avg_pool1d(t, 3), (x(1, 2, 6, dims=(-2, -1)),)),
    Case("avg_pool3d", lambda t: F.avg_pool3d(t, 2), (x(1, 2, 2, 2, 4, dims=(-4,)),)),
    Case("adaptive_avg_pool2d", lambda t: F.adaptive_avg_pool2d(t, (2, 3)), (image(1, 2, 5, 4),)),
    Case("adaptive_avg_pool2d, image", lambda t: F.adaptive_avg_pool2d(t, 1), (image(1, 2, 3, 4, dims=IMAGE),)),
    Case("adaptive_avg_pool1d, uneven", lambda t: F.adaptive_avg_pool1d(t, 3), (x(1, 2, 5, dims=(-2, -1)),), 0.6),
    Case("max_pool2d", lambda t: F.max_pool2d(t, 2), (image(1, 3, 4, 4),)),
    Case("max_pool2d, many channels", lambda t: F.max_pool2d(t, 2), (image(1, 6, 2, 2),)),
    Case("max_pool2d, largest entry", lambda t: F.max_pool2d(t, 3, 2, 1), (image(1, 2, 4, 4, kind=INF),)),
    Case("max_pool2d, image", lambda t: F.max_pool2d(t, 2), (image(1, 2, 4, 4, dims=IMAGE),)),
    Case("max_pool2d, image, as in ResNet", lambda t: F.max_pool2d(t, 3, 2, 1), (image(1, 1, 6, 6, dims=IMAGE),), 0.9),
    Case("max_pool2d, dilated", lambda t: F.max_pool2d(t, 2, 1, 0, 2), (image(1, 4, 4, 4),)),
    Case("max_pool2d, ceil", lambda t: F.max_pool2d(t, 2, 2, ceil_mode=True), (image(1, 2, 5, 5, dims=IMAGE),)),
    Case("max_pool1d", lambda t: F.max_pool1d(t, 3), (x(1, 2, 6, dims=(-2,)),)),
    Case("max_pool with indices", lambda t: F.max_pool2d(t, 2, return_indices=True)[0], (image(1, 3, 4, 4),)),
    Case("adaptive_max_pool2d", lambda t: F.adaptive_max_pool2d(t, 2), (image(1, 3, 4, 4),)),
    Case("adaptive_max_pool1d in aten", lambda t: torch.adaptive_max_pool1d(t, 2)[0], (x(1, 2, 6, dims=(-2,)),)),
    Case("nearest", lambda t: F.interpolate(t, scale_factor=2), (image(1, 2, 3, 3),)),
    Case("bilinear", lambda t: F.interpolate(t, size=(5, 4), mode="bilinear"), (image(1, 2, 3, 3),)),
    Case("linear", lambda t: F.interpolate(t, 5, mode="linear", align_corners=True), (x(1, 2, 3, dims=(-2,)),)),
    Case("area", lambda t: F.interpolate(t, (2, 2), mode="area"), (image(1, 2, 3, 3),)),
]  # fmt: skip

labels = torch.tensor([1, 0, 2])
weights = torch.tensor([0.5, 2.0, 1.0], dtype=D)
soft = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.1, 0.1, 0.1]], dtype=D)
bits = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]], dtype=D)

against = torch.full((3, 3), -1.0, dtype=D).scatter(1, labels[:, None], 1.0)
WORST = {"witnesses": [[-1.5 * against]]}  # logits against the labels
WORST_ROW = {"witnesses": [[-1.5 * against[0]]]}
AGAINST = {"witnesses": [[1.0 - 2.0 * bits.round()]]}
OPPOSITE = {"witnesses": [[torch.full((2, 3), 1.0), torch.full((2, 3), -0.6)]]}

LOGITS = (x(3, 3, n=1.5, kind=INF),)

LOSSES = [
    Case("cross_entropy, largest entry", lambda t: F.cross_entropy(t, labels), LOGITS, 0.98, WORST),
    Case("cross_entropy", lambda t: F.cross_entropy(t, labels), (x(3, 3, n=1.5),), 0.82),
    Case("cross_entropy, large", lambda t: F.cross_entropy(t, labels), (x(3, 3, n=9.0),), 0.95),
    Case("cross_entropy, sum", lambda t: F.cross_entropy(t, labels, reduction="sum"), LOGITS, 0.98, WORST),
    Case("cross_entropy, none", lambda t: F.cross_entropy(t, labels, reduction="none"), LOGITS, 0.98, WORST),
    Case("cross_entropy, weights", lambda t: F.cross_entropy(t, labels, weights), LOGITS, 0.98, WORST),
    Case(
        "cross_entropy, weights, none",
        lambda t: F.cross_entropy(t, labels, weights, reduction="none"),
        LOGITS, 0.98, WORST,
    ),
    Case("cross_entropy, smoothed", lambda t: F.cross_entropy(t, labels, label_smoothing=0.2), LOGITS, 0.7),
    Case("cross_entropy, probabilities", lambda t: F.cross_entropy(t, soft), LOGITS, 0.5),
    Case("cross_entropy, images", lambda t: F.cross_entropy(t, labels[None]), (x(1, 3, 3, n=1.5, dims=(-2,)),), 0.85),
    Case("cross_entropy, one sample", lambda t: F.cross_entropy(t, labels[0]), (x(3, n=1.5, kind=INF),), 0.98, WORST_ROW),
    Case("cross_entropy, ignored", lambda t: F.cross_entropy(t, labels, ignore_index=2), LOGITS, 0.98, WORST),
    Case("nll_loss", lambda t: F.nll_loss(t, labels), (x(3, 3, kind=INF),)),
    Case("nll_loss, sum", lambda t: F.nll_loss(t, labels, weights, reduction="sum"), (x(3, 3, kind=INF),), 0.5),
    Case("bce", lambda t: F.binary_cross_entropy_with_logits(t, bits), (x(2, 3),), 0.6),
    Case("bce, largest entry", lambda t: F.binary_cross_entropy_with_logits(t, bits.round()), (x(2, 3, kind=INF),), 0.95, AGAINST),
    Case("bce, weights", lambda t: F.binary_cross_entropy_with_logits(t, bits, weights), (x(2, 3, kind=INF),), 0.4),
    Case("bce, none", lambda t: F.binary_cross_entropy_with_logits(t, bits, reduction="none"), (x(2, 3),)),
    Case("mse_loss", F.mse_loss, (x(2, 3), y(2, 3)), 0.99, OPPOSITE),
    Case("mse_loss over everything", F.mse_loss, (x(2, 3, dims=(-2, -1)), y(2, 3, kind=INF))),
    Case("mse_loss, sum", lambda a, b: F.mse_loss(a, b, reduction="sum"), (x(2, 3), y(2, 3)), 0.99, OPPOSITE),
    Case("mse_loss, none", lambda a, b: F.mse_loss(a, b, reduction="none"), (x(2, 3), y(2, 3, kind=INF))),
    Case("mse_loss, plain", lambda a: F.mse_loss(a, soft[:2]), (x(2, 3),), 0.9),
    Case("l1_loss", F.l1_loss, (x(2, 3), y(2, 3))),
    Case("l1_loss, sum", lambda a, b: F.l1_loss(a, b, reduction="sum"), (x(2, 3), y(2, 3))),
    Case("smooth_l1_loss", lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), (x(2, 3), y(2, 3))),
    Case("smooth_l1_loss, small", F.smooth_l1_loss, (x(2, 3, n=0.2), y(2, 3, n=0.3)), 0.95, {"restarts": 16}),
    Case("huber_loss", lambda a, b: F.huber_loss(a, b, delta=2.0), (x(2, 3), y(2, 3)), 0.99, OPPOSITE),
    Case("kl_div", lambda t: F.kl_div(t, soft, reduction="batchmean"), (x(3, 3, kind=INF),), 0.5),
    Case("kl_div, log target", lambda t: F.kl_div(t, soft[:1].log(), log_target=True, reduction="sum"), (x(1, 3),), 0.6),
]  # fmt: skip

CASES = [*REDUCTIONS, *POOLING, *LOSSES]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


DIMS = [(), (-1,), (-2,), (-2, -1), (-3, -1), (-3, -2, -1)]
REDUCERS = [torch.mean, torch.sum, torch.amax, torch.var, torch.std, torch.linalg.vector_norm]


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_any_dims_are_sound(reducer, dims):
    generator = torch.Generator().manual_seed(seeded(0))
    ball = x(2, 3, 4, dims=dims)
    for reduced in (0, 1, 2, (0, 1), (1, 2), (0, 2), (0, 1, 2)):
        for keepdim, sort in ((False, 0), (True, 2), (False, 2), (False, 1), (True, 3), (False, 2)):
            out = reducer(ball.normed(start(ball, sort, generator)), dim=reduced, keepdim=keepdim)
            assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-9), (reduced, keepdim)


WINDOWS = [
    dict(kernel_size=k, stride=s, padding=p, ceil_mode=c)
    for k in (2, 3)
    for s in (1, 2, 3)
    for p in (0, 1)
    for c in (False, True)
]  # fmt: skip


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d, lambda t, **o: F.avg_pool2d(t, **o, count_include_pad=False)])
@pytest.mark.parametrize("dims", [(-3,), IMAGE, (-2,), ()], ids=str)
def test_any_window_is_sound(pool, dims):
    generator = torch.Generator().manual_seed(seeded(0))
    ball = x(1, 4, 5, 7, dims=dims)
    for window in WINDOWS:
        for sort in (0, 2, 2, 1):
            out = pool(ball.normed(start(ball, sort, generator)), **window)
            assert norm(type(out), out.backing, out.elem_dims) <= out.norm_size * (1 + 1e-9), window


def test_variance_knows_all_signatures():
    t = torch.randn(3, 5, dtype=D)
    a = R(1.0, backing=t)
    biased = (
        lambda u: u.var(-1, False),
        lambda u: u.var(-1, unbiased=False),
        lambda u: u.var(-1, correction=0),
        lambda u: u.var(False),
        lambda u: torch.var(u, unbiased=False),
        lambda u: torch.var(u, correction=0),
        lambda u: u.std((0, 1), correction=0),
    )
    for f in biased:
        assert f(a).norm_size.item() == 1.0
        assert torch.equal(f(a).backing, f(t))
    for f in (lambda u: u.var(-1), lambda u: u.var(dim=-1, keepdim=True), lambda u: torch.var(u, -1, True)):
        assert f(a).norm_size.item() == 1.25


def test_indices_are_plain():
    a = R(1.0, backing=torch.randn(3, 4))
    edges = torch.linspace(-1, 1, 5)
    sought = [torch.searchsorted(edges, a), torch.searchsorted(R.of(edges), 0.3), torch.bucketize(a, R.of(edges), right=True)]
    for result in (a.argmax(-1), a.max(-1)[1], a.sort()[1], a.topk(2)[1], a.argsort(), a.max(0)[1], *sought):
        assert type(result) is torch.Tensor
        assert result.dtype is torch.int64


def test_both_extrema():
    both = torch.aminmax(R(1.0, backing=torch.randn(3, 4)), dim=-1)
    assert both.min.norm_size.item() == both.max.norm_size.item() == 2.0


def test_typical_maximum():
    t = torch.randn(20_000, 3, 3, dtype=D)
    with norm_mode("typical"):
        out = F.max_pool2d(R(2.0, backing=torch.zeros(1, 6, 6, 6), elem_dims=(-3,), perturbation_size=1.0), 3)
    assert out.norm_size.item() == pytest.approx(2 * t.amax((1, 2)).square().mean().sqrt().item(), rel=0.02)
    assert out.perturbation_size.item() == 1.0


REFUSED = [
    lambda a: torch.linalg.vector_norm(a, 0.5, dim=-1),
    lambda a: F.cross_entropy(a, labels, weights, label_smoothing=0.1),
]


@pytest.mark.parametrize("f", REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_bound_is_refused(f):
    with pytest.raises(NormMismatchError):
        f(R(1.0, backing=torch.ones(3, 3, dtype=D)))


# -- factories ------------------------------------------------------------------------------------------------------------------


def test_constants_do_not_move():
    a = R(2.0, backing=torch.randn(3, 4), perturbation_size=1.0)
    constants = [
        (torch.zeros_like, 0.0),
        (torch.ones_like, 1.0),
        (lambda t: torch.full_like(t, -3), 3.0),
        (torch.rand_like, 1.0),
        (lambda t: t.new_zeros(2, 5), 0.0),
        (lambda t: t.new_full((2,), -0.5), 0.5),
        (lambda t: t.new_ones((7,)), 1.0),
    ]
    for f, size in constants:
        out = f(a)
        assert out.norm_size.item() == size
        assert out.perturbation_size.item() == 0.0
        assert out.backing.abs().max() <= size
    assert type(torch.ones_like(a, dtype=torch.bool)) is torch.Tensor


def test_tensors_of_whatever_was_in_memory_are_zeros():
    a = R(2.0, backing=torch.randn(3, 4))
    for f in (torch.empty_like, lambda t: t.new_empty(3), lambda t: torch.empty_like(t, dtype=torch.float64)):
        out = f(a)
        assert out.norm_size.item() == 0.0
        assert not out.backing.any()


def test_normal_tensors_are_unbounded_unless_typical():
    a = R(2.0, backing=torch.randn(3, 4))
    with pytest.raises(NormMismatchError):
        torch.randn_like(a)
    with norm_mode("typical"):
        assert torch.randn_like(a).norm_size.item() == 1.0


def test_own_rule_for_a_factory_wins_over_the_refusal():
    op = normed_op(torch.ops.aten.randn.default)
    rules = list(op.rules)
    with pytest.raises(NormMismatchError, match="unbounded"):
        found = op.find(([3, 4],), {})
        found[0].fn(*found[1].args, **found[1].kwargs)

    @op.register_norm
    def randn(size: list[int], *, dtype=None, layout=torch.strided, device=None, pin_memory=False) -> RMSTensor:
        return RMSTensor(1, elem_dims=None)

    try:
        rule, bound = op.find(([3, 4],), {"dtype": torch.float32})
        assert rule.fn is randn
    finally:
        op.rules[:] = rules


@pytest.mark.parametrize("op", [torch.var, torch.std, torch.var_mean, torch.std_mean], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("shape", "args", "kwargs"),
    [
        ((3, 1), (-1,), {}),
        ((3, 1), (-1, True), {}),
        ((3, 2), (-1,), {"correction": 2}),
        ((3, 2), (), {"correction": 7}),
        ((1,), (), {}),
        ((1, 1), (True,), {}),
        ((), (), {}),
    ],
)
def test_variance_that_divides_by_zero_is_refused(op, shape, args, kwargs):
    x = RMSTensor(1.0, backing=torch.randn(shape))
    with pytest.raises(NormMismatchError, match="divides by zero"):
        op(x, *args, **kwargs)


def test_variance_of_one_element_without_correction_is_zero():
    x = RMSTensor.of(torch.randn(3, 1))
    assert torch.var(x, -1, unbiased=False).backing.eq(0).all()
    assert torch.std(x, -1, correction=0).norm_size.isfinite()
