"""Second moments of functions of a Gaussian, for mode "typical": entries independent, of mean 0 and standard deviation n.

A size is then ``V(n) = sqrt(E f(n z)^2)`` and a sensitivity ``L(n) = sqrt(E f'(n z)^2)``, both differentiable in n.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

_REACH, _POINTS = 9.0, 1801  # the trapezoid rule converges exponentially here; kinks cost about 1e-6


@functools.cache
def _grid() -> tuple[list[float], list[float]]:
    step = 2 * _REACH / (_POINTS - 1)
    nodes = [-_REACH + i * step for i in range(_POINTS)]
    return nodes, [step * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) for z in nodes]


def second_moment_root(f: Callable[[torch.Tensor], torch.Tensor], n: torch.Tensor) -> torch.Tensor:
    """``sqrt(E f(n z)^2)`` for a standard normal z: a 0-dim tensor, differentiable in n (derivative 0 where n is 0)."""
    nodes, weights = (torch.tensor(v, dtype=n.dtype, device=n.device) for v in _grid())
    positive = n.clamp(min=1e-100)  # the square root has no derivative where f(0) = 0 = n
    return (f(positive.expand(nodes.shape) * nodes).square() * weights).sum().sqrt()


@functools.cache
def expected_maximum(count: int) -> float:
    """``sqrt(E max(z_1, .., z_count)^2)`` of independent standard normals.

    >>> round(expected_maximum(2), 6)
    1.0
    """
    nodes, weights = _grid()
    cdf = [0.5 * math.erfc(-z / math.sqrt(2)) for z in nodes]
    return math.sqrt(sum(z * z * count * w * c ** (count - 1) for z, w, c in zip(nodes, weights, cdf, strict=True)))


def absolute_moment(order: float) -> float:
    """``E |z|^order`` of a standard normal.

    >>> round(absolute_moment(4), 9)
    3.0
    """
    return 2 ** (order / 2) * math.gamma((order + 1) / 2) / math.sqrt(math.pi)
