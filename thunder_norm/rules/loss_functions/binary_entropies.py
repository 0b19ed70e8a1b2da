"""Binary cross entropies of probabilities: of a logistic function's, and of what stays away from 0 and 1.

    F.binary_cross_entropy(torch.sigmoid(x), y)
    nn.BCELoss()(probabilities.clamp(1e-6, 1 - 1e-6), y)

Nothing keeps probabilities from 0, but what made them may: the loss of a logistic function is one of x, and others have a range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import Constant, is_typical, maximum
from thunder_norm.rules.loss_functions._loss import count, entries_or_mean, loss, measured, product, scalar_loss, unlikeliest
from thunder_norm.rules.loss_functions.losses import binary_cross_entropy_of_normed_labels, binary_cross_entropy_with_logits
from thunder_norm.rules.quotients.kept_away import between_0_and_1, ends
from thunder_norm.rules.written_out.logarithms import logistic
from thunder_norm.scalars import times

_LIFT = {"input": measured, "target": measured}


def _is_logistic(args: dict[str, Any]) -> bool:
    return not are_local({"input": args["input"]}) and logistic(args) is not None


def _with_normed_labels(when: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda args: isinstance(args["target"], NormedTensor) and when(args)


def _of_logistic(
    input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, rule: Callable
) -> NormedTensor:
    found = logistic({"input": input})
    assert found is not None, "the rule's condition has been checked"
    source, c = found
    result = rule(source.tensor(c), target, weight, None, reduction)
    slopes = result._sensitivity or {}
    moving = [
        times(perturbation, times(slopes[name], scale))
        for name, perturbation, scale in (
            ("input", source.perturbation_size, abs(c)),
            ("target", target.perturbation_size if isinstance(target, NormedTensor) else None, 1.0),
        )
        if perturbation is not None
    ]
    out = LinfTensor._wrap(None, result.norm_size, sum(moving[1:], moving[0]) if moving else None, ())  # type: ignore[arg-type]
    out._sensitivity = dict.fromkeys(slopes, 0)
    return out


@loss(F.binary_cross_entropy, when=_is_logistic)
def of_logistic(
    input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> NormedTensor:
    """-y log s(x) - (1 - y) log s(-x): the rule of `binary_cross_entropy_with_logits`.

    Source:      torch's logarithms are at least -100, where the loss is smaller, and moves less
    """
    return _of_logistic(input, target, weight, reduction, binary_cross_entropy_with_logits)


@loss(F.binary_cross_entropy, lift_dims=_LIFT, when=_with_normed_labels(_is_logistic))
def of_logistic_and_labels(
    input: RMSTensor, target: RMSTensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> NormedTensor:
    """-y log s(x) - (1 - y) log s(-x): the rule of `binary_cross_entropy_with_logits`, of labels that have norms.

    Source:      that of `of_logistic`
    Untried:     torch refuses labels outside [0, 1], which a search tries
    """
    return _of_logistic(input, target, weight, reduction, binary_cross_entropy_of_normed_labels)


def _labels(target: torch.Tensor, x: NormedTensor, reduction: str) -> tuple[torch.Tensor, torch.Tensor | float, float]:
    """How much of the logarithm of 1 - p there is, how much of the logit of p besides, and how far that moves with the labels."""
    if not isinstance(target, RMSTensor):
        return unlikeliest(target, x), 0.0, 0.0
    y, c = entries_or_mean(target, reduction)
    return torch.ones_like(y.norm_size), y.norm_size, c


def _entropy(
    input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, at: tuple[torch.Tensor, ...]
) -> LinfTensor:
    """The loss of probabilities between those in `at`."""
    x, c = entries_or_mean(input, reduction)
    share, labels, to_y = _labels(target, x, reduction)
    furthest = maximum([torch.maximum(-torch.log(p), -torch.log1p(-p)) for p in at])
    logit = maximum([torch.logit(p).abs() for p in at])
    steepest, both = maximum([1 / torch.minimum(p, 1 - p) for p in at]), maximum([1 / (p * (1 - p)) for p in at])
    factor: Constant = count(reduction, input.numel())
    if weight is not None:
        factor = lift(weight, LinfTensor).norm_size * factor
    slopes = {"input": product(share * steepest + times(both, labels), c)}
    if isinstance(target, NormedTensor):
        slopes["target"] = times(logit, to_y)
    return scalar_loss(share * furthest + times(logit, labels), factor, **slopes)


@loss(F.binary_cross_entropy, when=between_0_and_1)
def of_kept_away(
    input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> LinfTensor:
    """-y log p - (1 - y) log(1 - p), for p between a and b, 0 < a and b < 1; w = max(|y| + |1 - y|), 1 for y in [0, 1].

    Value:       w M, M the largest of -log a and -log(1 - b)        (attained: wrong everywhere)
    Sensitivity: w max(1 / a, 1 / (1 - b))                           (attained likewise)
    Gap:         the norm of p counts by its ends alone; weights, and labels inside (0, 1), at their largest for all entries
    Summed: times the number of entries.  Weights multiply by the largest.
    """
    return _entropy(input, target, weight, reduction, ends(input))


@loss(F.binary_cross_entropy, lift_dims=_LIFT, when=_with_normed_labels(between_0_and_1))
def of_kept_away_and_labels(
    input: RMSTensor, target: RMSTensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> LinfTensor:
    """-y log p - (1 - y) log(1 - p), for p between a and b, 0 < a and b < 1, and labels of norm m, any numbers.

    Value:       M + m L, M as in `of_kept_away` and L the largest |logit| at an end
    Sensitivity: max(1 / a, 1 / (1 - b)) and m times the largest 1 / (p (1 - p)) at an end to p; L to the labels
    Gap:         that of `of_kept_away`
    Summed: times the number of entries.  Weights multiply by the largest.
    Untried:     torch refuses labels outside [0, 1], which a search tries
    """
    return _entropy(input, target, weight, reduction, ends(input))


def _half(input: RMSTensor) -> tuple[torch.Tensor, ...]:
    return (torch.full_like(input.norm_size, 0.5),)


@loss(F.binary_cross_entropy, when=is_typical)
def typical(input: RMSTensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean") -> LinfTensor:
    """-y log p - (1 - y) log(1 - p).  Typical: that of p = 1 / 2.

    Untried:     in mode "bound" it does not apply
    """
    return _entropy(input, target, weight, reduction, _half(input))


@loss(F.binary_cross_entropy, lift_dims=_LIFT, when=_with_normed_labels(is_typical))
def typical_of_labels(
    input: RMSTensor, target: RMSTensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> LinfTensor:
    """-y log p - (1 - y) log(1 - p), of labels that have norms.  Typical: that of p = 1 / 2.

    Untried:     in mode "bound" it does not apply
    """
    return _entropy(input, target, weight, reduction, _half(input))
