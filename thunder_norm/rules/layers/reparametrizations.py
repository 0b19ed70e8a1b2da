"""Norm rules for parameters made of parameters: weight normalization."""

from __future__ import annotations

import math

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.rules._lengths import least_length
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import Constant, as_kind, rms, scalar


def _over(t: torch.Tensor, dim: int) -> ed.Dims:
    """The dimensions of a length: all but `dim`."""
    return tuple(d - t.ndim for d in range(t.ndim) if dim == -1 or d != dim)


@normed_op(torch._VF._weight_norm).register_norm(lift_dims={"v": lambda t, args: _over(t, args["dim"])}, wants_own_kinds=True)
def weight_norm(v: NormedTensor, g: LinfTensor, dim: int = 0) -> RMSTensor:
    """g v / |v|_2, the length over all dimensions but `dim`, N entries; over all of them for -1.

    Value:       max |g| / sqrt(N), RMS over those dimensions    (attained: an equality for the largest g)
    Sensitivity: 1 / sqrt(N) to g; max |g| / |v|_2 to v, the shortest: local that of the data, of a parameter of norm 1 that of a row of
                 norm 1 (the weight is that of c v for any c > 0; gradients are orthogonal to v, so that steps along them make it longer),
                 else the least that is not 0 (`least_length`); in mode "typical" v's own
    Gap:         no derivative shows the slope at a v as short as a dtype allows
    """
    over = _over(v, dim)
    count = math.prod(v.shape[d] for d in over)
    value = spoiled(g.norm_size / math.sqrt(max(count, 1)), v.norm_size)
    slope: Constant = 0.0
    if v.perturbation_size is not None:
        x, c = as_kind(v, RMSTensor, over)
        if is_local(v):
            length: torch.Tensor = data(v).square().sum(over).sqrt().amin().to(NORM_DTYPE)
        elif current_mode() != "bound":
            length = x.norm_size * math.sqrt(count)
        else:
            length = scalar(least_length(v, over) * math.sqrt(count), v.norm_size)
        slope = g.norm_size * c / length
    return rms(value, over, sensitivity={"v": slope, "g": 1 / math.sqrt(max(count, 1))})
