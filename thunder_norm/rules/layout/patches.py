"""Norm rules for windows and for moving between channels and positions: unfold, pixel_shuffle."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import as_kind, negative, per_dim, rms, root, scaled, spread
from thunder_norm.scalars import times


@normed_op(torch.unfold_copy).register_norm
@normed_op(torch.Tensor.unfold).register_norm
def unfold(input: RMSTensor, dimension: int, size: int, step: int) -> RMSTensor:
    """Windows of `size` positions along a dimension of K, as a new last dimension.

    Value:       n where the norm does not run over the dimension; sqrt(K / size) n where it does: then it runs over the window
    Sensitivity: the same factor
    """
    along = negative(dimension, input.ndim)
    dims = ed.place([d for d in input.elem_dims if d != along], ed.with_new(input.ndim, -1))
    if along not in input.elem_dims:
        return scaled(input, 1, dims)
    c = spread(root(input.shape[along] / size))
    return rms(times(input.norm_size, c), (*dims, -1), sensitivity={"input": c})


@normed_op(torch.ops.aten.im2col.default).register_norm
def im2col(input: RMSTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> RMSTensor:
    """Patches of an image [.., C, H, W] as columns [.., C taps, positions], zeros around it.

    Value:       n, RMS over channels and K taps, from RMS over channels; from RMS over P positions too sqrt(P / K) n (all energy
                 in a patch); other elem_dims are converted to the former
    Sensitivity: the same factor
    Source:      the mean over taps of an RMS at each position is at most the maximum
    """
    image = set(ed.nontrivial(input.shape, (-3, -2, -1)))
    if image == set(ed.nontrivial(input.shape, input.elem_dims)):
        taps = kernel_size**2 if isinstance(kernel_size, int) else math.prod(kernel_size)
        c = spread(root(input.shape[-2] * input.shape[-1] / taps))
        return rms(times(input.norm_size, c), (-2,), sensitivity={"input": c})
    channels = tuple(d for d in input.elem_dims if d == -3)
    x, c = as_kind(input, RMSTensor, channels)
    return rms(x.norm_size, (-2,) if channels else (), sensitivity={"input": c})


def _overlap(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    """How many windows of a dimension meet at one position, at most."""
    starts = range(-padding, size + padding - dilation * (kernel - 1), stride)
    met = Counter(start + dilation * tap for start in starts for tap in range(kernel))
    return max((count for position, count in met.items() if 0 <= position < size), default=1)


@normed_op(torch.ops.aten.col2im.default).register_norm
def col2im(
    input: RMSTensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> RMSTensor:
    """Columns [.., C taps, L] added up to an image [.., C, H, W], each at the positions of its patch: the transpose of `im2col`.

    m is how many patches meet at a position at most, K the number of taps.

    Value:       RMS over channels, positions and all: sqrt(m K L / (H W)) n; over channels from RMS over the columns sqrt(K) m n; from the
                 largest entry m n; other elem_dims are converted
    Sensitivity: the same factor: it is linear
    Gap:         fewer patches meet at the edges
    Source:      ``(a_1 + .. + a_m)^2 <= m (a_1^2 + .. + a_m^2)``
    """
    sizes, kernels, *rest = (per_dim(v, 2) for v in (output_size, kernel_size, dilation, padding, stride))
    m = math.prod(_overlap(*axis) for axis in zip(sizes, kernels, *rest, strict=True))
    taps = math.prod(kernels)
    columns = set(ed.nontrivial(input.shape, (-2, -1)))
    if columns and columns <= set(input.elem_dims):
        x, c = as_kind(input, RMSTensor, (-2, -1))
        c *= math.sqrt(m * taps * input.shape[-1] / math.prod(sizes))
        return rms(times(input.norm_size, c), (-3, -2, -1), sensitivity={"input": c})
    channels = tuple(d for d in input.elem_dims if d == -2)
    x, c = as_kind(input, RMSTensor, channels)
    of_channels = m * (spread(math.sqrt(taps)) if channels else 1.0)
    return rms(x.norm_size * of_channels, (-3,) if channels else (), sensitivity={"input": c * of_channels})


@normed_op(torch.pixel_shuffle).register_norm
def pixel_shuffle(input: RMSTensor, upscale_factor: int) -> RMSTensor:
    """[.., C r^2, H, W] to [.., C, H r, W r].

    Value:       n if the norm runs over channels and positions, or over none of them; r n from RMS over channels: all energy of
                 a position may be in the channels that go to one of its r^2 pixels
    Sensitivity: the same factor
    """
    # without channels, each pixel has channels of its own: a mean over positions becomes one over their pixels
    outside = [d for d in (-2, -1) if d not in input.elem_dims] if -3 in input.elem_dims else []
    return scaled(input, spread(float(upscale_factor) ** (len(outside) / 2)))


@normed_op(torch.pixel_unshuffle).register_norm
def pixel_unshuffle(input: RMSTensor, downscale_factor: int) -> RMSTensor:
    """[.., C, H r, W r] to [.., C r^2, H, W].

    Value:       n: channels are averaged over the r^2 pixels of a position too
    Sensitivity: 1, once the norm does not run over some of the positions only
    """
    image = ed.nontrivial(input.shape, (-3, -2, -1))
    if set(image) <= set(input.elem_dims):
        return scaled(input, 1, tuple({*input.elem_dims, -3, -2, -1}))
    x, c = as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d not in (-2, -1)))
    return rms(x.norm_size, x.elem_dims, sensitivity={"input": c})
