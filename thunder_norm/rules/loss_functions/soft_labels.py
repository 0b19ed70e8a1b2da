"""Losses whose labels have norms: cross entropies of mixed or smoothed labels, and distances of a teacher's distributions.

F.cross_entropy(model(x), lam * y + (1 - lam) * y.flip(0))
F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean")
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import SoftmaxOf, fact
from thunder_norm.rules._shared import Constant, as_kind, broadcast, negative
from thunder_norm.rules.loss_functions._loss import count, loss, product, scalar_loss
from thunder_norm.rules.loss_functions.losses import class_dim, furthest_from_a_class
from thunder_norm.scalars import times


def _has_normed_labels(args: dict[str, Any]) -> bool:
    return isinstance(args["target"], NormedTensor)


@loss(F.cross_entropy, when=_has_normed_labels)
def cross_entropy_of_normed_labels(
    input: RMSTensor,
    target: RMSTensor | L1Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> LinfTensor:
    """-sum y log softmax(x) over C classes, for labels y of norm m, any numbers.

    input: as in `cross_entropy`, whose value for one class is V, and sensitivity S
    target: L1 over the classes
    Value:       m V                     (attained: all against one class)
    Sensitivity: m S to x; V to y        (attained likewise)
    Gap:         from RMS that of `cross_entropy`; smoothing, and class weights at their largest, count for all samples
    Summed: times the number of samples.
    Source:      the loss is linear in y, whose classes have a loss of at most V each
    """
    along = class_dim(input.ndim)
    value, slope, c = furthest_from_a_class(input, along)
    y, cy = as_kind(target, L1Tensor, (along,))
    factor: Constant = count(reduction, input.numel() // max(input.shape[along], 1))
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    mass = y.norm_size * (1 - label_smoothing) + label_smoothing
    return scalar_loss(value * mass, factor, input=product(slope, mass, c), target=times(value, cy * (1 - label_smoothing)))


def _is_distribution(args: dict[str, Any]) -> bool:
    """Whether the target is a softmax of something over the last dimension, and not its logarithm."""
    target = args["target"]
    found = fact(target, SoftmaxOf)
    if (
        found is None
        or args["log_target"]
        or are_local({"input": args["input"], "target": target})
        or args["input"].shape != target.shape
    ):
        return False
    return issubclass(found.x.kind, RMSTensor)


@loss(F.kl_div, when=_is_distribution)
def kl_div_to_softmax(input: RMSTensor, target: L1Tensor, reduction: str = "mean", *, log_target: bool = False) -> NormedTensor:
    """Sum of p (log p - x) for log probabilities x, and p = softmax(t) over C entries.

    Value:       n + log C for the largest entry n of x; not reduced as well
    Sensitivity: 1 to x; n + k to t, k the largest entry of t; not reduced n / 2 + 1
    Gap:         the entropy of p is largest where x counts least; RMS is converted
    Summed: times the number of rows; averaged over entries: divided by C; over the batch: times the rows of one sample.
    Source:      the gradient in t is p (g - sum p g), g = log p - x, whose entries lie within 2 (n + k): their mean deviation is at most
                 half of that; of one term 2 p (1 - p) (|log p + 1| + n)
    Untried:     of a softmax alone; `tests/rules/test_soft_labels.py` searches it
    """
    found = fact(target, SoftmaxOf)
    assert found is not None, "the rule's condition has been checked"
    x, c = as_kind(input, LinfTensor, ())
    t, ct = as_kind(found.x.tensor(), LinfTensor, ())
    classes = target.shape[negative(found.dim, target.ndim)] if target.ndim else 1
    rows = math.prod(broadcast(input.shape, target.shape)) / max(classes, 1)
    samples = max(input.shape[0], 1) if input.ndim else 1
    counted = {"batchmean": rows / samples, "sum": rows, "mean": 1 / max(classes, 1), "none": 1}[reduction]
    n = x.norm_size
    to_t = n / 2 + 1 if reduction == "none" else n + t.norm_size
    moving = [
        perturbation * constant * counted
        for perturbation, constant in ((input.perturbation_size, c), (found.x.perturbation_size, to_t * ct))
        if perturbation is not None
    ]
    total = sum(moving[1:], moving[0]) if moving else None
    out = LinfTensor._wrap(None, (n + math.log(max(classes, 1))) * counted, total, ())  # type: ignore[arg-type]
    out._sensitivity = {"input": 0, "target": 0}
    return out
