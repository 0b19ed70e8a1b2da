"""Registration of functions of each entry, bounded and typical."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.rules import _local
from thunder_norm.rules._gaussian import second_moment_root
from thunder_norm.rules._shared import like

Function = Callable[[torch.Tensor], torch.Tensor]


def pointwise(*ops: Callable, f: Function, slope: Function) -> Callable:
    """Register a function ``(n, reach) -> (value, sensitivity)`` as the rule of `ops`; mode "typical" integrates f and f'."""

    def register(bound: Callable[[torch.Tensor, torch.Tensor], tuple]) -> Callable:
        def rule(input: RMSTensor) -> RMSTensor:
            value, sensitivity = bound(input.norm_size, input.norm_size * math.sqrt(input.numel_normed))
            if is_local(input):
                sensitivity = _local.slope(input, slope)
            return like(input, value, sensitivity={"input": sensitivity})

        def typical(input: RMSTensor) -> RMSTensor:
            return typical_pointwise(input, f, slope)

        for fn in (rule, typical):
            fn.__name__ = fn.__qualname__ = bound.__name__
            fn.__doc__ = bound.__doc__
        for op in ops:
            normed_op(op).register_norm(rule)
            normed_op(op).register_norm(mode="typical")(typical)
        return bound

    return register


def typical_pointwise(x: RMSTensor, f: Function, slope: Function) -> RMSTensor:
    """The result of an entrywise f with derivative `slope` on Gaussian entries."""
    n = x.norm_size
    return like(x, second_moment_root(f, n), sensitivity={"input": second_moment_root(slope, n)})


def softplus_of(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) without overflow."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-torch.abs(x)))
