"""Arithmetic of sizes, which are 0-dim float64 tensors: each operation on one is a line of a trace, and a call of torch in eager mode."""

from __future__ import annotations

import torch


def times(size: torch.Tensor, c: float | torch.Tensor) -> torch.Tensor:
    """``c * size``, without an operation where c is 1."""
    return size if isinstance(c, float | int) and c == 1 else size * c


def square_root(square: torch.Tensor) -> torch.Tensor:
    """Square root with derivative 0 at 0: the subgradient of a norm at the zero tensor, where sqrt alone gives NaN; of NaN it is NaN."""
    is_positive = square > 0
    return torch.where(is_positive, torch.where(is_positive, square, 1.0).sqrt(), square * 0)


def largest(sizes: torch.Tensor) -> torch.Tensor:
    """The largest number of a tensor, without an operation where it is one number."""
    return sizes.amax() if sizes.ndim else sizes
