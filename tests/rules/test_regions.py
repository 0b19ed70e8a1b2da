"""Torchvision's pooling of regions and its deformable convolution: norms against adversarial inputs, boxes that move."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSConvTensor, norm_mode, norm_sensitivity
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import JumpError

ops = pytest.importorskip("torchvision").ops
D = torch.float64
BOXES = torch.tensor([[0, 0.3, 0.2, 2.7, 3.1], [0, 1.2, 0.4, 3.0, 2.0]], dtype=D)


def image(channels, kind=RMSTensor, size=4):
    return Ball("input", kind, (1, channels, size, size), 1.0, (-3,) if kind is RMSTensor else None)


def deformed(a, weight, bias, offset, mask):
    return ops.deform_conv2d(a, offset, weight, bias, 1, 1, 1, mask)


CASES = [
    Case("roi_align", lambda a: ops.roi_align(a, BOXES, 2, 1.0, 2, True), (image(2),)),
    Case("roi_align, not aligned", lambda a: ops.roi_align(a, BOXES, 2, 1.0), (image(1, LinfTensor),)),
    # channels are of one bin each, so that not all of an image's norm is in one
    Case("ps_roi_align", lambda a: ops.ps_roi_align(a, BOXES, 2, 1.0, 2), (image(8),), 0.5),
    Case("roi_pool", lambda a: ops.roi_pool(a, BOXES, 2, 1.0), (image(2),)),
    Case("ps_roi_pool", lambda a: ops.ps_roi_pool(a, BOXES, 2, 1.0), (image(8, LinfTensor),)),
    Case(
        "deform_conv2d",
        deformed,
        (
            image(2, size=2),
            Ball("weight", RMSToRMSConvTensor, (2, 2, 1, 2), 1.0),
            Ball("bias", RMSTensor, (2,), 0.5),
            Ball("offset", LinfTensor, (1, 4, 4, 3), 0.3),
            Ball("mask", LinfTensor, (1, 2, 4, 3), 0.5),
        ),
        0.3,  # by offsets, see the rule
        {"restarts": 1, "steps": 20},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("ratio", [2, 0])
def test_local_sensitivity_to_boxes_bounds_what_finite_differences_find(ratio):
    torch.manual_seed(seeded(0))
    a, step = torch.randn(1, 2, 6, 6, dtype=D), 1e-5
    boxes = torch.tensor([[0, 0.7, 0.9, 4.3, 4.6]], dtype=D)

    def pooled(b):
        return ops.roi_align(a, b, 2, 0.8, ratio, True)

    with norm_sensitivity("local"):
        x = RMSTensor.of(a, (-3,))
        rois = LinfTensor(5.0, backing=boxes, elem_dims=(), perturbation_size=1.0)
        claimed = ops.roi_align(x, rois, 2, 0.8, ratio, True).perturbation_size
        at_jump = LinfTensor(5.0, backing=torch.tensor([[0, 0.0, 0, 5, 5]], dtype=D), elem_dims=(), perturbation_size=1.0)
        assert ops.roi_align(x, at_jump, 1, 0.8, 0, True).perturbation_size.isinf()
        none = LinfTensor(5.0, backing=boxes[:0], elem_dims=(), perturbation_size=1.0)  # of one level of a pyramid
        assert ops.roi_align(x, none, 2).perturbation_size == 0
    for _ in range(20):
        by = torch.cat([torch.zeros(1, 1, dtype=D), torch.randn(1, 4, dtype=D).sign()], 1)
        moved = (pooled(boxes + step * by) - pooled(boxes - step * by)) / (2 * step)
        assert moved.square().mean(1).sqrt().max() <= claimed


@pytest.mark.parametrize("pool", [ops.roi_align, ops.roi_pool, ops.ps_roi_align, ops.ps_roi_pool])
def test_boxes_that_move_are_refused_for_all_boxes_and_taken_typically(pool):
    x = RMSTensor.of(torch.randn(1, 8, 4, 4), (-3,))
    rois = LinfTensor(4.0, backing=BOXES.float(), elem_dims=(), perturbation_size=1.0)
    with pytest.raises(JumpError, match="roi"):
        pool(x, rois, 2)
    with norm_mode("typical"):
        assert pool(x, rois, 2).norm_size.isfinite()
