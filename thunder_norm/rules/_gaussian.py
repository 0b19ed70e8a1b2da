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


_LARGE, _GROWING = 1e100, 1e20  # functions that are less than the second at the first are taken to be bounded


def second_moment_root(f: Callable[[torch.Tensor], torch.Tensor], n: torch.Tensor) -> torch.Tensor:
    """``sqrt(E f(n z)^2)`` for a standard normal z: a 0-dim tensor, differentiable in n (derivative 0 where n is 0).

    Where n is infinite it is the limit.
    """
    nodes, weights = (torch.tensor(v, dtype=n.dtype, device=n.device) for v in _grid())
    # the square root has no derivative where f(0) = 0 = n
    positive = torch.where(n == math.inf, torch.full_like(n, _LARGE), n.clamp(min=1e-100))
    found = (f(positive.expand(nodes.shape) * nodes).square() * weights).sum().sqrt()
    return torch.where((n == math.inf) & (found > _GROWING), n, found)


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


def length_moment(order: float, count: float) -> float:
    """``E (|z|^2 / N)^(order / 2)`` of N independent standard normals (chi-square): `absolute_moment` of one, 1 of infinitely many.

    >>> round(length_moment(4, 1), 9), round(length_moment(4, 8), 9), length_moment(4, math.inf)
    (3.0, 1.25, 1.0)
    """
    if count == math.inf:
        return 1.0
    return math.exp(math.lgamma((order + count) / 2) - math.lgamma(count / 2)) * (2 / count) ** (order / 2)


@functools.cache
def _tie_density(count: int) -> float:
    """Density, at 0, of the difference of the two largest of `count` standard normals: ``N (N - 1) int phi^2 Phi^(N - 2)``."""
    nodes, weights = _grid()
    terms = (
        w * math.exp(-z * z / 2) * (0.5 * math.erfc(-z / math.sqrt(2))) ** (count - 2)
        for z, w in zip(nodes, weights, strict=True)
    )
    return count * (count - 1) * sum(terms) / math.sqrt(2 * math.pi)


def softmax_gain(n: torch.Tensor, count: int) -> torch.Tensor:
    """How far a softmax average moves, ``sqrt(E sum_j p_j^2 |v_j - y|^2)``, of values v of size 1 and `count` logits of size n.

    Between two it is ``sqrt(E (2 p (1 - p))^2)``.  Of more, the two largest decide where n is large: their difference is next to 0 so
    many times as often as that of any two.  Where n is small few are taken to compete, as where others are masked or trained away:
    independent ones would leave less, ``sqrt((1 - 1 / N) / N)`` at n = 0.
    """
    if count < 2:
        return torch.zeros_like(n)
    difference = n * (math.sqrt(2) * _tie_density(2) / _tie_density(count))

    def moved(x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(x)
        return 2 * p * (1 - p)

    return torch.where(difference < 4, second_moment_root(moved, difference), _narrow_moment_root(moved, difference.clamp(min=4)))


def _narrow_moment_root(f: Callable[[torch.Tensor], torch.Tensor], n: torch.Tensor) -> torch.Tensor:
    """`second_moment_root` of an f that is 0 beyond 20, for n that is not small: the nodes stay where f is not 0."""
    nodes = torch.linspace(-20, 20, _POINTS, dtype=n.dtype, device=n.device)
    density = torch.exp(-0.5 * (nodes / n).square()) / (n * math.sqrt(2 * math.pi))
    return (f(nodes).square() * density).sum().mul(40 / (_POINTS - 1)).sqrt()
