"""Integers and complex numbers on their way through the autograd of torch and Thunder.

Both hand on floating-point tensors, but a gradient that is a wrapper may hold others: the mask of a masked tensor, the codes of a quantised
one.  So these travel as floating-point tensors that say the same, exactly, and are turned back where the gradient is put together.  So do
complex tensors, which Thunder's autograd leaves out.
"""

from __future__ import annotations

import torch

_NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)  # whole in float32
_MIDDLE = (torch.int32, torch.uint32)  # in float64
_LOW = 0xFFFFFFFF


def encode(t: torch.Tensor) -> torch.Tensor:
    """`t`, or what stands for it in autograd: of 64-bit integers two halves, one behind the other."""
    if t.is_floating_point():
        return t
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    if t.dtype in _NARROW:
        return t.to(torch.float32)
    if t.dtype in _MIDDLE:
        return t.to(torch.int64).to(torch.float64)
    t = t.to(torch.int64)
    return torch.stack((t >> 32, t & _LOW)).to(torch.float64)


def decode(carried: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`."""
    if dtype.is_floating_point:
        return carried
    if dtype.is_complex:
        return torch.view_as_complex(carried.contiguous())
    if dtype in _NARROW:
        return carried.to(dtype)
    if dtype in _MIDDLE:
        return carried.to(torch.int64).to(dtype)
    high, low = carried.to(torch.int64).unbind(0)
    return ((high << 32) | low).to(dtype)
