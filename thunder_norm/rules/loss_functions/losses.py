"""Norm rules for losses.  Targets are plain tensors, or normed ones where the loss is symmetric.

The output is a scalar (or one number for each sample), bounded in absolute value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift, run_real, values_of
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import at_data
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import Lowered, fact
from thunder_norm.rules._pointwise import softplus_of
from thunder_norm.rules._shared import Constant, as_kind, broadcast, spread
from thunder_norm.rules.loss_functions._loss import count, entries_or_mean, loss, measured, product, scalar_loss, unlikeliest

_LIFT = {"input": measured, "target": measured}


# -- classification -----------------------------------------------------------------------------------------------------------


def class_dim(ndim: int) -> int:
    """Where the classes are."""
    return -1 if ndim == 1 else 1 - ndim


def _unmasked(input: RMSTensor, target: torch.Tensor, along: int) -> RMSTensor:
    """Logits without those set aside (numbers that are not positive): with 0 there no loss is smaller, unless an index is one of them."""
    found = fact(input, Lowered)
    if found is None:
        return input
    mask, indices = values_of(found.mask), values_of(target)
    if isinstance(mask, NormedTensor) or mask.is_meta or indices.is_meta:
        return input
    shown = run_real(torch.Tensor.expand, (mask, input.shape), {})
    at = run_real(torch.unsqueeze, (run_real(torch.clamp, (indices,), {"min": 0}), along), {})
    is_hit = run_real(torch.any, (run_real(torch.gather, (shown, along, at), {}),), {})
    before = at_data(found.x.tensor())
    before.norm_size = torch.where(is_hit, input.norm_size, before.norm_size + bounded(0.0, input.norm_size))
    return before


def furthest_from_a_class(input: RMSTensor, along: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The largest -log softmax(x)[y] there can be of logits, how far it moves with them, and how much their norm was converted by."""
    classes = input.shape[along]
    x, c = as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d == along))
    # how far x_j - x_y can be, per |x|
    reach = math.sqrt(2) * spread(math.sqrt(classes)) if along in x.elem_dims else 2.0
    odds = x.norm_size * reach + math.log(max(classes - 1, 1))
    value, slope = softplus_of(odds), torch.sigmoid(odds) * reach
    if classes < 2:
        value, slope = value - value, torch.zeros_like(slope)
    return value, slope, c


