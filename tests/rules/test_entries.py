"""Rules by the names that only some devices, layouts or older programs use: the same claims, searched through those names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.audit import Ball, Case

aten = torch.ops.aten
R, INF, OP = RMSTensor, LinfTensor, RMSToRMSTensor
ROWS = (-1, -2)
mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
bag = torch.tensor([0, 1, 1, 2])
starts = torch.tensor([0, 2])
rows = torch.tensor([2, 0])
labels = torch.tensor([[[1, 0], [2, 1]]])
windows = torch.tensor([[[[0, 3], [8, 10]]]])


def x(*shape, n=1.0, kind=R, dims=None, name="x"):
    return Ball(name, kind, shape, n, dims)


QKV = (x(1, 2, 3, 4, name="q"), x(1, 2, 3, 4, name="k"), x(1, 2, 3, 4, name="v"))
IMAGE, VOLUME = x(1, 2, 4, 4, kind=INF), x(1, 2, 4, 4, 4, kind=INF)

CASES = [
    Case("bmm by a weight", torch.bmm, (x(2, 3, 5), x(2, 5, 4, kind=OP, dims=ROWS, name="w"))),
    Case("bmm of a weight", torch.bmm, (x(2, 4, 5, kind=OP, name="w"), x(2, 5, 3, dims=(-2,)))),
    Case("mv of transposed weights", torch.mv, (x(3, 5, kind=OP), x(5, kind=R, name="y"))),
    # how many indices a bag has is data: at most all of them
    Case("embedding_bag", lambda w: aten._embedding_bag.default(w, bag, starts)[0], (x(3, 4),), 0.49),
    Case("flash attention on a CPU", lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0], QKV, 0.7),
    Case("attention by matrix products", lambda q, k, v: aten._scaled_dot_product_attention_math.default(q, k, v)[0], QKV, 0.7),
    Case("fused rms_norm", lambda a: aten._fused_rms_norm.default(a, [4], None, 0.25)[0], (x(3, 4),)),
    Case(
        "batch_norm by given statistics",
        lambda a: aten._native_batch_norm_legit_no_training.default(a, None, None, mean, var, 0.1, 1e-5)[0],
        (x(4, 3),),
    ),
    Case("split in sizes", lambda a: aten.unsafe_split_with_sizes.default(a, [1, 3], 1)[1], (x(3, 4),)),
    Case("indexed", lambda a: aten._unsafe_index.Tensor(a, [rows]), (x(3, 4),)),
    Case("reflected", lambda a: aten.reflection_pad2d.default(a, [1, 1, 1, 1]), (IMAGE,)),
    Case("reflected in space", lambda a: aten.reflection_pad3d.default(a, [1] * 6), (VOLUME,)),
    Case("replicated in space", lambda a: aten.replication_pad3d.default(a, [1] * 6), (VOLUME,)),
    Case("sorted stably", lambda a: aten.sort.stable(a, stable=True, dim=-1)[0], (x(3, 4),)),
    Case("max_pool1d", lambda a: aten.max_pool1d_with_indices.default(a, [2])[0], (x(1, 2, 4, kind=INF),)),
    Case("adaptive_max_pool1d", lambda a: aten.adaptive_max_pool1d.default(a, [2])[0], (x(1, 2, 4, kind=INF),)),
    Case("adaptive_max_pool2d", lambda a: aten.adaptive_max_pool2d.default(a, [2, 2])[0], (IMAGE,)),
    Case("adaptive_max_pool3d", lambda a: aten.adaptive_max_pool3d.default(a, [2] * 3)[0], (VOLUME,)),
    Case("adaptive_max_pool1d of torch", lambda a: F.adaptive_max_pool1d(a, 2), (x(1, 2, 4, kind=INF),)),
    Case("adaptive_max_pool3d of torch", lambda a: F.adaptive_max_pool3d(a, 2), (VOLUME,)),
    Case("adaptive_avg_pool3d", lambda a: aten._adaptive_avg_pool3d.default(a, [2] * 3), (VOLUME,)),
    Case("nearest", lambda a: aten.upsample_nearest2d.default(a, [6, 6]), (IMAGE,)),
    Case("nearest in space", lambda a: aten.upsample_nearest3d.default(a, [6] * 3), (VOLUME,)),
    Case("nearest, exact", lambda a: aten._upsample_nearest_exact2d.default(a, [6, 6]), (IMAGE,)),
    Case("nearest in space, exact", lambda a: aten._upsample_nearest_exact3d.default(a, [6] * 3), (VOLUME,)),
    Case("bilinear, smoothed", lambda a: aten._upsample_bilinear2d_aa.default(a, [3, 3], False), (IMAGE,)),
    Case("nll_loss of images", lambda a: aten.nll_loss2d.default(a, labels, None, 1, -100), (x(1, 3, 2, 2, kind=INF),)),
    Case("distances", lambda a, b: aten._cdist_forward.default(a, b, 2.0, None), (x(3, 4), x(2, 4, name="y"))),
    Case("dropout without training", lambda a: torch.dropout(a, 0.5, False), (x(3, 4),)),
    Case("feature_dropout without training", lambda a: torch.feature_dropout(a, 0.5, False), (x(3, 4),)),
    Case("native_dropout without training", lambda a: torch.native_dropout(a, 0.5, False)[0], (x(3, 4),)),
    Case("alpha_dropout without training", lambda a: torch.alpha_dropout(a, 0.5, False), (x(3, 4),)),
    Case("feature_alpha_dropout without training", lambda a: torch.feature_alpha_dropout(a, 0.5, False), (x(3, 4),)),
    Case("as another dtype", lambda a: torch.ops.prims.convert_element_type.default(a, torch.float64), (x(3, 4),)),
    Case("as another dtype, L2", lambda a: torch.ops.prims.convert_element_type.default(a, torch.float64), (x(3, 4, kind=L2Tensor),)),
    Case("distinct rows", lambda a: aten.unique_dim.default(a, 0)[0], (x(3, 4),), options={"sensitivity": False}),
    *[
        Case(f"{f.__name__}", lambda a, f=f, n=n: f(a, [2] * n, return_indices=True)[0], (ball,))
        for f, n, ball in (
            (F.adaptive_max_pool1d_with_indices, 1, x(1, 2, 4, kind=INF)),
            (F.adaptive_max_pool2d_with_indices, 2, IMAGE),
            (F.adaptive_max_pool3d_with_indices, 3, VOLUME),
        )
    ],
    Case(
        "fractional_max_pool3d_with_indices",
        lambda a: F.fractional_max_pool3d_with_indices(a, 2, 2, _random_samples=torch.full((1, 2, 3), 0.4, dtype=a.dtype))[0],
        (VOLUME,),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
