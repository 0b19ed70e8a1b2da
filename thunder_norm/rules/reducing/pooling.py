"""Norm rules for pooling and resampling.

The norm may run over channels (then a position's window is a convex combination, or one entry for each channel) or over all
positions too (then what counts is how many windows an entry is in).  Anything between is converted to the former.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._gaussian import expected_maximum
from thunder_norm.rules._shared import as_kind, per_dim, rms, root, scaled, spread
from thunder_norm.scalars import times


@dataclass(frozen=True)
class _Windows:
    """The windows along one dimension: which positions each takes, and by how many it divides."""

    size: int
    taken: tuple[tuple[int, ...], ...]
    divisors: tuple[int, ...]

    @property
    def largest(self) -> int:
        return max(map(len, self.taken), default=1)

    def most_covered(self, weight: Callable[[int, int], float]) -> float:
        """Largest total weight of the windows an entry is in; `weight` of (entries, divisor)."""
        totals = [0.0] * self.size
        for positions, divisor in zip(self.taken, self.divisors, strict=True):
            for i in positions:
                totals[i] += weight(len(positions), divisor)
        return max(totals, default=1.0)


def sliding(
    shape: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> list[_Windows]:
    """The windows along each dimension of positions, as torch's pooling slides them."""
    count = len(shape)
    kernels = per_dim(kernel, count)
    strides = kernels if stride is None or stride == [] or stride == () else per_dim(stride, count)
    windows = []
    for size, k, s, p, d in zip(shape, kernels, strides, per_dim(padding, count), per_dim(dilation, count), strict=True):
        span = size + 2 * p - d * (k - 1) - 1
        number = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (number - 1) * s >= size + p:  # a window must start inside the input or its left padding
            number -= 1
        starts = [i * s - p for i in range(number)]
        taken = tuple(tuple(j for j in range(at, at + d * k, d) if 0 <= j < size) for at in starts)
        divisors = tuple(min(at + k, size + p) - at if count_include_pad else len(t) for at, t in zip(starts, taken, strict=True))
        windows.append(_Windows(size, taken, divisors))
    return windows


