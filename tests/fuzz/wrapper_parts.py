"""What random programs with wrapper subclasses call: classes and functions of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


class Doubled(torch.autograd.Function):
    """Twice its argument, with a gradient of three."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Called(torch.autograd.Function):
    """What a function makes of a tensor, with a gradient of one half."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable) -> torch.Tensor:
        return function(x) * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * 0.5, None


@dataclass
class Pair:
    """Two tensors."""

    first: torch.Tensor
    second: torch.Tensor

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first


def rows_of(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """A generator of the rows."""
    for i in range(x.shape[0]):
        yield x[i] * (i + 1)


def tried(compute: Callable[[], torch.Tensor], otherwise: torch.Tensor) -> torch.Tensor:
    """What is computed, or twice another where that is an error."""
    try:
        return compute()
    except RuntimeError:
        return otherwise * 2
