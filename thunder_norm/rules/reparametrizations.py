"""Norm rules for parameters made of parameters: weight normalization."""

from __future__ import annotations

import math

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import Constant, as_kind, rms

_NO_SLOPE = (
    "weight normalization divides by the length of v, which may be as small as one likes: how far the weight moves with v has no bound; "
    "mode='typical' takes v at its own length, sensitivity='local' at that of its data; or remove it "
    "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm), the weight itself has a bound"
)


@normed_op(torch._VF._weight_norm).register_norm
def weight_norm(v: NormedTensor, g: LinfTensor, dim: int = 0) -> RMSTensor:
    """g v / |v|_2, the length over all dimensions but `dim`, N entries; over all of them for -1.

    Value:       max |g| / sqrt(N), RMS over those dimensions    (attained: an equality for the largest g)
    Sensitivity: 1 / sqrt(N) to g; none to v, whose length has no lower bound; local: max |g| / |v|_2, v the shortest; in mode
                 "typical" at v's own length
    Raises NormMismatchError for a v that moves, in mode "bound": the weight is that of c v for any c > 0, so that no length is special.
    """
    over = tuple(d - v.ndim for d in range(v.ndim) if dim == -1 or d != dim)
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
            raise NormMismatchError(_NO_SLOPE)
        slope = g.norm_size * c / length
    return rms(value, over, sensitivity={"v": slope, "g": 1 / math.sqrt(max(count, 1))})
