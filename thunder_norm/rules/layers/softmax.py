"""Softmax and its relatives.

Logits are bounded in their largest entry; a probability vector's norm is its sum.  A mask needs no kind of its own: adding a
plain mask, or filling with -inf, makes the logits' size what it then is, the mask's, up to inf.  No claim of `softmax` reads
it: any mask leaves a softmax over the other positions, of L1 norm 1 and with the same Lipschitz constant in the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import distances
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.rules import _local
from thunder_norm.rules._shared import Constant, dims_tuple, negative, refined, rms
from thunder_norm.rules.linear_algebra.logits import typical_softmax_gain


def _elements_along(input: RMSTensor, dim: int) -> int:
    """How many elements of `dim` the norm runs over: all of them or, if it is a maximum there, one."""
    return input.shape[dim] if dim in input.elem_dims else 1


def _softmax(input: RMSTensor, dim: int, of_negative: bool = False) -> L1Tensor:
    dim = negative(dim, input.ndim)
    # from RMS over dim, |J|_(2 -> 1) <= 1 / sqrt(2) and Cauchy-Schwarz; otherwise through the largest entry
    is_length = _elements_along(input, dim) > 1
    constant: Constant = refined(input, ()) * (math.sqrt(0.5) if is_length else 1.0)
    if (near := distances(input)) is not None and input.ndim and input.shape[dim] > 1:
        of_entries, of_length = _local.softmax(input, dim, of_negative, *near)
        constant = refined(input, ()) * (of_length.clamp(max=math.sqrt(0.5)) if is_length else of_entries)
    if input.ndim == 0 or input.shape[dim] <= 1:
        constant = 0.0
    elif current_mode() == "typical":
        constant = constant * typical_softmax_gain(input, dim)
    return L1Tensor(bounded(1.0, input.norm_size), elem_dims=(dim,) if input.ndim else (), sensitivity={"input": constant})


@normed_op(F.softmax).register_norm
def softmax(input: RMSTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> L1Tensor:
    """p = exp(x) / sum exp(x) over `dim`.

    input: any shape, largest entry (Linf), or RMS converted to it;  output: L1 over `dim`
    Value:        1   (an equality)
    Sensitivity:  1 from Linf, attained where a set S of positions has half the weight: |J|_(inf -> 1) = 4 P(S) (1 - P(S));
                  sqrt(N / 2) from RMS over the N elements of `dim`, attained where two positions have it all:
                  |J|_(2 -> 1)^2 = 4 (1 - P)^2 sum_S p^2 + 4 P^2 sum_not_S p^2 <= 1/2
    Typical:      of `Scores` twice `softmax_gain`, else 1
    Local:        4 p (1 - p) where one position has p > 1/2;  2 |p|_2 sqrt(N) from RMS
    """
    return _softmax(input, dim)


@normed_op(F.softmin).register_norm
def softmin(input: RMSTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> L1Tensor:
    """Softmax of -x: the same norms."""
    return _softmax(input, dim, of_negative=True)


@normed_op(torch.ops.aten._softmax.default).register_norm
def _softmax_aten(input: RMSTensor, dim: int, half_to_float: bool) -> L1Tensor:
    """`softmax` as ATen names it."""
    return _softmax(input, dim)


@normed_op(torch.ops.aten._safe_softmax.default).register_norm
def _safe_softmax(input: RMSTensor, dim: int, dtype: torch.dtype | None = None) -> L1Tensor:
    """`softmax`, and 0 for rows that are masked everywhere."""
    return _softmax(input, dim)


def _log_softmax(input: RMSTensor, dim: int) -> LinfTensor:
    dim = negative(dim, input.ndim)
    if input.ndim == 0 or input.shape[dim] <= 1:
        return LinfTensor(spoiled(torch.zeros_like(input.norm_size), input.norm_size), sensitivity={"input": 0})  # x - x
    # how far x_j - x_i can be, per |x|: 2 between largest entries, sqrt(2) times the Euclidean length
    reach = refined(input, ()) * (math.sqrt(2) if _elements_along(input, dim) > 1 else 2)
    odds = input.norm_size * reach + math.log(input.shape[dim] - 1)
    return LinfTensor(F.softplus(odds, threshold=700.0), sensitivity={"input": torch.sigmoid(odds) * reach})


@normed_op(F.log_softmax).register_norm
def log_softmax(input: RMSTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> LinfTensor:
    """y = x - log sum exp(x) over `dim` of N elements.

    input: largest entry n, or RMS converted to it;  output: largest entry
    Value:        log(1 + (N - 1) e^(2 n))                    (attained: one entry -n, the others n)
    Sensitivity:  2 (1 - 1 / (1 + (N - 1) e^(2 n))) < 2       (attained there: |e_i - p|_1)
    From RMS over `dim` the same with sqrt(2 N) n for 2 n and sqrt(2 N) for 2: |e_i - p|_2 <= sqrt(2) (1 - p_i), attained as
    n grows, when two entries compete.
    """
    return _log_softmax(input, dim)


@normed_op(torch.ops.aten._log_softmax.default).register_norm
def _log_softmax_aten(input: RMSTensor, dim: int, half_to_float: bool) -> LinfTensor:
    """`log_softmax` as ATen names it."""
    return _log_softmax(input, dim)


@normed_op(torch.logsumexp).register_norm
def logsumexp(input: RMSTensor, dim: Any, keepdim: bool = False) -> RMSTensor:
    """y = log sum exp(x) over `dim` of N elements.

    input: largest entry, or RMS over E;  output: RMS over the dimensions of E that are left
    Value:        |x|_inf + log N                        (attained: constant x)
    Sensitivity:  1 from Linf, sqrt(N) from RMS over dim  (the gradient is a probability vector; attained at a one-hot limit)
    """
    reduced = dims_tuple(dim, input.ndim)
    inside = [d for d in input.elem_dims if d in reduced]
    # the largest entry over dimensions outside of E may sit elsewhere for every element of E: then all of E is given up
    kept = input.elem_dims if set(ed.nontrivial(input.shape, reduced)) <= set(input.elem_dims) else ()
    kept = tuple(d for d in kept if d not in inside)
    c = refined(input, kept)
    value = input.norm_size * c + math.log(max(ed.numel(input.shape, reduced), 1))
    return rms(value, ed.reduce(kept, reduced, input.ndim, keepdim), sensitivity={"input": c})
