"""How large parameters typically are when a model is built: the sizes that mode "typical" of the modular norm expects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.norms.lifts.inference import NormSpec

_GAIN = 1 / math.sqrt(3)
_ADDED = 0.1


def start_size(norm: NormSpec, shape: Sequence[int]) -> float:
    """How much larger a parameter makes the RMS of what it meets, when it is as PyTorch's modules draw it.

    ``1 / sqrt(3)`` for matrices and kernels: `nn.Linear` and `nn.Conv2d` draw entries uniform in ``+-1 / sqrt(fan_in)``, and
    independent inputs of RMS 1 come out with ``sqrt(fan_in) 1 / sqrt(3 fan_in)``, whatever the width.  0.1 for vectors that are added:
    biases start at 0 or by the same numbers, RMS ``1 / sqrt(3 fan_in)``.  1 for gains and tables, which start so (`nn.LayerNorm`,
    `nn.Embedding`), and for what has a norm of another kind.

    Source: torch.nn.Linear.reset_parameters (He et al. 2015, section 2.2, with a = sqrt(5)).

    >>> from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor
    >>> weight, bias = NormSpec(RMSToRMSTensor, (-2, -1)), NormSpec(RMSTensor, (-1,))
    >>> round(start_size(weight, (4, 8)), 4), start_size(bias, (4,)), start_size(bias, (10, 4)), start_size(NormSpec(LinfTensor, ()), (4,))
    (0.5774, 0.1, 1.0, 1.0)
    """
    if issubclass(norm.kind, RMSToRMSTensor):
        return _GAIN
    is_vector = sum(size > 1 for size in shape) <= 1
    is_added = issubclass(norm.kind, RMSTensor) and not issubclass(norm.kind, LinfTensor)
    return _ADDED if is_added and is_vector else 1.0


def typical_size(norm: NormSpec, t: torch.Tensor) -> torch.Tensor:
    """How large a parameter is as it is, where there are no worst cases to be safe from: its norm, or how much larger it makes independent inputs.

    A matrix or kernel whose entries w take inputs of RMS 1 to the i-th output gives that a mean square of ``sum w^2``, so that all outputs
    have RMS ``sqrt(sum w^2 / out)``; of several matrices, the largest.  A kernel's norm is that of its taps, times their number.

    >>> from thunder_norm import RMSToRMSTensor
    >>> typical_size(NormSpec(RMSToRMSTensor, (-2, -1)), torch.ones(2, 9)).item()
    3.0
    """
    if not issubclass(norm.kind, RMSToRMSTensor) or not t.numel():
        return norm.kind.of(t, norm.elem_dims).norm_size
    taps = tuple(range(2 - t.ndim, 0)) if issubclass(norm.kind, RMSToRMSConvTensor) else ()
    return (t.double().square().sum((*norm.elem_dims, *taps)) / t.shape[norm.elem_dims[0]]).amax().sqrt()
