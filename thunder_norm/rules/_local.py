"""Sensitivities at the data at hand, where no constant for all tensors of a norm is of use.

Each function here gives the norm of the Jacobian at one input, or a bound on it, from the backing; the rules take the smaller of it
and their global constant.  The data is a constant here: a local sensitivity is a function of norm sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.core.within import distances_of_groups
from thunder_norm.rules._shared import refined


def exp(x: float) -> float:
    """The exponential; of what has none, infinity."""
    return math.exp(x) if x < 700 else math.inf


def data(x: NormedTensor) -> torch.Tensor:
    """The backing as a constant, in single precision at least."""
    t = x.backing.detach()
    return t.float() if t.dtype.itemsize < 4 else t


def smallest_mean_square(x: NormedTensor, dims: ed.Dims, is_centred: bool, groups: int, distance: float) -> torch.Tensor:
    """Smallest ``mean x^2`` of a group, x minus its mean if `is_centred`: there a normalization's Jacobian is largest.

    `distance` is how far x may be from the data, in its norm, an RMS: a group's is then less by that in the group, or by what is known of the
    group's own entries.

    The Jacobian is ``(P - x x^T / (N (r^2 + eps))) / sqrt(r^2 + eps)`` with a projection P, of norm ``1 / sqrt(r^2 + eps)`` if there is a
    direction orthogonal to x.
    """
    t = data(x)
    over = tuple(d % t.ndim for d in dims)
    if groups > 1:  # group_norm: dims are the channels and all positions
        t = t.reshape(*t.shape[: over[0]], groups, -1)
        over = (t.ndim - 1,)
    if is_centred:
        t = t - t.mean(over, keepdim=True)
    found = t.square().mean(over).to(NORM_DTYPE)
    if not distance:
        return found.amin()
    moved = found.new_tensor(distance * refined(x, dims) * math.sqrt(groups))
    of_groups = distances_of_groups(x, dims) if groups == 1 else None
    if of_groups is not None:
        moved = torch.minimum(moved, of_groups.to(moved.device) / math.sqrt(ed.numel(x.shape, dims)))
    return (found.sqrt() - moved).clamp(min=0).amin().square()


def softmax(x: NormedTensor, dim: int, of_negative: bool, distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of softmax's Jacobian, of x or -x, the worst row's, from Linf to L1 and from L2 to L1; a row that is masked whole has none.

    ``max_S 4 P(S) (1 - P(S))``, which is ``4 p (1 - p)`` if one position has p >= 1/2, else at most 1;
    ``|J|_(2 -> 1) = max_s |p (s - p.s)|_2 <= 2 |p|_2`` over signs s.
    Where each entry moves by a at most, `distance` in x's norm, an odds ``p / (1 - p)`` changes by a factor of ``exp(2 a)``, and so does p.
    """
    p = (-data(x) if of_negative else data(x)).softmax(dim).nan_to_num(nan=0.0)
    grown = exp(2 * distance * refined(x, ()))
    largest = p.amax(dim)
    least = largest / (largest + (1 - largest) * grown)
    of_entries = torch.where(least > 0.5, 4 * least * (1 - least), torch.ones_like(largest))
    length = 2 * p.square().sum(dim).sqrt() * grown
    return of_entries.amax().to(NORM_DTYPE), length.amax().to(NORM_DTYPE)


def slope(x: NormedTensor, derivative: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Largest ``|f'|`` at an entry: the Jacobian of a function of each entry is diagonal."""
    return derivative(data(x)).abs().amax().to(NORM_DTYPE)


def beside_jumps(x: NormedTensor, slope: float, distance: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The slope of a function of each entry between its jumps, `distance` away from the nearest one; infinite where an entry is at one."""
    is_at_jump = (distance(data(x)) == 0).any()
    return torch.where(is_at_jump, math.inf, slope).to(NORM_DTYPE)
