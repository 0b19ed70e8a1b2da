"""What is computed with all that a mask leaves out, in place of what it selects: `selections` has the program run these."""

from __future__ import annotations

import torch


def beside(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask with as many dimensions as `x`, whose first ones it selects."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def kept(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose gradient is zero where the mask is false, and not zero times something."""
    return torch.where(beside(mask, x), x, x.detach())


def operand(t: torch.Tensor, mask: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that meets each of the selected entries."""
    t = t.to(dtype)
    t = (t.squeeze(0) if t.ndim > len(shape) - mask.ndim else t).expand(shape)
    return kept(t, mask)


def divisor(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Integers without those that are left out: there is no integer for a quotient by zero, and torch raises."""
    return torch.where(beside(mask, x), x, torch.ones_like(x))


def total(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of what is selected."""
    return torch.where(beside(mask, x), x, torch.zeros_like(x)).sum()


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of what is selected; neither sum nor number need fit into a low precision.

    Raises:
        RuntimeError: there is no mean of integers, in torch's words.
    """
    dtype = x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError("mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype.")
    x = x.float() if dtype in (torch.float16, torch.bfloat16) else x
    return (total(x, mask) / beside(mask, x).expand(x.shape).sum().to(x.dtype)).to(dtype)


def put(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> None:
    """``x[mask] = values[mask]``."""
    x.copy_(torch.where(beside(mask, x), values.expand(x.shape), x))
