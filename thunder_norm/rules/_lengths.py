"""How short groups can be that a program divides by their length: what is known of a tensor, else what its dtype can tell from 0."""

from __future__ import annotations

import math

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L2Tensor, RMSTensor
from thunder_norm.core.tensors import NormedTensor

_LEAST_ROOT = math.sqrt(5e-324)  # lengths are roots of sums of squares, in double precision at most


def known_length(x: NormedTensor, dims: ed.Dims) -> float:
    """What the RMS of a group of x over `dims` is at least: of a parameter of norm 1 each group has it; 0 if nothing is known."""
    if current_mode() != "bound" or not isinstance(x, RMSTensor | L2Tensor) or not set(x.elem_dims) <= set(dims):
        return 0.0
    return x._least / (math.sqrt(max(x.numel_normed, 1)) if isinstance(x, L2Tensor) else 1.0)


def least_length(x: NormedTensor, dims: ed.Dims, is_centred: bool = False, groups: int = 1) -> float:
    """The least RMS over `dims`, in `groups`, of a group of x (minus its mean if `is_centred`) that is not 0: there x / 0 is no number.

    Of N numbers of a dtype whose smallest positive number is s it is at least ``s / sqrt(N)``: one of them is not 0, and all are
    multiples of s.  Less the mean it is ``s / N``: ``N sum k^2 - (sum k)^2`` of integers k that are not all equal is at least 1.
    Beyond the ball of that radius the map to the unit sphere has the Lipschitz constant 1 / radius, between any two points.
    """
    known = known_length(x, dims) if groups == 1 and not is_centred else 0.0
    count = max(ed.numel(x.shape, dims) // groups, 1)
    return max(known, smallest_positive(x.dtype) / (count if is_centred else math.sqrt(count)))


def smallest_positive(dtype: torch.dtype) -> float:
    """The smallest length of numbers of a dtype that is computed as another number than 0."""
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, _LEAST_ROOT)


def inverse_length(length: torch.Tensor, least: float, count: int, eps: float) -> float | torch.Tensor:
    """The slope of ``x / max(|x|, eps)`` of x of `count` entries, Euclidean norms.

    Bound: 1 / max(`least`, eps), where `least` is the smallest length of an x that is not 0.  Mode "typical": that of a Gaussian of `length`,
    ``E 1 / |x|^2 = N / ((N - 2) length^2)``, less the direction along x; of one or two entries, for which that is infinite, 1 / `length`, as
    of a sign.  Mode "modula": 1 / `length`, which is that of norm 1.
    """
    if current_mode() == "modula":
        return 1 / length.clamp(min=eps)
    if current_mode() == "typical":
        return math.sqrt((count - 1) / (count - 2) if count > 2 else 1.0) / length.clamp(min=eps)
    return 1 / max(least, eps)
