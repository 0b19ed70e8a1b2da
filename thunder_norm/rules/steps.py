"""Norm rules for piecewise constant functions of each entry: rounding and signs.

Their values are bounded; at a jump their slope is infinite, so they refuse an input that carries a perturbation_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_norm.errors import NormMismatchError
from thunder_norm.registry import normed_op
from thunder_norm.rules._shared import like
from thunder_norm.tensors import RMSTensor


def _step(op: Callable, value: Callable[[torch.Tensor], torch.Tensor], doc: str) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        if input.perturbation_size is not None:
            raise NormMismatchError(f"{op.__name__} jumps: how far its result moves is not bounded by how far its input does")
        return like(input, value(input.norm_size))

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = doc
    normed_op(op).register_norm(rule)


_step(torch.sign, torch.ones_like, "Sign of x.  Value 1, attained; no sensitivity.")
_step(torch.sgn, torch.ones_like, "Sign of x.  Value 1, attained; no sensitivity.")
_step(torch.trunc, lambda n: n, "x rounded towards 0.  Value n, attained by integers; no sensitivity.")
_step(torch.round, lambda n: n + 0.5, "x rounded to the nearest integer.  Value n + 1/2; no sensitivity.")
_step(torch.floor, lambda n: n + 1, "x rounded down.  Value n + 1, attained as n -> 0; no sensitivity.")
_step(torch.ceil, lambda n: n + 1, "x rounded up.  Value n + 1, attained as n -> 0; no sensitivity.")
_step(torch.frac, lambda n: n.clamp(max=1.0), "What x has beyond the next integer towards 0.  Value min(n, 1); no sensitivity.")
