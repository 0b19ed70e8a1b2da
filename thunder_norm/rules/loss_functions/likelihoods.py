"""Norm rules for negative log likelihoods of counts, Gaussians, Bernoulli probabilities and label sequences.

Counts, variances and labels are plain tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder_norm.core.context import lift, run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, broadcast, refuse
from thunder_norm.rules.entrywise.powers import only_largest_entry
from thunder_norm.rules.loss_functions._loss import count, loss, measured, product, scalar_loss


def _signed_parts(t: torch.Tensor, beside: NormedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry above 0 and the largest modulus below it, of a plain tensor."""
    real = t if t.is_floating_point() else run_real(torch.Tensor.to, (t, beside.dtype), {})
    above = run_real(torch.clamp, (real,), {"min": 0})
    below = run_real(torch.clamp, (real,), {"max": 0})
    return lift(above, LinfTensor).norm_size, lift(below, LinfTensor).norm_size


@loss(F.poisson_nll_loss)
def poisson_nll_loss(
    input: LinfTensor | RMSTensor,
    target: torch.Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> LinfTensor:
    """e^x - y x for log rates x and counts y in [-b, a] (counts: b = 0), and Stirling's terms of y if `full`.

    Value:       max(e^n + b n, e^-n + a n), and the largest of Stirling's terms     (attained at x = n or -n, without them)
    Sensitivity: max(e^n + b, a - e^-n)                                              (attained likewise)
    Gap:         in a mean or sum the worst count, and Stirling's largest term, stand for all entries
    Summed: times the number of entries.
    Source:      convex in x, linear in y: the ends of both are the worst; the loss is at least -a n
    Raises NormMismatchError for an RMS norm (see `exp`), and without `log_input`: log(x + eps) has a slope of 1 / eps.
    """
    if not log_input:
        raise NormMismatchError(
            "poisson_nll_loss of rates takes logarithms next to 0, where they have no slope; use log rates and log_input=True"
        )
    only_largest_entry(input, "an exponential")
    n = input.norm_size
    above, below = _signed_parts(target, input)
    up, down = torch.exp(n), torch.exp(-n)
    value = torch.maximum(up + below * n, down + above * n)
    if full:
        value = value + lift(_stirling(target), LinfTensor).norm_size
    slope = torch.maximum(up + below, above - down)
    return scalar_loss(value, count(reduction, math.prod(broadcast(input.shape, target.shape))), input=slope)


def _stirling(y: torch.Tensor) -> torch.Tensor:
    """What `full` adds: y log y - y + log(2 pi y) / 2 where y > 1, else 0."""
    above = run_real(torch.clamp, (y,), {"min": 1})
    terms = run_real(torch.sub, (run_real(torch.xlogy, (above, above), {}), above), {})
    root = run_real(torch.mul, (run_real(torch.log, (run_real(torch.mul, (above, 2 * math.pi), {}),), {}), 0.5), {})
    total = run_real(torch.add, (terms, root), {})
    return run_real(torch.mul, (total, run_real(torch.Tensor.to, (run_real(torch.gt, (y, 1), {}), above.dtype), {})), {})


_MEASURED = {"input": measured, "target": measured}


@loss(F.gaussian_nll_loss, lift_dims=_MEASURED)
def gaussian_nll_loss(
    input: RMSTensor,
    target: RMSTensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> LinfTensor:
    """(log v + (a - b)^2 / v) / 2 with v = max(var, eps), and log(2 pi) / 2 if `full`.

    Value:       max(l + w d^2, k) / 2 with d = |a| + |b|, w the largest 1 / v, and the logarithms, constants included, in [-k, l];
                 a, b averaged from any RMS, not reduced from the largest entries        (attained by equal variances >= 1)
    Sensitivity: w d to each                                                             (attained)
    Gap:         in a mean or sum the smallest variance and the largest logarithm stand for all entries
    Summed: times the number of entries.
    Source:      the loss is between -k / 2 and (l + w d^2) / 2
    Variances that are normed are refused: a norm bounds them from above, and here from below is needed.
    """
    if isinstance(var, int | float):
        v = max(float(var), eps)
        shift = math.log(v) + (math.log(2 * math.pi) if full else 0.0)
        above, below, w = (torch.full_like(input.norm_size, c) for c in (max(shift, 0.0), max(-shift, 0.0), 1 / v))
    else:
        v = run_real(torch.clamp, (var,), {"min": eps})
        logs = run_real(torch.add, (run_real(torch.log, (v,), {}), math.log(2 * math.pi) if full else 0.0), {})
        above, below = _signed_parts(logs, input)
        w = lift(run_real(torch.reciprocal, (v,), {}), LinfTensor).norm_size
    (a, to_a), (b, to_b) = ((as_kind(t, LinfTensor, ()) if reduction == "none" else (t, 1.0)) for t in (input, target))
    d = a.norm_size + b.norm_size
    value = torch.maximum(above + d.square() * w, below) / 2
    counted = count(reduction, math.prod(broadcast(input.shape, target.shape)))
    return scalar_loss(value, counted, input=product(d * w, to_a), target=product(d * w, to_b))


refuse(
    normed_op(F.binary_cross_entropy),
    "its logarithms are unbounded at 0 and 1, and a norm does not keep probabilities away from them; "
    "give it a sigmoid, or use binary_cross_entropy_with_logits",
)


@loss(F.ctc_loss)
def ctc_loss(
    log_probs: RMSTensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | tuple | list,
    target_lengths: torch.Tensor | tuple | list,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> LinfTensor:
    """-log of the sum, over the alignments of a target to T steps, of e^(sum of their entries), for C classes.

    Value:       T (n + log min(C, 3)) for the largest entry n and the largest number of steps T; T n without the logarithm is attained
                 by -n everywhere and one alignment
    Sensitivity: T                                                               (attained: the entries of an alignment together)
    Gap:         how many alignments there are, at most 3 ways at each step, depends on data; so do lengths below T; RMS is
                 converted
    Summed: times the number of samples; averaged: divided by the shortest target's length, where that is known.
    Source:      an alignment goes on in at most 3 ways; the gradient is minus the probabilities of the classes at each step
    A target that does not fit into its input (its length and its repeated labels exceed the steps) has no alignment: its loss, and
    the value, are infinite whatever x, unless `zero_infinity` makes that 0.
    """
    x, c = as_kind(log_probs, LinfTensor, ())
    steps = x.shape[0]
    samples = x.shape[1] if x.ndim == 3 else 1
    value = (x.norm_size + math.log(max(min(x.shape[-1], 3), 1))) * steps
    factor: float = count(reduction, samples)
    if reduction == "mean" and not isinstance(target_lengths, torch.Tensor):
        factor = 1 / max(min(target_lengths, default=1), 1)
    if not zero_infinity:
        given = [torch.as_tensor(n, device=targets.device).reshape(-1) for n in (input_lengths, target_lengths)]
        value = value + torch.where(_fit(targets, *given), 0.0, math.inf).to(value)
    return scalar_loss(value, factor, log_probs=steps * c)


def _fit(targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
    """Whether all targets have an alignment: a step for each label, and a blank between two that are the same."""
    is_repeated = targets[..., 1:] == targets[..., :-1]
    at = torch.arange(1, max(targets.shape[-1], 1), device=targets.device)
    if targets.ndim == 2:
        is_own = at < target_lengths.unsqueeze(-1)
    else:  # one after the other
        ends = target_lengths.cumsum(0).unsqueeze(-1)
        is_own = (at > ends - target_lengths.unsqueeze(-1)) & (at < ends)
    repeats = (is_repeated & is_own).sum(-1)
    return (input_lengths >= target_lengths + repeats).all()