def _adaptive(shape: Sequence[int], output_size: Any) -> list[_Windows]:
    windows = []
    for size, out in zip(shape, output_sizes(output_size, shape), strict=True):
        taken = tuple(tuple(range(i * size // out, -(-(i + 1) * size // out))) for i in range(out))
        windows.append(_Windows(size, taken, tuple(map(len, taken))))
    return windows


def output_sizes(output_size: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The positions of an output along each dimension; None stands for as many as there are.  Some may be given as tensors."""
    sizes = (output_size,) * len(shape) if isinstance(output_size, int) or output_size is None else tuple(output_size)
    sizes = sizes * len(shape) if len(sizes) == 1 else sizes
    return tuple(n if out is None else int(out) for out, n in zip(sizes, shape, strict=True))


def _positions(count: int) -> ed.Dims:
    return tuple(range(-count, 0))


def _ratio(windows: Sequence[_Windows]) -> float:
    """Positions of the input for each of the output."""
    return math.prod(w.size / max(len(w.taken), 1) for w in windows)


def _pooled(x: RMSTensor, windows: Sequence[_Windows], over_channels: float, over_positions: float) -> RMSTensor:
    """The result with one factor for norms that do not run over positions, another for those that run over all."""
    positions = _positions(len(windows))
    sized = set(ed.nontrivial(x.shape, positions))
    if sized and sized <= set(x.elem_dims):
        return scaled(x, over_positions, tuple(sorted({*x.elem_dims, *positions})))
    return _per_position(x, positions, over_channels)


def _per_position(x: RMSTensor, positions: ed.Dims, c: float) -> RMSTensor:
    """The result with a factor, from the norm of each position by itself."""
    per_position, factor = as_kind(x, RMSTensor, tuple(d for d in x.elem_dims if d not in positions))
    return rms(times(per_position.norm_size, c), per_position.elem_dims, sensitivity={"input": factor * c})


# -- averages -----------------------------------------------------------------------------------------------------------------


def _averaged(x: RMSTensor, windows: Sequence[_Windows], divisor: int | None = None) -> RMSTensor:
    """y = sum over the window / divisor: ``|y|^2 <= (entries / divisor^2) sum |x|^2`` and each entry in several windows."""
    if divisor is not None:
        per_position = math.prod(w.largest for w in windows) / divisor
        energy = math.prod(w.most_covered(lambda entries, _: entries) for w in windows) / divisor**2
    else:
        per_position = math.prod(max(len(t) / d for t, d in zip(w.taken, w.divisors, strict=True)) for w in windows)
        energy = math.prod(w.most_covered(lambda entries, d: entries / d**2) for w in windows)
    return _pooled(x, windows, per_position, spread(math.sqrt(energy * _ratio(windows))))


def _register_averages(dims: int) -> None:
    def avg_pool(
        input: RMSTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> RMSTensor:
        """Mean over windows of K positions.

        Value:       n from RMS over channels or the largest entry (attained: constants); over all P positions too,
                     n sqrt(mu P_in / (K P_out)) where an entry is in at most mu windows; 1 if windows do not overlap
        Sensitivity: the same factor
        Source:      convex combinations; Jensen in each window
        """
        shape = input.shape[-dims:]
        windows = sliding(shape, kernel_size, stride, padding, 1, ceil_mode, count_include_pad)
        return _averaged(input, windows, divisor_override)

    def adaptive_avg_pool(input: RMSTensor, output_size: Any) -> RMSTensor:
        """Mean over as many windows as the output has positions: `avg_pool`."""
        return _averaged(input, _adaptive(input.shape[-dims:], output_size))

    avg_pool.__name__, adaptive_avg_pool.__name__ = f"avg_pool{dims}d", f"adaptive_avg_pool{dims}d"
    normed_op(getattr(F, f"avg_pool{dims}d")).register_norm(avg_pool)
    normed_op(getattr(F, f"adaptive_avg_pool{dims}d")).register_norm(adaptive_avg_pool)
    if dims > 1:
        normed_op(getattr(torch.ops.aten, f"_adaptive_avg_pool{dims}d").default).register_norm(adaptive_avg_pool)


# -- maxima -------------------------------------------------------------------------------------------------------------------


def _maximum(x: RMSTensor, windows: Sequence[_Windows]) -> RMSTensor:
    """Each channel picks a position of its own in the window."""
    entries = math.prod(w.largest for w in windows)
    if current_mode() == "typical":
        c = expected_maximum(entries)
        return rms(times(x.norm_size, c), x.elem_dims, sensitivity={"input": 1})
    channels = ed.numel(x.shape, [d for d in x.elem_dims if d < -len(windows)])
    covered = math.prod(w.most_covered(lambda _, __: 1.0) for w in windows)
    return _pooled(x, windows, spread(root(min(entries, channels))), spread(math.sqrt(covered * _ratio(windows))))


def _register_maxima(dims: int) -> None:
    def max_pool(
        input: RMSTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> RMSTensor:
        """Maximum over windows of K positions.

        Value:       n from the largest entry; sqrt(min(K, C)) n from RMS over C channels, each of which picks its own position
                     (attained); n sqrt(mu P_in / P_out) from RMS over channels and positions, an entry in at most mu windows
        Sensitivity: the same factor
        Typical:     sqrt(E max^2) of K independent Gaussians, and 1
        """
        windows = sliding(input.shape[-dims:], kernel_size, stride, padding, dilation, ceil_mode)
        return _maximum(input, windows)

    def max_pool_with_indices(
        input: RMSTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> tuple:
        """`max_pool` and the indices of the maxima, which have no norm."""
        return max_pool(input, kernel_size, stride, padding, dilation, ceil_mode), None

    def adaptive_max_pool(input: RMSTensor, output_size: Any, *, return_indices: bool) -> RMSTensor:
        """Maximum over as many windows as the output has positions: `max_pool`."""
        return _maximum(input, _adaptive(input.shape[-dims:], output_size))

    def adaptive_max_pool_with_indices(input: RMSTensor, output_size: Any, return_indices: bool = True) -> tuple:
        """`adaptive_max_pool` and the indices of the maxima."""
        return adaptive_max_pool(input, output_size, return_indices=False), None

    max_pool.__name__, adaptive_max_pool.__name__ = f"max_pool{dims}d", f"adaptive_max_pool{dims}d"
    normed_op(getattr(torch, f"max_pool{dims}d")).register_norm(max_pool)
    normed_op(getattr(F, f"max_pool{dims}d_with_indices")).register_norm(max_pool_with_indices)
    normed_op(getattr(F, f"adaptive_max_pool{dims}d_with_indices")).register_norm(adaptive_max_pool_with_indices)
    # F's function of this name says whether it returns indices, ATen's always does
    normed_op(getattr(torch.ops.aten, f"adaptive_max_pool{dims}d").default).register_norm(adaptive_max_pool)
    normed_op(getattr(torch.ops.aten, f"adaptive_max_pool{dims}d").default).register_norm(adaptive_max_pool_with_indices)


for _dims in (1, 2, 3):
    _register_averages(_dims)
    _register_maxima(_dims)


# -- resampling -----------------------------------------------------------------------------------------------------------------


@normed_op(F.interpolate).register_norm(allow_plain_tensors="constant")
def interpolate(
    input: RMSTensor,
    size: list[torch.Tensor] | Sequence[int] | int | None = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> RMSTensor:
    """An image at another resolution, by nearest neighbour, linear interpolation or averages.

    Value:       n from RMS over channels or the largest entry (attained: constants); other elem_dims are converted to that
    Sensitivity: 1
    Source:      convex combinations of positions
    Mode "bicubic" has negative weights: see `resampling`.
    """
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area"):
        raise NormMismatchError(f"there is no interpolation in mode {mode!r}")
    return resampled(input)


def resampled(x: RMSTensor, c: float = 1.0) -> RMSTensor:
    """Each position of the result c times a convex combination of those of x, or as good as one."""
    return _per_position(x, _positions(x.ndim - 2), c)


def upsample(input: RMSTensor, output_size: Any, *args: Any, **kwargs: Any) -> RMSTensor:
    """`interpolate`, as ATen names it."""
    return resampled(input)


for _name in (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
):  # fmt: skip
    normed_op(getattr(torch.ops.aten, _name).default).register_norm(upsample)
