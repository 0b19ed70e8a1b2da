"""Norm rules for losses with margins and labels: hinges, soft margins, rankings, angles.

Labels are plain tensors.  As in torch, they are 1 and -1, class indices, or numbers in [0, 1], whichever the loss takes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift, run_real
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._local import data
from thunder_norm.rules._pointwise import softplus_of
from thunder_norm.rules._shared import Constant, as_kind, broadcast, spread, squarable
from thunder_norm.rules.loss_functions._loss import count, entries_or_mean, largest, loss, product, scalar_loss, unlikeliest


@loss(F.soft_margin_loss)
def soft_margin_loss(input: RMSTensor, target: torch.Tensor, reduction: str = "mean") -> LinfTensor:
    """log(1 + e^(-y x)), y at most m in modulus (its labels: m = 1).

    Value:       log(1 + e^(m n)), averaged from any RMS, not reduced from the largest entry     (attained: wrong everywhere)
    Sensitivity: m s(m n), s the logistic function                                              (attained likewise)
    Gap:         in a mean or sum the largest y counts for all entries
    Summed: times the number of entries.
    Source:      softplus(sqrt u) and s(sqrt u)^2 are concave, so equal entries are the worst
    """
    x, c = entries_or_mean(input, reduction)
    steepest = largest(target, x)
    odds = x.norm_size * steepest
    return scalar_loss(softplus_of(odds), count(reduction, input.numel()), input=product(torch.sigmoid(odds), steepest, c))


@loss(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> LinfTensor:
    """-y log s(x) - (1 - y) log s(-x), averaged over classes; w = max(|y| + |1 - y|), 1 for y in [0, 1].

    Value:       w log(1 + e^n) from the RMS over all entries, not reduced over the classes      (attained: wrong with certainty);
                 m times that where each class of x meets m entries of targets
    Sensitivity: w s(n)                                                                        (attained likewise)
    Gap:         weights count at their largest, and targets inside (0, 1) as if wrong with certainty, for all entries
    Summed: times the number of samples.  Class weights multiply by the largest.
    Source:      as `binary_cross_entropy_with_logits`
    """
    shape, along = broadcast(*(t.shape for t in (input, target, weight) if t is not None)), input.ndim - 1
    x, c = (
        (input, 1.0) if reduction != "none" else _over_classes(input) if shape == input.shape else as_kind(input, LinfTensor, ())
    )
    samples = math.prod(shape) // max(shape[along], 1)
    # torch divides what it sums over a dimension of all by the classes of the input
    factor: Constant = unlikeliest(target, x) * (count(reduction, samples) * shape[along] / max(input.shape[-1], 1))
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    return scalar_loss(softplus_of(x.norm_size), factor, input=product(torch.sigmoid(x.norm_size), c))


def _over_classes(input: RMSTensor) -> tuple[NormedTensor, float]:
    """The RMS over the last dimension, or the largest entry where that is known."""
    return as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d == -1))


@loss(F.multi_margin_loss)
def multi_margin_loss(
    input: RMSTensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
) -> LinfTensor:
    """Sum over the classes j != y of max(0, m - x_y + x_j)^p, divided by their number C; p is 1 or 2.

    Value:       from the largest entry (C - 1) / C (m + 2 n)^p; from RMS over the classes (C - 1) / C m + sqrt(C - 1) n for p = 1,
                 (sqrt(C - 1) m + C n)^2 / C for p = 2     (all attained: every other class against y)
    Sensitivity: from the largest entry 2 p (C - 1) / C (m + 2 n)^(p - 1); from RMS sqrt(C - 1) for p = 1,
                 2 (sqrt(C - 1) m + C n) for p = 2          (all attained likewise)
    Gap:         in a mean or sum the largest weight counts for all classes
    Summed: times the number of samples.  Class weights multiply by the largest.
    Source:      x -> (x_j - x_y)_j has the norm sqrt C from l2 to l2
    """
    classes = max(input.shape[-1] if input.ndim else 1, 1)
    x, c = _over_classes(input)
    n, m, others = x.norm_size, max(float(margin), 0.0), classes - 1
    if x.elem_dims:
        to_l2 = spread(math.sqrt(classes))
        slope: Constant = to_l2 * math.sqrt(others / classes)
        value = n * slope + others / classes * m
        if p == 2:
            reach = n * (to_l2 * math.sqrt(classes)) + math.sqrt(others) * m
            value, slope = reach.square() / classes, reach * (2 * to_l2 / math.sqrt(classes))
    else:
        reach = n * 2 + m
        value = reach**p * (others / classes)
        slope = 2 * others / classes if p == 1 else reach * (4 * others / classes)
    factor: Constant = count(reduction, input.numel() // classes)
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    return scalar_loss(value, factor, input=product(slope, c))


def _multilabel_margin(input: RMSTensor, target: torch.Tensor, reduction: str) -> LinfTensor:
    classes = max(input.shape[-1] if input.ndim else 1, 1)
    x, c = _over_classes(input)
    is_label = run_real(torch.Tensor.to, (run_real(torch.ge, (target, 0), {}), x.dtype), {})
    labels = lift(is_label, L1Tensor, (-1,) if target.ndim else ()).norm_size
    others = (classes - 1) / classes
    slope = math.sqrt(others) * spread(math.sqrt(classes)) if x.elem_dims else 2 * others
    value = (x.norm_size * slope + others) * labels
    return scalar_loss(value, count(reduction, input.numel() // classes), input=labels * (slope * c))


@loss(F.multilabel_margin_loss)
def multilabel_margin_loss(input: RMSTensor, target: torch.Tensor, reduction: str = "mean") -> LinfTensor:
    """Sum of max(0, 1 - x_y + x_j) over labels y and the classes j that are none, divided by the number C of classes.

    Value:       k (C - 1) / C (1 + 2 n) from the largest entry, k ((C - 1) / C + sqrt(C - 1) n) from RMS over the classes, with k
                 the largest number of labels of a sample    (attained: one label, or one class k times; k others: (C - k) / (C - 1))
    Sensitivity: 2 k (C - 1) / C, from RMS k sqrt(C - 1)
    Gap:         k different labels make k (C - k) pairs, not k (C - 1): how many of them differ depends on data
    Summed: times the number of samples.
    Source:      each label makes at most C - 1 pairs, as in `multi_margin_loss`
    """
    return _multilabel_margin(input, target, reduction)


@loss(torch.ops.aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(input: RMSTensor, target: torch.Tensor, reduction: str = "mean") -> tuple:
    """`multilabel_margin_loss`, and which classes are labels, as numbers 0 and 1.

    Gap:         as for `multilabel_margin_loss`; a sample has not only labels
    """
    return _multilabel_margin(input, target, reduction), LinfTensor(
        torch.ones_like(input.norm_size), elem_dims=(), sensitivity={"input": 0}
    )


@loss(F.hinge_embedding_loss)
def hinge_embedding_loss(input: RMSTensor, target: torch.Tensor, margin: float = 1.0, reduction: str = "mean") -> LinfTensor:
    """x where the label is 1, max(0, m - x) where it is -1.

    Value:       n + max(m, 0), averaged from any RMS, not reduced from the largest entry      (attained: -n, labels -1, m >= 0)
    Sensitivity: 1
    Gap:         in a mean or sum both labels count as the worse one
    Summed: times the number of entries.
    """
    x, c = entries_or_mean(input, reduction)
    counted = count(reduction, math.prod(broadcast(input.shape, target.shape)))
    return scalar_loss(x.norm_size + max(float(margin), 0.0), counted, input=c)


@loss(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: RMSTensor, input2: RMSTensor, target: torch.Tensor, margin: float = 0.0, reduction: str = "mean"
) -> LinfTensor:
    """max(0, m - y (a - b)) for labels y, at most t in modulus (1 and -1: t = 1).

    Value:       t (|a| + |b|) + max(m, 0), averaged from any RMS, not reduced from the largest entries     (attained: a = -b)
    Sensitivity: t to each
    Gap:         in a mean or sum a margin below 0 is subtracted only where labels of both signs reach it
    Summed: times the number of entries.
    """
    (a, to_a), (b, to_b) = entries_or_mean(input1, reduction), entries_or_mean(input2, reduction)
    steepest = largest(target, a)
    value = (a.norm_size + b.norm_size) * steepest + max(float(margin), 0.0)
    counted = count(reduction, math.prod(broadcast(input1.shape, input2.shape, target.shape)))
    return scalar_loss(value, counted, input1=product(steepest, to_a), input2=product(steepest, to_b))


@loss(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: RMSTensor,
    positive: RMSTensor,
    negative: RMSTensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> LinfTensor:
    """max(0, m + |a - p| - |a - n|) with distances in the l_p norm of D elements; `swap`: |p - n| for |a - n| if it is smaller.

    Value:       m + c min(|p| + |n|, |a| + |p|), c = D^(1/p), from RMS and for p > 2 D^(1/2); swapped |p| + |n| becomes
                 max(|p|, |a|) + |n|       (attained: n = a, against p; if swapped to 0.6)
    Sensitivity: 2 c to a, c to p and n; swapped 2 c to p as well       (attained: a between the others)
    Gap:         swapped, three points cannot be as far apart as the norms of each allow
    Summed: times the number of samples.
    Source:      triangle inequality.  torch adds eps to each difference, which a difference of distances from one point does not see
    Raises NormMismatchError for p < 1.
    """
    if p < 1:
        raise NormMismatchError(f"p = {p} is no norm: there is no triangle inequality")
    given = {"anchor": anchor, "positive": positive, "negative": negative}
    size = max(broadcast(*(x.shape for x in given.values()))[-1:] or (1,)) or 1
    n, c, of_eps = {}, {}, eps * size ** (1 / p)
    for name, x in given.items():
        over, to_over = as_kind(x, RMSTensor, (-1,)) if x.elem_dims else (x, 1.0)
        c[name] = to_over * (spread(size ** max(1 / p, 0.5)) if over.elem_dims else size ** (1 / p))
        n[name] = x.norm_size * c[name]
    to_other = torch.maximum(n["positive"], n["anchor"]) + 2 * of_eps if swap else n["positive"]
    nearer = torch.minimum(to_other + n["negative"], n["anchor"] + n["positive"] + of_eps)
    value = spoiled(nearer, n["anchor"] + n["negative"]) + max(float(margin), 0.0)
    samples = math.prod(broadcast(*(x.shape[:-1] for x in given.values())))
    twice = {"anchor": 2.0, "positive": 2.0 if swap else 1.0, "negative": 1.0}
    return scalar_loss(value, count(reduction, samples), **{name: c[name] * twice[name] for name in given})


_COSINE_EPS = 1e-12  # added to both squared lengths, in aten's code


def _shortest(x: RMSTensor) -> torch.Tensor:
    """The square of the least length of x's rows."""
    return data(x).square().sum(-1).amin().to(x.norm_size.dtype)


