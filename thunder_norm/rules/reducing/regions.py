"""Norm rules for torchvision's pooling of regions: what detectors read from an image inside of boxes.

Boxes, ``rois`` [K, 5], are an image's number, which does not move, and the corners x1, y1, x2, y2.  Torchvision gives no gradient to them;
how far the result moves with them is said where something bounds it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import library_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._local import beside_jumps
from thunder_norm.rules._shared import as_kind, refuse_perturbation, rms
from thunder_norm.scalars import times

_CHANNELS = -3


def _channels(t: torch.Tensor, arguments: dict[str, Any]) -> tuple[int, ...]:
    return (_CHANNELS,)


_IMAGE: dict[str, Any] = {"allow_plain_tensors": "constant", "lift_dims": {"input": _channels}}


def _of_positions(input: RMSTensor) -> tuple[NormedTensor, float]:
    """The largest RMS over channels, or the largest entry, of a position."""
    return as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d == _CHANNELS))


def _steepest(op: str, rois: RMSTensor | torch.Tensor, values: NormedTensor, scale: float) -> dict[str, Any]:
    """How far a result moves with the boxes, by 2 n for each pixel along either dimension, where jumps are as good as slopes.

    Raises:
        JumpError: boxes carry a perturbation_size, in mode "bound".
    """
    if not isinstance(rois, RMSTensor):
        return {}
    if not len(rois):
        return {"rois": 0.0}
    if current_mode() == "bound" and not (op == "roi_align" and is_local(rois)):
        refuse_perturbation(library_op(f"torchvision::{op}"), rois)
        return {}
    return {"rois": times(values.norm_size, 4 * abs(scale) * as_kind(rois, LinfTensor, ())[1])}


def _beside_jumps(
    rois: RMSTensor, at: NormedTensor, scale: float, pooled: tuple[int, int], sampling_ratio: int, is_aligned: bool
) -> torch.Tensor:
    """1, or infinity where a sample is at the border of what is read, or the number of samples at its next."""
    sizes = at.shape[-1], at.shape[-2]

    def distance(boxes: torch.Tensor) -> torch.Tensor:
        found = []
        for d, (size, bins) in enumerate(zip(sizes, reversed(pooled), strict=True)):
            start, end = (boxes[:, i] * scale - 0.5 * is_aligned for i in (1 + d, 3 + d))
            length = end - start if is_aligned else (end - start).clamp(min=1.0)
            samples = torch.full_like(length, sampling_ratio)
            if sampling_ratio <= 0:  # one more where a bin outgrows a whole number of pixels
                samples = (length / bins).ceil()
                found.append(length / bins - (length / bins).round())
            for border in (-1.0, float(size)):  # beyond it, samples are 0
                sample = (border - start) / length * bins * samples - 0.5
                is_one = (sample >= 0) & (sample <= bins * samples - 1)
                found.append(torch.where(is_one, sample - sample.round(), 1.0))
        return torch.stack(found)

    return beside_jumps(rois, 1.0, distance)


@library_op("torchvision::roi_align").register_norm(**_IMAGE)
def roi_align(
    input: RMSTensor,
    rois: RMSTensor | torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> RMSTensor:
    """Means of bilinear samples of an image [batch, channels, H, W] in the bins of each box.

    Value:        n from RMS over channels or the largest entry (attained: constants); other elem_dims are converted to these
    Sensitivity:  1 to the image;  none to boxes, which jump: the number of samples does with their size, and samples outside are 0
    Local:        4 n times the scale for the largest entry of the boxes, where none is at a jump
    Typical:      the same: as between jumps
    Source:       convex combinations of positions; from a pixel to the next an image changes by at most 2 n
    Gap:          by boxes: neighbours in both directions of all samples of a bin would have to have opposite signs
    """
    values, c = _of_positions(input)
    by_boxes = _steepest("roi_align", rois, values, spatial_scale)
    if isinstance(rois, RMSTensor) and is_local(rois) and len(rois):
        by_boxes["rois"] *= _beside_jumps(rois, values, spatial_scale, (pooled_height, pooled_width), sampling_ratio, aligned)
    return rms(values.norm_size, values.elem_dims, sensitivity={"input": c} | by_boxes)


@library_op("torchvision::ps_roi_align").register_norm(**_IMAGE)
def ps_roi_align(
    input: RMSTensor,
    rois: RMSTensor | torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
) -> tuple:
    """`roi_align` where each bin reads channels of its own, and the numbers of these, which have no norm.

    Value:        n of the largest entry; sqrt(bins) n from RMS over channels     (attained: constants; all in the channels of one bin)
    Sensitivity:  that factor to the image;  none to boxes, which jump
    Typical:      as `roi_align` to boxes
    """
    values, c = _of_positions(input)
    gain = math.sqrt(pooled_height * pooled_width) if values.elem_dims else 1.0
    found = rms(times(values.norm_size, gain), values.elem_dims)
    by_boxes = _steepest("ps_roi_align", rois, found, spatial_scale)
    return rms(found.norm_size, found.elem_dims, sensitivity={"input": c * gain} | by_boxes), None


def _largest(op: str, input: RMSTensor, rois: RMSTensor | torch.Tensor, scale: float) -> tuple:
    values, c = as_kind(input, LinfTensor, ())
    by_boxes = _steepest(op, rois, values, scale)
    return LinfTensor(values.norm_size, elem_dims=(), sensitivity={"input": c} | by_boxes), None


@library_op("torchvision::roi_pool").register_norm(**_IMAGE)
def roi_pool(
    input: RMSTensor, rois: RMSTensor | torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple:
    """The largest entries in the bins of each box, rounded to pixels, and their places, which have no norm.

    Value:        the largest entry     (attained: constants)
    Sensitivity:  1 to the image;  none to boxes, which jump
    Typical:      as `roi_align` to boxes
    """
    return _largest("roi_pool", input, rois, spatial_scale)


@library_op("torchvision::ps_roi_pool").register_norm(**_IMAGE)
def ps_roi_pool(
    input: RMSTensor, rois: RMSTensor | torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple:
    """The means of the bins of each box, rounded to pixels, of channels of their own, and the numbers of these, which have no norm.

    Value:        the largest entry     (attained: constants)
    Sensitivity:  1 to the image;  none to boxes, which jump
    Typical:      as `roi_align` to boxes
    """
    return _largest("ps_roi_pool", input, rois, spatial_scale)
