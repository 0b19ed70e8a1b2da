"""Norm rules for what quantization does to values, as training that is aware of it computes them: the nearest multiple of a scale within a range."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_norm.core.context import lift, run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._local import beside_jumps
from thunder_norm.rules._shared import is_moving, is_typical, like, refuse_perturbation, scalar

_Number = torch.Tensor | float | int


def _fake_quantized(
    op: Callable, input: RMSTensor, scale: _Number, zero_point: _Number, quant_min: int, quant_max: int, axis: int | None = None
) -> RMSTensor:
    """The norm of s (clamp(round(x / s) + z, q_min, q_max) - z), s and z perhaps of each channel along `axis`.

    An entry is at most |x| + s / 2 and at most s max(|q_min - z|, |q_max - z|); of a range without 0, which torch refuses for numbers, it is
    at most the end next to 0 more.
    """
    if is_moving(scale):
        raise NormMismatchError("the scale is a parameter, or made from some, and may be any other: give a number or a buffer")
    low, high = (_largest(_end(scale, zero_point, q), input) for q in (quant_min, quant_max))
    step = torch.maximum(*_largest(scale, input))
    n = input.norm_size
    away = torch.maximum(low[0], high[1])  # how far the range is from 0, where it is
    size = torch.minimum(n + 0.5 * step + away, torch.maximum(low[1], high[0]).maximum(away))
    if is_typical():
        return like(input, size, sensitivity={"input": 1})
    if is_local(input):
        return like(input, size, sensitivity={"input": beside_jumps(input, 1.0, lambda x: _from_jumps(x, scale, axis))})
    refuse_perturbation(op, input)
    return like(input, size)


def _from_jumps(x: torch.Tensor, scale: _Number, axis: int | None) -> torch.Tensor:
    """How far entries are from half way between two multiples of the scale, in units of it."""
    if isinstance(scale, torch.Tensor) and axis is not None:
        scale = scale.view([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])
    ratio = x / scale
    return ratio - ratio.floor() - 0.5


def _end(scale: _Number, zero_point: _Number, code: int) -> _Number:
    """What a code stands for."""
    if not isinstance(scale, torch.Tensor) and not isinstance(zero_point, torch.Tensor):
        return scale * (code - zero_point)
    steps = run_real(torch.sub, (zero_point, code), {}) if isinstance(zero_point, torch.Tensor) else zero_point - code
    return run_real(torch.neg, (run_real(torch.mul, (scale, steps), {}),), {})


def _largest(t: _Number, x: RMSTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry above 0 and the largest modulus below it."""
    if not isinstance(t, torch.Tensor):
        return scalar(max(t, 0.0), x.norm_size), scalar(max(-t, 0.0), x.norm_size)
    above, below = (run_real(torch.clamp, (t,), {end: 0}) for end in ("min", "max"))
    return lift(above, LinfTensor).norm_size, lift(below, LinfTensor).norm_size


@normed_op(torch.fake_quantize_per_tensor_affine).register_norm(allow_plain_tensors=True)
def fake_quantize_per_tensor_affine(
    input: RMSTensor, scale: torch.Tensor | float, zero_point: torch.Tensor | int, quant_min: int, quant_max: int
) -> RMSTensor:
    """s (clamp(round(x / s) + z, q_min, q_max) - z).

    Value:       min(n + s / 2, s max(|q_min - z|, |q_max - z|))     (attained: all entries half a step below an even multiple)
    Sensitivity: none, it jumps
    Local:       sensitivity 1, that of its gradient, which goes straight through, where no entry is half way between two multiples
    Typical:     sensitivity 1, as at steps larger than its jumps
    """
    return _fake_quantized(torch.fake_quantize_per_tensor_affine, input, scale, zero_point, quant_min, quant_max)


@normed_op(torch.fake_quantize_per_channel_affine).register_norm(allow_plain_tensors=True)
def fake_quantize_per_channel_affine(
    input: RMSTensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
) -> RMSTensor:
    """The same with a scale and a zero point of each channel, those of the channel with the largest bound.

    Value:       min(n + max s / 2, max s max(|q_min - z|, |q_max - z|))     (attained: as for one scale)
    Sensitivity: none, it jumps
    Local:       sensitivity 1, that of its gradient, which goes straight through, where no entry is half way between two multiples
    Typical:     sensitivity 1, as at steps larger than its jumps
    """
    return _fake_quantized(torch.fake_quantize_per_channel_affine, input, scale, zero_point, quant_min, quant_max, axis)
