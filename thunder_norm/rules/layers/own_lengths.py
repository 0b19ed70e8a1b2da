"""Parameters that a program divides by their own length: weight normalization, written out.

The divisor is a plain tensor, made from parameters, and nothing of how; its values and those of the parameter tell what it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment, current_mode
from thunder_norm.core.kinds import L2Tensor
from thunder_norm.core.nonfinite import has_values
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import is_complex
from thunder_norm.rules._lengths import least_length
from thunder_norm.rules._shared import is_moving

_Length = tuple[ed.Dims, float]


def _length(x: torch.Tensor, divisor: torch.Tensor) -> _Length | None:
    """Over which dims a divisor is the Euclidean length of x, and how many times; None where it is something else, or may be.

    Any number is some multiple of one length: of one it is the length, or the root of the mean square.  Of entries that have one modulus
    the largest is as long as all are: they tell nothing.
    """
    if divisor.ndim > x.ndim or is_complex(x) or not (has_values(x) and has_values(divisor)):
        return None
    shape = (1,) * (x.ndim - divisor.ndim) + tuple(divisor.shape)
    dims = tuple(d - x.ndim for d in range(x.ndim) if shape[d] == 1)
    count = ed.numel(x.shape, dims)
    if any(n not in (1, size) for n, size in zip(shape, x.shape, strict=True)) or count < 2 or not x.numel():
        return None
    moduli = x.detach().double().abs()
    times = divisor.detach().double().reshape(shape) / moduli.square().sum(dims, keepdim=True).sqrt()
    one, rounding = 1 / math.sqrt(count), 32 * torch.finfo(x.dtype).eps * math.sqrt(count)
    c = times.mean().item() if times.numel() > 1 else min((1.0, one), key=lambda c: abs(times.item() - c))
    is_length = bool(((times - c).abs() <= rounding * c).all())
    is_told = bool((moduli.amin(dims) < 0.999 * moduli.amax(dims)).all())
    return (dims, c) if is_length and is_told else None


def _is_by_own_length(args: dict[str, Any]) -> bool:
    x, divisor = args["input"], args["other"]
    if current_mode() != "bound" or args["rounding_mode"] is not None or not (is_moving(x) and is_moving(divisor)):
        return False
    return not current_environment().is_measured(x) and _length(x, divisor) is not None


def _groups(x: torch.Tensor, args: dict[str, Any]) -> ed.Dims:
    found = _length(x, args["other"])
    return () if found is None else found[0]


@normed_op(torch.div).register_norm(
    when=_is_by_own_length, allow_plain_tensors=True, lift_dims={"input": _groups}, wants_own_kinds=True
)
def div(input: L2Tensor, other: torch.Tensor, *, rounding_mode: str | None = None) -> L2Tensor:
    """x / (c |x|), of a parameter x, or what is made of some.  Value 1 / c; sensitivity 1 / (c l), for the least length l that x can have.

    Of a parameter that is on a sphere it is that of the sphere; of others, what the dtype can tell from 0.
    Source:      that of `normalize`, without eps
    Untried:     it is for parameters alone
    """
    found = _length(input.backing, other)
    assert found is not None, "the condition"
    dims, c = found
    least = least_length(input, dims) * math.sqrt(ed.numel(input.shape, dims))
    return L2Tensor(1 / c, elem_dims=dims, sensitivity={"input": 1 / (c * least)})
