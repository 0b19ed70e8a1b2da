"""Convolutions and transposed convolutions.

An image's norm is RMS over its channels and the maximum over positions, possibly also averaged over positions; a kernel's is
K times the largest operator norm of its K taps (`RMSToRMSConvTensor`).  Padding with zeros, strides and dilation only choose
which taps meet which positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift
from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor
from thunder_norm.core.registry import library_op, normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, per_dim, refined, rms, with_bias
from thunder_norm.rules.linear_algebra.contraction import conversion_factor
from thunder_norm.scalars import times

Ints = int | Sequence[int]


def _taps_by_residue(taps: int, stride: int, dilation: int) -> list[int]:
    """How many taps sit on each sub-grid of positions modulo the stride.

    >>> _taps_by_residue(3, 2, 1)
    [2, 1]
    """
    residues = [j * dilation % stride for j in range(taps)]
    return [residues.count(r) for r in sorted(set(residues))]


def _out_size(size: int, taps: int, stride: int, padding: int | str, dilation: int) -> int:
    if padding == "same":
        return size
    return (size + 2 * (0 if padding == "valid" else int(padding)) - dilation * (taps - 1) - 1) // stride + 1


def _channel_dims(t: torch.Tensor, args: dict[str, Any]) -> tuple[int, ...]:
    """Lift an image over its channels; the kernel says how many spatial dimensions follow."""
    return (1 - args["weight"].ndim,)


def _grouped_kind(t: torch.Tensor, args: dict[str, Any]) -> type[RMSToRMSConvTensor]:
    """Lift a kernel as that of a convolution in groups."""
    return RMSToRMSConvTensor.grouped(args["groups"])


_LIFTS: dict[str, Any] = {"lift_dims": {"input": _channel_dims}, "lift_kinds": {"weight": _grouped_kind}}


def _kernel_factor(weight: RMSToRMSConvTensor, groups: int, transposed: bool) -> float:
    """What it costs to read the kernel's norm as that of the operator applied.

    A transposed convolution's kernel is [in, out / groups, *taps].  With groups it is measured like any other kernel, block by
    block of its first dimension, and read the other way round.
    """
    if weight.groups != groups:
        raise NormMismatchError(
            f"the kernel's norm is for {weight.groups} groups, the convolution has {groups}: "
            f"use RMSToRMSConvTensor.grouped({groups})"
        )
    ordered = (1 - weight.ndim, -weight.ndim) if transposed else (-weight.ndim, 1 - weight.ndim)
    if groups == 1:
        return conversion_factor(weight, RMSToRMSConvTensor, ordered)
    if weight.elem_dims != (-weight.ndim, 1 - weight.ndim):
        raise NormMismatchError("a kernel in groups has elem_dims (first dim, second dim)")
    return weight.shape[0] / groups / weight.shape[1] if transposed else 1.0


def _conv(
    input: RMSTensor,
    weight: RMSToRMSConvTensor,
    bias: RMSTensor | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    transposed: bool = False,
    output_padding: Ints = 0,
) -> RMSTensor:
    """The bound, see `conv2d` and `conv_transpose2d`."""
    spatial = weight.ndim - 2
    channel = -spatial - 1
    taps = weight.shape[2:]
    strides, dilations = per_dim(stride, spatial), per_dim(dilation, spatial)
    paddings = (padding,) * spatial if isinstance(padding, str) else per_dim(padding, spatial)
    # reading a maximum over channels as a mean costs nothing, and copies in dimensions of size 1 are no matter
    dims = tuple(sorted({*input.elem_dims, channel}))
    c = _kernel_factor(weight, groups, transposed)
    for i, (k, s, d, p) in enumerate(zip(taps, strides, dilations, paddings, strict=True)):
        dim, by_residue = i - spatial, _taps_by_residue(k, s, d)
        size = input.shape[dim]
        if dim in input.elem_dims:
            # taps on the same sub-grid see the same entries, different sub-grids are disjoint
            if transposed:
                out = (size - 1) * s - 2 * int(p) + d * (k - 1) + per_dim(output_padding, spatial)[i] + 1
            else:
                out = _out_size(size, k, s, p, d)
            c *= math.sqrt(size / max(out, 1) * sum(m * m for m in by_residue)) / k
        elif transposed:  # so many taps reach an output position
            c *= max(by_residue) / k
    n_input, n_weight = input.norm_size, weight.norm_size
    value = n_input * n_weight * c
    sensitivity: dict[str, Any] = {"input": n_weight * c, "weight": n_input * c}
    if bias is not None:
        sensitivity["bias"] = refined(bias, (-1,))
        value = with_bias(value, bias.norm_size * sensitivity["bias"])
    return rms(value, dims, sensitivity=sensitivity)


def conv2d(
    input: RMSTensor,
    weight: RMSToRMSConvTensor,
    bias: RMSTensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> RMSTensor:
    """y_p = sum_k W_k x_(s p + k) + b, for 1, 2 and 3 spatial dimensions.

    input:  [..., in, *space], RMS over channels, maximum over positions (or also a mean over positions, see below)
    weight: [out, in / groups, *taps], K max_k |W_k| over its K taps, maximum over groups;  bias: [out], RMS
    Value:        |y| <= |x| |W| + |b|     (attained: all taps the same rank-one matrix, an image that is constant)
    Sensitivity:  |W|, |x|, 1
    Source:       triangle inequality over taps, each an operator on channels
    Mean over a spatial dimension: times sqrt(in / out sum_r m_r^2) / k, for m_r of its k taps at positions = r modulo the
    stride: the taps of one residue see the same entries.  1 up to the boundary for stride 1, or a stride equal to k = 1.
    """
    return _conv(input, weight, bias, stride, padding, dilation, groups)


for _op in (F.conv1d, F.conv2d, F.conv3d):
    normed_op(_op).register_norm(conv2d, **_LIFTS)


def conv_transpose2d(
    input: RMSTensor,
    weight: RMSToRMSConvTensor,
    bias: RMSTensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> RMSTensor:
    """The adjoint of a convolution, for 1, 2 and 3 spatial dimensions.

    input:  [..., in, *space], RMS over channels, maximum over positions
    weight: [in, out / groups, *taps], the norm over (out dim, in dim), K max_k |W_k|;  bias: [out], RMS
    Value:        |y| <= |x| |W| prod ceil(k_i / s_i) / k_i + |b|   (attained as `conv2d`: so many taps reach one position)
    Sensitivity:  the product's own, 1 for the bias
    Mean over a spatial dimension: the factor of the adjoint convolution, see `conv2d`.
    """
    return _conv(input, weight, bias, stride, padding, dilation, groups, True, output_padding)


def _transposed_dims(t: torch.Tensor, args: dict[str, Any]) -> tuple[int, int] | None:
    return (1 - t.ndim, -t.ndim) if args["groups"] == 1 else None


for _op in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    normed_op(_op).register_norm(
        conv_transpose2d,
        lift_dims={"input": _channel_dims, "weight": _transposed_dims},
        lift_kinds={"weight": _grouped_kind},
    )


def _convolution_dims(t: torch.Tensor, args: dict[str, Any]) -> tuple[int, int] | None:
    return _transposed_dims(t, args) if args["transposed"] else None


@normed_op(torch.ops.aten.convolution.default).register_norm(
    lift_dims={"input": _channel_dims, "weight": _convolution_dims}, lift_kinds={"weight": _grouped_kind}
)
def convolution(
    input: RMSTensor,
    weight: RMSToRMSConvTensor,
    bias: RMSTensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> RMSTensor:
    """All of them under ATen's one name."""
    return _conv(input, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


@library_op("torchvision::deform_conv2d").register_norm(allow_plain_tensors="constant", **_LIFTS)
def deform_conv2d(
    input: RMSTensor,
    weight: RMSToRMSConvTensor,
    offset: RMSTensor | torch.Tensor,
    mask: RMSTensor | torch.Tensor,
    bias: RMSTensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> RMSTensor:
    """A convolution whose taps read the image, bilinearly, `offset` pixels away, each times an entry of `mask` where that is used.

    input, weight, bias: as of `conv2d`, |x| of a position;  offset, mask: their largest entries
    Value:        |x| |W| |mask| + |b|     (attained: as `conv2d`)
    Sensitivity:  |W| |mask|, |x| |mask|, |x| |W| to the mask, 4 |x| |W| |mask| to offsets, 1
    Source:       from a pixel to the next, along either dimension, an image changes by at most 2 |x|; beyond its border it ends in zeros
    Gap:          offsets: of one tap the image changes so, neighbours being of opposite sign; and not in all of them
    """
    values, c = as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d == -3))
    of_weight = _kernel_factor(weight, groups, False)
    n, w = values.norm_size, times(weight.norm_size, of_weight)
    largest, c_mask = _largest_entry(mask) if use_mask else (n.new_ones(()), 0.0)
    c_bias = refined(bias, (-1,))
    sensitivity: dict[str, Any] = {"input": w * largest * c, "weight": n * largest * of_weight, "bias": c_bias}
    if use_mask and isinstance(mask, RMSTensor):
        sensitivity["mask"] = n * w * c_mask
    if isinstance(offset, RMSTensor):
        sensitivity["offset"] = n * w * largest * (4 * _largest_entry(offset)[1])
    return rms(with_bias(n * w * largest, bias.norm_size * c_bias), (-3,), sensitivity=sensitivity)


def _largest_entry(t: RMSTensor | torch.Tensor) -> tuple[torch.Tensor, float]:
    found, c = as_kind(t if isinstance(t, RMSTensor) else lift(t, LinfTensor), LinfTensor, ())
    return found.norm_size, c
