"""Which values are numbers, and arithmetic of sizes.

Sizes are 0-dim float64 tensors: each operation on one is a line of a trace, and a call of torch in eager mode.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch


def is_number(value: Any) -> bool:
    """Whether a value is one real number: of Python or NumPy, or a tensor without dimensions; truth values are none, NaN is one."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_meta and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether a value is an integer > 0: a number of steps, of bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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
