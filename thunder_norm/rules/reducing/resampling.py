"""Norm rules for reading an image between its positions: interpolate with a cubic kernel, grid_sample.

A cubic kernel has negative weights, so that the sum of their moduli exceeds 1.  Other modes take convex combinations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, rms
from thunder_norm.rules.reducing.pooling import output_sizes, resampled
from thunder_norm.scalars import times

# -- cubic kernels ------------------------------------------------------------------------------------------------------------


def _cubic(t: float, a: float) -> float:
    """Keys' cubic convolution kernel at distance t."""
    t = math.fabs(t)
    if t < 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return a * (((t - 5) * t + 8) * t - 4) if t < 2 else 0.0


def cubic_gain(size: int, out: int, align_corners: bool, scale: float | None, antialias: bool) -> float:
    """Largest sum of the moduli of the weights of a position, of `out` from `size` along one dimension.

    `scale` is that of the call, if it was given; torch's kernel has a = -0.75, and -0.5 if it is widened against aliasing.
    """
    if align_corners:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1 / scale if scale is not None and scale > 0 else size / out
    largest = 0.0
    for i in range(out):
        weights: dict[int, float] = {}
        if antialias:
            width = max(step, 1.0)
            centre = step * (i + 0.5)
            first, last = max(int(centre - 2 * width + 0.5), 0), min(int(centre + 2 * width + 0.5), size)
            weights = {j: _cubic((j - centre + 0.5) / width, -0.5) for j in range(first, last)}
            total = math.fsum(weights.values())
            weights = {j: w / total for j, w in weights.items()}
        else:
            at = step * i if align_corners else step * (i + 0.5) - 0.5
            for j in range(math.floor(at) - 1, math.floor(at) + 3):
                inside = min(max(j, 0), size - 1)  # outside of the image, its border is repeated
                weights[inside] = weights.get(inside, 0.0) + _cubic(at - j, -0.75)
        largest = max(largest, math.fsum(map(math.fabs, weights.values())))
    return largest


def _bicubic(
    x: RMSTensor, sizes: Sequence[int], align_corners: bool | None, scales: Sequence[float | None], antialias: bool
) -> RMSTensor:
    c = math.prod(
        cubic_gain(n, out, bool(align_corners), scale, antialias)
        for n, out, scale in zip(x.shape[-2:], sizes, scales, strict=True)
    )
    return resampled(x, c)


def _is_cubic(arguments: dict[str, Any]) -> bool:
    return arguments["mode"] == "bicubic"


