"""The same rule by ATen's names: an overload called directly has the norm of the torch function, its arguments as ATen has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded
from thunder_norm import LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import Ball, Case

aten = torch.ops.aten
R = RMSTensor
index, indices = torch.tensor([0, 2]), torch.tensor([[0, 1, 1, 0], [2, 2, 0, 1]])
places = torch.tensor([[[[0, 3], [8, 10]]]])
samples = torch.tensor([[[0.3, 0.6]]])
grid = torch.linspace(-1, 1, 8).reshape(1, 2, 2, 2)


def x(*shape, dims=None):
    return R(1.0, backing=torch.linspace(-1, 1.5, max(torch.Size(shape).numel(), 1)).reshape(shape), elem_dims=dims)


def number(value):
    return LinfTensor(2.0, backing=torch.tensor(value), elem_dims=())


PAIRS = {
    "diag_embed": lambda a: (torch.diag_embed(a, 1), aten.diag_embed.default(a, 1)),
    "diag": lambda a: (torch.diag(a), aten.diag.default(a)),
    "diagonal_scatter": lambda a: (torch.diagonal_scatter(a, x(3)), aten.diagonal_scatter.default(a, x(3))),
    "trace": lambda a: (torch.trace(a), aten.trace.default(a)),
    "unfold_copy": lambda a: (a.unfold(1, 2, 1), aten.unfold_copy.default(a, 1, 2, 1)),
    "cummax": lambda a: (torch.cummax(a, 1), aten.cummax.default(a, 1)),
    "cumprod": lambda a: (torch.cumprod(a, 1), aten.cumprod.default(a, 1)),
    "logcumsumexp": lambda a: (torch.logcumsumexp(a, 1), aten.logcumsumexp.default(a, 1)),
    "nansum": lambda a: (torch.nansum(a, 1), aten.nansum.default(a, [1])),
    "nanmean": lambda a: (torch.nanmean(a, 1), aten.nanmean.default(a, [1])),
    "nan_to_num": lambda a: (torch.nan_to_num(a), aten.nan_to_num.default(a)),
    "msort": lambda a: (torch.msort(a), aten.msort.default(a)),
    "mode": lambda a: (torch.mode(a, 1), aten.mode.default(a, 1)),
    "quantile": lambda a: (torch.quantile(a, 0.5, 1), aten.quantile.scalar(a, 0.5, 1)),
    "quantiles": lambda a: (torch.quantile(a, torch.tensor([0.5]), 1), aten.quantile.default(a, torch.tensor([0.5]), 1)),
    "unique": lambda a: (torch.unique(a, return_inverse=True, return_counts=True), aten._unique2.default(a, True, True, True)),
    "unique_dim": lambda a: (torch.unique(a, dim=0), aten.unique_dim.default(a, 0)[0]),
    "index_reduce": lambda a: (
        torch.index_reduce(a, 0, index, x(2, 4), "mean"),
        aten.index_reduce.default(a, 0, index, x(2, 4), "mean"),
    ),
    "scatter_reduce": lambda a: (
        torch.scatter_reduce(a, 0, indices, x(2, 4), "amax"),
        aten.scatter_reduce.two(a, 0, indices, x(2, 4), "amax"),
    ),
    "index_put": lambda a: (torch.index_put(a, (index,), x(4)), aten.index_put.default(a, [index], x(4))),
    "_unsafe_index_put": lambda a: (torch.index_put(a, (index,), x(4)), aten._unsafe_index_put.default(a, [index], x(4))),
    "put": lambda a: (a.put(index, x(2)), aten.put.default(a, index, x(2))),
    "fill": lambda a: (torch.fill(a, 3.0), aten.fill.Scalar(a, 3.0)),
    "fill by a tensor": lambda a: (torch.fill(a, number(2.0)), aten.fill.Tensor(a, number(2.0))),
    "linspace": lambda a: (torch.linspace(number(1.0), 3.0, 4), aten.linspace.Tensor_Scalar(number(1.0), 3.0, 4)),
    "renorm": lambda a: (torch.renorm(a, 2, 0, 0.5), aten.renorm.default(a, 2, 0, 0.5)),
    "dist": lambda a: (torch.dist(a, x(4)), aten.dist.default(a, x(4))),
    "cdist": lambda a: (torch.cdist(a, x(2, 4)), aten._cdist_forward.default(a, x(2, 4), 2.0, None)),
    "euclidean_dist": lambda a: (torch.cdist(a, x(2, 4)), aten._euclidean_dist.default(a, x(2, 4))),
    "pdist": lambda a: (F.pdist(a), aten._pdist_forward.default(a)),
    "cosine_similarity": lambda a: (F.cosine_similarity(a, x(3, 4)), aten.cosine_similarity.default(a, x(3, 4))),
    "cross": lambda a: (torch.cross(a, x(3, 4), dim=0), aten.linalg_cross.default(a, x(3, 4), dim=0)),
    "addr": lambda a: (torch.addr(a, x(3), x(4), beta=2), aten.addr.default(a, x(3), x(4), beta=2)),
    "addbmm": lambda a: (torch.addbmm(a, x(2, 3, 2), x(2, 2, 4)), aten.addbmm.default(a, x(2, 3, 2), x(2, 2, 4))),
    "max_unpool2d": lambda a: (
        F.max_unpool2d(x(1, 1, 2, 2), places, 2, output_size=(4, 4)),
        aten.max_unpool2d.default(x(1, 1, 2, 2), places, [4, 4]),
    ),
    "max_unpool3d": lambda a: (
        F.max_unpool3d(x(1, 1, 1, 2, 2), places[None], 2, output_size=(1, 4, 4), padding=(0, 0, 0)),
        aten.max_unpool3d.default(x(1, 1, 1, 2, 2), places[None], [1, 4, 4], [2, 2, 2], [0, 0, 0]),
    ),
    "fractional_max_pool2d": lambda a: (
        F.fractional_max_pool2d(x(1, 1, 4, 4), 2, 2, _random_samples=samples, return_indices=True),
        aten.fractional_max_pool2d.default(x(1, 1, 4, 4), [2, 2], [2, 2], samples),
    ),
    "grid_sampler": lambda a: (
        F.grid_sample(x(1, 2, 3, 3), grid, align_corners=True),
        aten.grid_sampler.default(x(1, 2, 3, 3), grid, 0, 0, True),
    ),
    "grid_sampler_2d": lambda a: (
        F.grid_sample(x(1, 2, 3, 3), grid, "bicubic", "border", False),
        aten.grid_sampler_2d.default(x(1, 2, 3, 3), grid, 2, 1, False),
    ),
    "upsample_bicubic2d": lambda a: (
        F.interpolate(x(1, 2, 3, 3), (5, 2), mode="bicubic"),
        aten.upsample_bicubic2d.default(x(1, 2, 3, 3), [5, 2], False),
    ),
    "upsample_bicubic2d by scales": lambda a: (
        F.interpolate(x(1, 2, 3, 3), scale_factor=(1.5, 2.0), mode="bicubic"),
        aten.upsample_bicubic2d.vec(x(1, 2, 3, 3), None, False, [1.5, 2.0]),
    ),
    "_upsample_bicubic2d_aa": lambda a: (
        F.interpolate(x(1, 2, 3, 3), (5, 2), mode="bicubic", antialias=True),
        aten._upsample_bicubic2d_aa.default(x(1, 2, 3, 3), [5, 2], False),
    ),
}


def ball(*shape, dims=None, kind=RMSTensor, name="x"):
    return Ball(name, kind, shape, 1.0, dims)


def widest(call, shape):
    """The image that a cubic kernel answers to most: the signs of its weights."""
    a = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.stack([torch.autograd.grad(y, a, retain_graph=True)[0] for y in call(a).flatten()])
    best = weights[weights.abs().flatten(1).sum(1).argmax()].sign()
    return Case("", call, (ball(*shape, kind=LinfTensor),), 0.8, {"witnesses": [(best,)]})


def bicubic(overload, size, out):
    return widest(lambda a: overload(a, [out, 1], False), (1, 1, size, 1))


CORNER = torch.ones(1, 1, 4, 4, 4, dtype=torch.float64)
CORNER[..., 1, 1, 1] = -1
IMAGE = ball(1, 2, 4, 4, kind=LinfTensor)
MEAN, VAR = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
BY_NAME = {
    "block_diag": Case("", lambda a, b: aten.block_diag.default([a, b]), (ball(2, 3), ball(1, 2, name="y"))),
    "_unsafe_index_put": Case(
        "", lambda a, b: aten._unsafe_index_put.default(a, [index], b), (ball(3, 4), ball(2, 4, name="values"))
    ),
    "max_unpool2d": Case("", lambda a: aten.max_unpool2d.default(a, places, [4, 4]), (ball(1, 1, 2, 2, dims=(2, 3)),)),
    "max_unpool3d": Case(
        "",
        lambda a: aten.max_unpool3d.default(a, places[None], [1, 4, 4], [2, 2, 2], [0, 0, 0]),
        (ball(1, 1, 1, 2, 2, kind=LinfTensor),),
    ),
    "fractional_max_pool2d": Case(
        "",
        lambda a: aten.fractional_max_pool2d.default(a, [2, 2], [2, 2], samples.to(a.dtype))[0],
        (ball(1, 1, 4, 4, kind=LinfTensor),),
    ),
    "fractional_max_pool3d": Case(
        "",
        lambda a: aten.fractional_max_pool3d.default(a, [2] * 3, [2] * 3, torch.full((1, 1, 3), 0.4, dtype=a.dtype))[0],
        (ball(1, 1, 4, 4, 4, kind=LinfTensor),),
    ),
    "grid_sampler": Case("", lambda a: aten.grid_sampler.default(a, grid.to(a.dtype), 0, 0, True), (IMAGE,)),
    "grid_sampler_2d": Case("", lambda a: aten.grid_sampler_2d.default(a, grid.to(a.dtype), 1, 0, True), (IMAGE,)),
    # from the entry next to a corner, which is -1, to its three neighbours
    "grid_sampler_3d": Case(
        "",
        lambda a, g: torch.grid_sampler_3d(a, g, 0, 0, False),
        (ball(1, 1, 4, 4, 4, kind=LinfTensor), ball(1, 1, 1, 1, 3, kind=LinfTensor, name="grid")),
        options={"witnesses": 6 * [(CORNER, torch.full((1, 1, 1, 1, 3), -0.2501, dtype=torch.float64))]},
    ),
    "_native_batch_norm_legit_functional": Case(
        "",
        lambda a: aten._native_batch_norm_legit_functional.default(a, None, None, MEAN, VAR, False, 0.1, 1e-5)[0],
        (ball(4, 3),),
    ),
    "upsample_bicubic2d": bicubic(aten.upsample_bicubic2d.default, 6, 3),
    "_upsample_bicubic2d_aa": bicubic(aten._upsample_bicubic2d_aa.default, 4, 7),
}
CASES = [replace(case, name=name) for name, case in BY_NAME.items()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("name", PAIRS)
def test_atens_overload_has_the_functions_norm(name):
    function, overload = map(tree_leaves, PAIRS[name](x(3, 4)))
    assert len(function) == len(overload) and any(isinstance(t, NormedTensor) for t in function)
    for one, other in zip(function, overload, strict=True):
        assert type(one) is type(other)
        if isinstance(one, NormedTensor):
            torch.testing.assert_close(one.backing, other.backing)
            torch.testing.assert_close(one.norm_size, other.norm_size, rtol=1e-12, atol=0)
            assert one.elem_dims == other.elem_dims
        else:
            assert torch.equal(one, other)
