"""Norm rules for losses.  Targets are plain tensors, or normed ones where the loss is symmetric.

The output is a scalar (or one number for each sample), bounded in absolute value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm import elem_dims as ed
from thunder_norm.context import lift, run_real
from thunder_norm.errors import NormMismatchError
from thunder_norm.registry import normed_op
from thunder_norm.rules._pointwise import softplus_of
from thunder_norm.rules._shared import Constant, as_kind, broadcast, spread, times
from thunder_norm.tensors import L1Tensor, LinfTensor, RMSTensor


def _measured(t: torch.Tensor, arguments: dict[str, Any]) -> ed.Dims:
    """elem_dims for a plain operand: an average needs no more than its RMS over everything."""
    return () if arguments["reduction"] == "none" else tuple(range(-t.ndim, 0))


_LIFT = {"input": _measured, "target": _measured}


def _scalar(value: torch.Tensor, count: float, **sensitivity: Constant) -> LinfTensor:
    """The result of a loss summed `count` times (1: averaged, or not reduced)."""
    constants = {name: c if count == 1 else c * count for name, c in sensitivity.items()}
    return LinfTensor(times(value, count), elem_dims=(), sensitivity=constants)


def _count(reduction: str, samples: int) -> int:
    return samples if reduction == "sum" else 1


# -- classification -----------------------------------------------------------------------------------------------------------


def _class_dim(ndim: int) -> int:
    return -1 if ndim == 1 else 1 - ndim


@normed_op(F.cross_entropy).register_norm(allow_plain_tensors=True)
def cross_entropy(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> LinfTensor:
    """-log softmax(x)[y] over C classes; y are indices, or probabilities.

    input: the largest entry n, or RMS over the classes (other elem_dims are converted to that)
    Value:        log(1 + (C - 1) e^(2 n)), attained: all against y; from RMS with sqrt(2 C) n for 2 n (attained to 0.91)
    Sensitivity:  2 (1 - p) with p = 1 / (1 + (C - 1) e^(2 n)); from RMS sqrt(2 C) (1 - p)     (both attained for large n)
    Summed: times the number of samples.  Class weights multiply by the largest, unless averaged over indices (the weights are
    divided out); target probabilities by their largest sum.
    Source:       |p - e_y|_1 = 2 (1 - p_y), |p - e_y|_2 <= sqrt 2 (1 - p_y)
    """
    along = _class_dim(input.ndim)
    classes = input.shape[along]
    is_indices = not target.is_floating_point()
    x, c = as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d == along))
    # how far x_j - x_y can be, per |x|
    reach = math.sqrt(2) * spread(math.sqrt(classes)) if along in x.elem_dims else 2.0
    odds = x.norm_size * reach + math.log(max(classes - 1, 1))
    value, slope = softplus_of(odds), torch.sigmoid(odds) * reach
    if classes < 2:
        value, slope = torch.zeros_like(value), torch.zeros_like(slope)
    factor: Constant = _count(reduction, input.numel() // max(classes, 1))
    if weight is not None and not (reduction == "mean" and is_indices and label_smoothing == 0):
        if reduction == "mean" and is_indices:
            raise NormMismatchError("class weights together with label smoothing and reduction='mean' have no bound without data")
        factor = lift(weight, LinfTensor).norm_size * factor
    if not is_indices:
        mass = lift(target, L1Tensor, (along,)).norm_size * (1 - label_smoothing) + label_smoothing
        factor = mass * factor
    return LinfTensor(times(value, factor), elem_dims=(), sensitivity={"input": _product(slope, c, factor)})


def _product(*factors: Constant) -> Constant:
    result: Constant = 1.0
    for factor in factors:
        result = factor * result
    return result


@normed_op(F.nll_loss).register_norm(allow_plain_tensors=True)
def nll_loss(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> LinfTensor:
    """-x[y] of log probabilities x.  Value n and sensitivity 1 in the largest entry, attained; RMS is converted to it."""
    x, c = as_kind(input, LinfTensor, ())
    factor: Constant = _count(reduction, max(target.numel(), 1))
    if weight is not None and reduction != "mean":
        factor = lift(weight, LinfTensor).norm_size * factor
    return LinfTensor(times(x.norm_size, factor), elem_dims=(), sensitivity={"input": _product(factor, c)})


@normed_op(F.binary_cross_entropy_with_logits).register_norm(allow_plain_tensors=True)
def binary_cross_entropy_with_logits(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> LinfTensor:
    """-y log s(x) - (1 - y) log s(-x) for targets y in [0, 1].

    Value:       log(1 + e^n) for the largest entry and averaged over everything (attained); not averaged, from the largest entry
    Sensitivity: s(n) from the largest entry; 1 averaged from RMS; converted otherwise
    """
    if pos_weight is not None:
        raise NormMismatchError("binary_cross_entropy_with_logits with pos_weight has no rule")
    is_averaged = reduction == "mean" and weight is None
    x, c = (input, 1.0) if is_averaged else as_kind(input, LinfTensor, ())
    factor: Constant = _count(reduction, input.numel())
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    slope: Constant = torch.sigmoid(x.norm_size) if isinstance(x, LinfTensor) else 1.0
    value = softplus_of(x.norm_size)
    if not isinstance(x, LinfTensor):
        # softplus is 1-Lipschitz with value log 2 at 0, and a mean of moduli is at most the RMS
        value = x.norm_size + math.log(2)
    return LinfTensor(times(value, factor), elem_dims=(), sensitivity={"input": _product(factor, slope, c)})


# -- regression ---------------------------------------------------------------------------------------------------------------


def _difference(input: RMSTensor, target: RMSTensor, reduction: str) -> tuple[torch.Tensor, float, float, int]:
    """Bound on ``|a - b|``, the factors of both, and how often the loss is counted.

    Averaged, the RMS over everything is enough, and coarsening to it is free; otherwise each entry is bounded.
    """
    if reduction == "none":
        (a, to_a), (b, to_b) = as_kind(input, LinfTensor, ()), as_kind(target, LinfTensor, ())
        return a.norm_size + b.norm_size, to_a, to_b, 1
    return input.norm_size + target.norm_size, 1.0, 1.0, _count(reduction, math.prod(broadcast(input.shape, target.shape)))


@normed_op(F.mse_loss).register_norm(lift_dims=_LIFT)
def mse_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean") -> LinfTensor:
    """(a - b)^2.  Averaged: value (|a| + |b|)^2, sensitivities 2 (|a| + |b|), attained by a = -b along themselves.

    Summed: times the number of entries.  Not reduced: from the largest entries.
    """
    d, ca, cb, count = _difference(input, target, reduction)
    return _scalar(d.square(), count, input=d * (2 * ca), target=d * (2 * cb))


@normed_op(F.l1_loss).register_norm(lift_dims=_LIFT)
def l1_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean") -> LinfTensor:
    """|a - b|.  Averaged: value |a| + |b|, sensitivities 1: a mean of moduli is at most the RMS.  Summed and not: `mse_loss`."""
    d, ca, cb, count = _difference(input, target, reduction)
    return _scalar(d, count, input=ca, target=cb)


def _huber(d: torch.Tensor, delta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """h(d) = d^2 / 2 up to delta, then delta (d - delta / 2), and its slope."""
    inside = d.clamp(max=delta)
    return inside.square() / 2 + (d - inside) * delta, inside


@normed_op(F.huber_loss).register_norm(lift_dims=_LIFT)
def huber_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean", delta: float = 1.0) -> LinfTensor:
    """h(a - b), h(t) = t^2 / 2 up to delta, then delta (|t| - delta / 2).

    Value:       averaged h(|a| + |b|), attained by constants; summed: times the number of entries
    Sensitivity: min(delta, |a| + |b|)
    Source:      h(sqrt t) is concave, and the slope is at most min(delta, |t|) in RMS
    """
    d, ca, cb, count = _difference(input, target, reduction)
    value, slope = _huber(d, delta)
    return _scalar(value, count, input=slope * ca, target=slope * cb)


@normed_op(F.smooth_l1_loss).register_norm(lift_dims=_LIFT)
def smooth_l1_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean", beta: float = 1.0) -> LinfTensor:
    """`huber_loss` with delta = beta, divided by beta; `l1_loss` for beta = 0."""
    if beta == 0:
        return l1_loss(input, target, reduction)
    d, ca, cb, count = _difference(input, target, reduction)
    value, slope = _huber(d, beta)
    return _scalar(value / beta, count, input=slope * (ca / beta), target=slope * (cb / beta))


@normed_op(F.kl_div).register_norm(allow_plain_tensors=True)
def kl_div(input: RMSTensor, target: torch.Tensor, reduction: str = "mean", log_target: bool = False) -> LinfTensor:
    """Sum of p (log p - x) for log probabilities x and a plain target p, whose rows are measured.

    Value:       P n + H for the largest entry n of x, the largest row sum P of p and of H of |p log p|; averaged over the batch
    Sensitivity: P
    Source:      linear in x with weights p
    """
    if reduction not in ("batchmean", "sum", "mean"):
        raise NormMismatchError("kl_div without reduction has no rule")
    p = run_real(torch.exp, (target,), {}) if log_target else target
    mass = lift(p, L1Tensor, (-1,)).norm_size
    entropy = lift(run_real(torch.xlogy, (p, p), {}), L1Tensor, (-1,)).norm_size
    x, c = as_kind(input, LinfTensor, ())
    rows = input.numel() // max(input.shape[-1], 1)
    count = {"batchmean": rows / max(input.shape[0], 1), "sum": rows, "mean": rows / max(input.numel(), 1)}[reduction]
    value = mass * x.norm_size + entropy
    return LinfTensor(value * count, elem_dims=(), sensitivity={"input": mass * (c * count)})
