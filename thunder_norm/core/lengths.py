"""How far a tensor moves in its own norm, given the ellipsoid that its rows move within."""

from __future__ import annotations

import math

import torch

from thunder_norm.core.ellipsoids import Ellipsoid
from thunder_norm.core.kinds import L1Tensor, L2Tensor
from thunder_norm.core.tensors import NormedTensor


def length(e: Ellipsoid, ndim: int, x: NormedTensor) -> torch.Tensor:
    """How far x moves in its own norm when the features of each row, its last `ndim` dimensions, move within `e`."""
    over, features = set(x.elem_dims), set(range(-ndim, 0))
    of_all = x.numel_normed ** (0.5 if isinstance(x, L2Tensor) else 1.0 if isinstance(x, L1Tensor) else 0.0)
    if over and over >= features:
        return e.length * (of_all / math.sqrt(max(len(e.cov), 1)))
    if not over or not over < features:
        return e.entry * of_all
    shape = x.shape[x.ndim - ndim :]
    numbers = torch.arange(len(e.cov)).reshape(shape).movedim(tuple(x.elem_dims), tuple(range(-len(over), 0)))
    groups = numbers.reshape(-1, math.prod(x.shape[d] for d in over))
    return e.part(groups) * (of_all / math.sqrt(groups.shape[1]))
