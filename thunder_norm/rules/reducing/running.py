"""Norm rules for running extrema, products and log-sums along a dimension: cummax, cummin, cumprod, logcumsumexp.

T is the length of the dimension, N the number of entries the norm runs over elsewhere.
"""

from __future__ import annotations

import math

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import as_kind, like, negative, root, scaled, spread


def _length(x: RMSTensor, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


def _is_over(x: RMSTensor, dim: int) -> bool:
    return x.ndim > 0 and negative(dim, x.ndim) in x.elem_dims


def _picked(x: RMSTensor, dim: int) -> float:
    """What it costs that each position shows one of those up to it, or a mean of them, each element its own."""
    length = _length(x, dim)
    # over the dimension all T positions may show the one that has all the energy
    return spread(root(length if _is_over(x, dim) else min(length, x.numel_normed)))


@normed_op(torch.cummax).register_norm
@normed_op(torch.cummin).register_norm
def cummax(input: RMSTensor, dim: int) -> tuple:
    """Largest (smallest) entry so far, and its index, which has no norm.

    Value:       n from the largest entry; sqrt(T) n if the norm runs over the dimension (attained: all energy at its start); else
                 sqrt(min(T, N)) n: each element shows a position of its own (attained)
    Sensitivity: the same factor
    Source:      ``|max_j x_j - max_j y_j| <= max_j |x_j - y_j|``
    """
    return scaled(input, _picked(input, dim)), None


def largest_slope(n: torch.Tensor, count: int) -> torch.Tensor:
    """At least ``max_k k n^(k-1)`` over k = 1 .. count, increasing in n: the largest over all real k in between.

    It is where k = 1 / log(1 / n), or at the nearer end.
    """
    if count <= 1:
        return torch.ones_like(n) if count else torch.zeros_like(n)
    # up to 1 / e the first k is the largest; the floor keeps the logarithm and its slope finite
    safe = n.clamp(min=0.1)
    k = (-1 / torch.log(safe.clamp(max=1 - 1e-9))).clamp(min=1.0, max=float(count))
    return k * torch.exp((k - 1) * torch.log(safe))


@normed_op(torch.cumprod).register_norm
def cumprod(input: RMSTensor, dim: int, dtype: torch.dtype | None = None) -> LinfTensor:
    """Running product along a dimension, by the largest entry n (an RMS norm is converted to it).

    Value:       max(n, n^T)                  (attained: constants)
    Sensitivity: max_k k n^(k-1), k = 1 .. T  (attained: constants, moved along themselves)
    """
    x, c = as_kind(input, LinfTensor, ())
    length = _length(input, dim)
    value = torch.maximum(x.norm_size, x.norm_size.pow(max(length, 1)))
    return LinfTensor(value, elem_dims=(), sensitivity={"input": largest_slope(x.norm_size, length) * c})


@normed_op(torch.logcumsumexp).register_norm
def logcumsumexp(input: RMSTensor, dim: int) -> RMSTensor:
    """log(e^x_1 + ... + e^x_i) for each position i.

    Value:       c n + log T, c as for `cummax`: 1 from the largest entry (attained: constants); over the dimension the RMS of
                 log i in the place of log T
    Sensitivity: c: the gradient is a mean of the positions so far    (attained where one of them outweighs the others)
    Source:      ``max_(j <= i) x_j <= y_i <= max_(j <= i) x_j + log i``
    """
    length = max(_length(input, dim), 1)
    spacing = math.log(length)
    if _is_over(input, dim):
        spacing = math.sqrt(math.fsum(math.log(i) ** 2 for i in range(1, length + 1)) / length)
    c = _picked(input, dim)
    return like(input, input.norm_size * c + spacing, sensitivity={"input": c})