@normed_op(F.interpolate).register_norm(when=_is_cubic, allow_plain_tensors="constant")
def interpolate_bicubic(
    input: RMSTensor,
    size: list[torch.Tensor] | Sequence[int] | int | None = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> RMSTensor:
    """An image at another resolution, by cubic kernels.

    Value:       c n from RMS over channels or the largest entry, c the product over both dimensions of the largest sum of moduli
                 of a position's weights, at most 1.375 each     (attained: signs of the weights);  other elem_dims are converted
    Sensitivity: c
    """
    shape = input.shape[-2:]
    if scale_factor is None:
        return _bicubic(input, output_sizes(size, shape), align_corners, (None, None), antialias)
    factors = (scale_factor,) * 2 if isinstance(scale_factor, int | float) else tuple(scale_factor)
    sizes = [math.floor(n * f) for n, f in zip(shape, factors, strict=True)]
    return _bicubic(input, sizes, align_corners, (None, None) if recompute_scale_factor else factors, antialias)


def _register_aten(op: Any, antialias: bool) -> None:
    def upsample_bicubic2d(
        input: RMSTensor, output_size: Any, align_corners: bool, scales_h: Any = None, scales_w: float | None = None
    ) -> RMSTensor:
        """`interpolate_bicubic`, as ATen names it."""
        if isinstance(scales_h, list | tuple):  # ATen's other overload gives a list of both
            return interpolate_bicubic(input, output_size, scales_h, "bicubic", align_corners, None, antialias)
        return _bicubic(input, output_sizes(output_size, input.shape[-2:]), align_corners, (scales_h, scales_w), antialias)

    normed_op(op).register_norm(upsample_bicubic2d)


_register_aten(torch.ops.aten.upsample_bicubic2d.default, False)
_register_aten(torch.ops.aten._upsample_bicubic2d_aa.default, True)


# -- at given positions -------------------------------------------------------------------------------------------------------


def _sampled(x: RMSTensor, grid: RMSTensor | torch.Tensor, mode: str, align_corners: bool | None) -> RMSTensor:
    sizes = x.shape[2:]
    channels = 1 - x.ndim
    values, c = as_kind(x, RMSTensor, tuple(d for d in x.elem_dims if d == channels))
    gain = 1.375 ** len(sizes) if mode == "bicubic" else 1.0
    sensitivity: dict[str, Any] = {"input": c * gain}
    if isinstance(grid, NormedTensor):
        if mode != "bilinear" and grid.perturbation_size is not None:
            raise NormMismatchError(f"how far grid_sample moves with its grid is known in mode 'bilinear' only, not in {mode!r}")
        _, c_grid = as_kind(grid, LinfTensor, ())
        sensitivity["grid"] = values.norm_size * (c_grid * sum(n - 1 if align_corners else n for n in sizes))
    return rms(times(values.norm_size, gain), values.elem_dims, sensitivity=sensitivity)


def _channels(t: torch.Tensor, arguments: dict[str, Any]) -> tuple[int, ...]:
    return (1 - t.ndim,)


_IMAGE: dict[str, Any] = {"allow_plain_tensors": "constant", "lift_dims": {"input": _channels}}


@normed_op(F.grid_sample).register_norm(**_IMAGE)
def grid_sample(
    input: RMSTensor,
    grid: RMSTensor | torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> RMSTensor:
    """An image [batch, channels, *space] read at the positions of a grid, -1 to 1 along each dimension.

    Value:        n from RMS over channels or the largest entry, bilinear and nearest (attained: constants); bicubic 1.375^2 n
                  (attained: signs of the weights half way between positions); other elem_dims are converted to these
    Sensitivity:  1 or 1.375^2 to the image;  n (W + H), or n (W - 1 + H - 1) with align_corners, to the largest entry of a normed
                  grid, bilinear                      (attained: neighbours in both directions of opposite sign, at a corner)
    Source:       from a position to the next, 2 / W of the grid, the image changes by at most 2 n; padding only moves positions
                  nearer to each other, or to entries of 0
    Raises NormMismatchError for a grid that moves in other modes.
    """
    return _sampled(input, grid, mode, align_corners)


_MODES = ("bilinear", "nearest", "bicubic")


@normed_op(torch.grid_sampler).register_norm(**_IMAGE)
@normed_op(torch.grid_sampler_2d).register_norm(**_IMAGE)
@normed_op(torch.grid_sampler_3d).register_norm(**_IMAGE)
def grid_sampler(
    input: RMSTensor, grid: RMSTensor | torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> RMSTensor:
    """`grid_sample`, as ATen names its arguments."""
    return _sampled(input, grid, _MODES[interpolation_mode], align_corners)


@normed_op(torch.affine_grid_generator).register_norm
def affine_grid(theta: RMSTensor, size: Sequence[int], align_corners: bool) -> RMSTensor:
    """``A p + b`` at every position p of an image, for each matrix [A, b] of a batch.

    Value:       c n for the largest entry, c = 1 + sum of the largest |p|, 1 or 1 - 1 / N along a dimension of N positions;
                 from RMS over rows of k numbers sqrt(k) sqrt(1 + sum p^2) n        (attained: the corner, its signs or itself)
    Sensitivity: that factor: it is linear
    """
    furthest = [(1.0 if align_corners else (n - 1) / n) if n > 1 else 0.0 for n in size[2:]]
    if not theta.elem_dims:
        c = 1 + math.fsum(furthest)
    else:
        c = as_kind(theta, RMSTensor, (-1,))[1] * math.sqrt(theta.shape[-1] * (1 + math.fsum(p * p for p in furthest)))
    return rms(times(theta.norm_size, c), (), sensitivity={"theta": c})