def _unit(length: torch.Tensor) -> torch.Tensor:
    """``r / sqrt(r^2 + eps)``."""
    within = squarable(length)
    return spoiled(within * (within.square() + _COSINE_EPS).rsqrt(), length)


@loss(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: RMSTensor, input2: RMSTensor, target: torch.Tensor, margin: float = 0.0, reduction: str = "mean"
) -> LinfTensor:
    """1 - cos(a, b) where the label is 1, max(0, cos(a, b) - m) where it is -1, over the last dimension, of D elements.

    Value:       max(1 + c, c - m), c = u(|a|) u(|b|) < 1 the largest cosine, u(r) = r / sqrt(r^2 + 1e-12) for l2 norms r
                 (attained: a = -b); sqrt(D) times that where one of them is a single number, whose length is not that of D copies
    Sensitivity: sqrt(D) 1e6 u(|b|) to a, as to b: the direction of a vector next to 0 turns at once      (attained there)
    Local:       1 / sqrt(r^2 + 1e-12) in place of 1e6, r the shortest of its rows
    Gap:         the slope is that next to 0, in a ball of radius 1e-6, and in a mean or sum labels count as the worse one
    Summed: times the number of samples.
    Source:      a / sqrt(|a|^2 + eps) is 1 / sqrt(eps)-Lipschitz; the slopes of both cases in the cosine are -1, 1 or 0
    """
    (a, to_a), (b, to_b) = (as_kind(t, RMSTensor, (-1,)) if t.elem_dims else (t, 1.0) for t in (input1, input2))
    size = broadcast(input1.shape, input2.shape)[-1]
    roots = [math.sqrt(max(t.shape[-1], 1)) for t in (input1, input2)]
    of_a, of_b = (_unit(t.norm_size * r) for t, r in zip((a, b), roots, strict=True))
    copied = math.prod([math.sqrt(size) / r for r in roots if r < math.sqrt(size)])
    shortest = [_shortest(t) if is_local(t) else 0.0 for t in (input1, input2)]
    to_a, to_b = (
        copied * r * to * (_COSINE_EPS + square) ** -0.5 for r, to, square in zip(roots, (to_a, to_b), shortest, strict=True)
    )
    value = copied * of_a * of_b + max(1.0, -float(margin))
    samples = math.prod(broadcast(input1.shape[:-1], input2.shape[:-1], target.shape))
    return scalar_loss(value, count(reduction, samples), input1=product(of_b, to_a), input2=product(of_a, to_b))
