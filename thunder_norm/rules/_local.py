"""Sensitivities at the data at hand, where no constant for all tensors of a norm is of use.

Each function here gives the norm of the Jacobian at one input, or a bound on it, from the backing; the rules take the smaller of it
and their global constant.  The data is a constant here: a local sensitivity is a function of norm sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor

_TINY = 1e-30


def data(x: NormedTensor) -> torch.Tensor:
    """The backing as a constant, in single precision at least."""
    t = x.backing.detach()
    return t.float() if t.dtype.itemsize < 4 else t


def smallest_mean_square(x: NormedTensor, dims: ed.Dims, is_centred: bool, groups: int) -> torch.Tensor:
    """Smallest ``mean x^2`` of a group, x minus its mean if `is_centred`: there a normalization's Jacobian is largest.

    It is ``(P - x x^T / (N (r^2 + eps))) / sqrt(r^2 + eps)`` with a projection P, of norm ``1 / sqrt(r^2 + eps)`` if there is a
    direction orthogonal to x.
    """
    t = data(x)
    over = tuple(d % t.ndim for d in dims)
    if groups > 1:  # group_norm: dims are the channels and all positions
        t = t.reshape(*t.shape[: over[0]], groups, -1)
        over = (t.ndim - 1,)
    if is_centred:
        t = t - t.mean(over, keepdim=True)
    return t.square().mean(over).amin().to(NORM_DTYPE)


def softmax(x: NormedTensor, dim: int, of_negative: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of softmax's Jacobian, of x or -x, the worst row's, from Linf to L1 and from L2 to L1; a row that is masked whole has none.

    ``max_S 4 P(S) (1 - P(S))``, which is ``4 p (1 - p)`` if one position has p >= 1/2, else at most 1;
    ``|J|_(2 -> 1) = max_s |p (s - p.s)|_2 <= 2 |p|_2`` over signs s.
    """
    p = (-data(x) if of_negative else data(x)).softmax(dim).nan_to_num(nan=0.0)
    largest = p.amax(dim)
    of_entries = torch.where(largest > 0.5, 4 * largest * (1 - largest), torch.ones_like(largest))
    length = 2 * p.square().sum(dim).sqrt()
    return of_entries.amax().to(NORM_DTYPE), length.amax().to(NORM_DTYPE)


def slope(x: NormedTensor, derivative: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Largest ``|f'|`` at an entry: the Jacobian of a function of each entry is diagonal."""
    return derivative(data(x)).abs().amax().to(NORM_DTYPE)


@dataclass(frozen=True)
class AttentionSlopes:
    """Sensitivities of attention to its arguments, both ends in RMS over features and `heads`, the worst token's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    heads: ed.Dims,
) -> AttentionSlopes:
    """Sensitivities of ``y_i = sum_j p_ij v_j`` at these queries, keys and values, s the scale, h over `heads` (dims before -2).

    ``dy_i = s Cov_p(v, k) dq_i``, hence ``s |Cov_p(v, k)|_2``, the largest over heads: the map is diagonal in them.
    ``dy_i = s sum_j p_ij (v_j - y_i) (q_i . dk_j)``: with ``b_ij = p_ij |v_j - y_i|``, by Cauchy-Schwarz over j in each head,
    ``s (sum_j max_h |q_hi|^2 (sum_l b_hil) b_hij)^(1/2)``; and ``(sum_j max_h p_hij)^(1/2)`` by Jensen to the values.
    The spectral norm of a d x d covariance C is bounded by ``|(C^T C)^2|_F^(1/4)``, at most d^(1/8) too large.
    Memory: tokens x (d^2 + tokens) for each head; time: tokens^2 x d^2.
    """
    p = _weights(query, key, bias, is_causal, scale)
    y = p @ value
    outer = (value.unsqueeze(-1) * key.unsqueeze(-2)).flatten(-2)
    means = (y.unsqueeze(-1) * (p @ key).unsqueeze(-2)).flatten(-2)
    covariance = (p @ outer - means).unflatten(-1, (value.shape[-1], key.shape[-1]))
    squares = value.square().sum(-1).unsqueeze(-2) - 2 * (y @ value.transpose(-1, -2)) + y.square().sum(-1, keepdim=True)
    moved = p * squares.clamp(min=0).sqrt()
    of_key = query.square().sum(-1, keepdim=True) * moved.sum(-1, keepdim=True) * moved
    found = (
        scale * _spectral_bound(covariance).amax(),
        scale * _largest_over(of_key, heads).sum(-1).amax().sqrt(),
        _largest_over(p, heads).sum(-1).amax().sqrt(),
    )
    return AttentionSlopes(*(t.to(NORM_DTYPE) for t in found))


def _weights(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float) -> torch.Tensor:
    scores = scale * (query @ key.transpose(-1, -2))
    if bias is not None:
        scores = torch.where(bias, scores, -math.inf) if bias.dtype == torch.bool else scores + bias
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    # a row that sees nothing has no weights
    return scores.softmax(-1).nan_to_num(nan=0.0)


def _largest_over(t: torch.Tensor, dims: ed.Dims) -> torch.Tensor:
    return t.amax(dims) if dims else t


def _spectral_bound(matrices: torch.Tensor) -> torch.Tensor:
    frobenius = matrices.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=_TINY)
    unit = matrices / frobenius
    gram = unit.transpose(-1, -2) @ unit
    return (gram @ gram).square().sum((-2, -1)).sqrt().sqrt().sqrt() * frobenius[..., 0, 0]