@loss(F.cross_entropy, torch.ops.aten.cross_entropy_loss.default)
def cross_entropy(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> LinfTensor:
    """-log softmax(x)[y] over C classes; y are indices, or probabilities.

    input: the largest entry n, or RMS over the classes (other elem_dims are converted to that)
    Value:        log(1 + (C - 1) e^(2 n)), attained: all against y; from RMS with sqrt(2 C) n for 2 n (attained to 0.91)
    Sensitivity:  2 (1 - p) with p = 1 / (1 + (C - 1) e^(2 n)); from RMS sqrt(2 C) (1 - p)     (both attained for large n)
    Gap:         from RMS the logits that are the worst for the loss are not those that are for their norm; probabilities,
                 smoothing and weights count at their largest for all samples
    Logits that are set aside (minus infinity) count as they were before, where no index is one of them.
    Summed: times the number of samples.  Class weights multiply by the largest, unless averaged over indices (the weights are
    divided out); target probabilities by their largest sum.
    Source:       |p - e_y|_1 = 2 (1 - p_y), |p - e_y|_2 <= sqrt 2 (1 - p_y)
    """
    along = class_dim(input.ndim)
    classes = input.shape[along]
    is_indices = not target.is_floating_point()
    if is_indices and label_smoothing == 0:
        input = _unmasked(input, target, along)
    value, slope, c = furthest_from_a_class(input, along)
    factor: Constant = count(reduction, input.numel() // max(classes, 1))
    if weight is not None and not (reduction == "mean" and is_indices and label_smoothing == 0):
        if reduction == "mean" and is_indices:
            raise NormMismatchError("class weights together with label smoothing and reduction='mean' have no bound without data")
        factor = lift(weight, LinfTensor).norm_size * factor
    if not is_indices:
        mass = lift(target, L1Tensor, (along,)).norm_size * (1 - label_smoothing) + label_smoothing
        factor = mass * factor
    return scalar_loss(value, factor, input=product(slope, c))


_NLL = torch.ops.aten


@loss(F.nll_loss, _NLL.nll_loss_nd.default, _NLL.nll_loss2d.default)
def nll_loss(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> LinfTensor:
    """-x[y] of log probabilities x.  Value n and sensitivity 1 in the largest entry, attained; RMS is converted to it.

    Gap:         weights count at their largest for all samples
    """
    x, c = as_kind(input, LinfTensor, ())
    factor: Constant = count(reduction, max(target.numel(), 1))
    if weight is not None and reduction != "mean":
        factor = lift(weight, LinfTensor).norm_size * factor
    return scalar_loss(x.norm_size, factor, input=c)


@loss(_NLL.nll_loss_forward.default, _NLL.nll_loss2d_forward.default)
def nll_loss_forward(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> tuple:
    """`nll_loss`, and the sum of the weights, which is plain."""
    return nll_loss(input, target, weight, reduction, ignore_index), None


@loss(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: RMSTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> LinfTensor:
    """-p y log s(x) - (1 - y) log s(-x), p `pos_weight` or 1; w = max(1, p) max(|y| + |1 - y|), for y in [0, 1] the first.

    Value:       w log(1 + e^n), averaged from any RMS, not reduced from the largest entry   (attained: wrong with certainty)
    Sensitivity: w s(n)                                                                      (attained likewise)
    Gap:         weights count at their largest, and targets inside (0, 1) as if wrong with certainty, for all entries
    Summed: times the number of entries.  Weights multiply by the largest.
    Source:      loss <= w softplus(|x|), slope <= w s(|x|); softplus(sqrt u) and s(sqrt u)^2 are concave
    """
    x, c = entries_or_mean(input, reduction)
    factor: Constant = unlikeliest(target, x) * count(reduction, input.numel())
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    if pos_weight is not None:
        factor = lift(pos_weight, LinfTensor).norm_size.clamp(min=1.0) * factor
    n = x.norm_size
    return scalar_loss(softplus_of(n), factor, input=product(torch.sigmoid(n), c))


@loss(F.binary_cross_entropy_with_logits, lift_dims=_LIFT, when=lambda args: isinstance(args["target"], NormedTensor))
def binary_cross_entropy_of_normed_labels(
    input: RMSTensor,
    target: RMSTensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> LinfTensor:
    """log(1 + e^x) - y x + (p - 1) y log(1 + e^-x), for labels y of norm m, any numbers; p is `pos_weight` or 1, q = max |p - 1|.

    Value:       log(1 + e^n) + n m, averaged from any RMS of each, not reduced from the largest entries
                 (attained: all entries n, all labels -m); with p besides q m (n + log 2)
    Sensitivity: s(n) + m (1 + q) to x; n + q (n + log 2) to y     (attained likewise for p = 1)
    Gap:         weights count at their largest for all entries, and log(1 + e^-x) as |x| + log 2
    Summed: times the number of entries.  Weights multiply by the largest.
    Source:      softplus(sqrt u) and s(sqrt u)^2 are concave; the mean of |x y| is at most the product of their RMS
    """
    (x, cx), (y, cy) = entries_or_mean(input, reduction), entries_or_mean(target, reduction)
    n, m = x.norm_size, y.norm_size
    value, to_x, to_y = softplus_of(n) + n * m, torch.sigmoid(n) + m, n
    if pos_weight is not None:
        q = lift(run_real(torch.sub, (pos_weight, 1.0), {}), LinfTensor).norm_size
        reach = n + math.log(2)
        value, to_x, to_y = value + q * m * reach, to_x + q * m, to_y + q * reach
    factor: Constant = count(reduction, input.numel())
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    return scalar_loss(value, factor, input=product(to_x, cx), target=product(to_y, cy))


# -- regression ---------------------------------------------------------------------------------------------------------------


def _difference(
    input: RMSTensor, target: RMSTensor, reduction: str, weight: torch.Tensor | None = None, divided_out: bool = True
) -> tuple[torch.Tensor, float, float, Constant]:
    """Bound on ``|a - b|``, the factors of both, and how often the loss is counted.

    Averaged, the RMS over everything is enough, and coarsening to it is free; otherwise each entry is bounded.  Weights
    multiply by the largest; those that are `divided_out` of an average (not negative) make it one of unequal parts, no larger than
    the largest.
    """
    times_counted: Constant = count(reduction, math.prod(broadcast(input.shape, target.shape)))
    is_unequal = weight is not None and reduction == "mean" and divided_out
    if weight is not None and not is_unequal:
        times_counted = lift(weight, LinfTensor).norm_size * times_counted
    if reduction == "none" or is_unequal:
        (a, to_a), (b, to_b) = as_kind(input, LinfTensor, ()), as_kind(target, LinfTensor, ())
        return a.norm_size + b.norm_size, to_a, to_b, times_counted
    return input.norm_size + target.norm_size, 1.0, 1.0, times_counted


@loss(F.mse_loss, lift_dims=_LIFT)
def mse_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean", weight: torch.Tensor | None = None) -> LinfTensor:
    """(a - b)^2.  Averaged: value (|a| + |b|)^2, sensitivities 2 (|a| + |b|), attained by a = -b along themselves.

    Summed: times the number of entries.  Not reduced: from the largest entries.
    """
    d, ca, cb, factor = _difference(input, target, reduction, weight)
    return scalar_loss(d.square(), factor, input=d * (2 * ca), target=d * (2 * cb))


@loss(F.l1_loss, lift_dims=_LIFT)
def l1_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean", weight: torch.Tensor | None = None) -> LinfTensor:
    """|a - b|.  Averaged: value |a| + |b|, sensitivities 1: a mean of moduli is at most the RMS.  Summed and not: `mse_loss`."""
    d, ca, cb, factor = _difference(input, target, reduction, weight)
    return scalar_loss(d, factor, input=ca, target=cb)


def _huber(d: torch.Tensor, delta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """h(d) = d^2 / 2 up to delta, then delta (d - delta / 2), and its slope."""
    inside = d.clamp(max=delta)
    return inside.square() / 2 + (d - inside) * delta, inside


@loss(F.huber_loss, lift_dims=_LIFT)
def huber_loss(
    input: RMSTensor, target: RMSTensor, reduction: str = "mean", delta: float = 1.0, weight: torch.Tensor | None = None
) -> LinfTensor:
    """h(a - b), h(t) = t^2 / 2 up to delta, then delta (|t| - delta / 2).

    Value:       averaged h(|a| + |b|), attained by constants; summed: times the number of entries
    Sensitivity: min(delta, |a| + |b|)
    Source:      h(sqrt t) is concave, and the slope is at most min(delta, |t|) in RMS
    """
    d, ca, cb, factor = _difference(input, target, reduction, weight, divided_out=False)
    value, slope = _huber(d, delta)
    return scalar_loss(value, factor, input=slope * ca, target=slope * cb)


@loss(F.smooth_l1_loss, lift_dims=_LIFT)
def smooth_l1_loss(input: RMSTensor, target: RMSTensor, reduction: str = "mean", beta: float = 1.0) -> LinfTensor:
    """`huber_loss` with delta = beta, divided by beta; `l1_loss` for beta = 0."""
    if beta == 0:
        return l1_loss(input, target, reduction)
    d, ca, cb, factor = _difference(input, target, reduction)
    inside = d.clamp(max=beta)
    slope = inside / beta
    return scalar_loss(inside * slope / 2 + (d - inside), factor, input=slope * ca, target=slope * cb)


@loss(F.kl_div)
def kl_div(input: RMSTensor, target: torch.Tensor, reduction: str = "mean", *, log_target: bool = False) -> LinfTensor:
    """Sum of p (log p - x) for log probabilities x and a plain target p, whose rows are measured.

    Value:       P n + H for the largest entry n of x, the largest row sum P of p and H of |p log p|; averaged over the batch.
                 Not reduced: the same with the largest p and |p log p|
    Sensitivity: P
    Gap:         the row of the largest mass, and that of the largest |p log p|, count for all rows
    Source:      linear in x with weights p
    """
    p, shape = run_real(torch.exp, (target,), {}) if log_target else target, broadcast(input.shape, target.shape)
    p = p if p.shape == shape else run_real(torch.Tensor.expand, (p, shape), {})
    kind, dims = (LinfTensor, ()) if reduction == "none" or not shape else (L1Tensor, (-1,))
    mass = lift(p, kind, dims).norm_size
    entropy = lift(run_real(torch.xlogy, (p, p), {}), kind, dims).norm_size
    x, c = as_kind(input, LinfTensor, ())
    rows = math.prod(shape[:-1])
    samples = input.shape[0] if input.ndim else 1
    counted = {"batchmean": rows / max(samples, 1), "sum": rows, "mean": rows / max(math.prod(shape), 1), "none": 1}[reduction]
    return scalar_loss(mass * x.norm_size + entropy, counted, input=mass * c)
