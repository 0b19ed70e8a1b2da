"""Weighted means written out: a sum of values by weights that are not negative, over the sum of the same weights.

    torch.einsum("bnd,bde->bne", q, torch.einsum("bnd,bne->bde", k, v)) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
    (e * v).sum(1) / e.sum(1)
    num, den = decay * num + e * v, decay * den + e;  num / den

Op by op such a quotient has no bound: nothing keeps the sum of the weights away from 0.  Here each step remembers of which weights it is
a sum, and what was summed by them (`_combinations`), and a quotient of the two is no larger than what was summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import unconditional
from thunder_norm.rules._shared import rms
from thunder_norm.rules.linear_algebra.einsum import equation_labels
from thunder_norm.rules.weighted._combinations import (
    Combination,
    InverseOfWeights,
    Relative,
    Sums,
    Weights,
    facts,
    least_share,
    own_sum,
    weights_of,
)
from thunder_norm.rules.weighted._weights import least_ratio
from thunder_norm.rules.weighted.weighted_places import placed
from thunder_norm.scalars import times

Match = tuple[Combination, Weights, float]  # and the factor of their quotient


def _matches(known: Iterable[Sums], divisors: Iterable[tuple[Weights, float]]) -> Iterator[Match]:
    """Weighted sums that a tensor is, with the sum of the same weights, and by what the quotient is multiplied.

    What else is in the sum of the weights is the weight of zeros, and moves as that sum does.
    """
    found = list(divisors)
    for c in known:
        if not isinstance(c, Combination) or not c.parts:
            continue
        for w, scale in found:
            ratio = least_ratio(w.term, c.term)
            if 0 < ratio < math.inf:
                yield c if w.term.factors == c.term.factors else replace(c, relative=None), w, scale / ratio


def _shares(match: Match) -> list[Relative]:
    """What says by which share of themselves the weights move: those above and below are the same, and may have come by other ways."""
    c, w, _ = match
    return [r for r in (c.relative, w.relative) if r is not None]


def _is_bounded(match: Match, input: Any, other: Any) -> bool:
    """Whether the movement of the mean is known from that of the weights, or nothing moves."""
    return bool(_shares(match)) or input.perturbation_size is None and other.perturbation_size is None


def _mean(match: Match, *arguments: str) -> NormedTensor:
    """The rule's result for a weighted mean of which `_is_bounded`.

    Value:       |v|, the largest of what is summed; RMS over the dimensions along which the weights are constant, else entry by entry
    Sensitivity: |dv| + r |v| for weights that move by at most a share r of themselves
    Source:      dy = sum p_j dv_j + sum p_j r_j (v_j - y), a covariance: at most the deviation of r, r, times that of v, |v|.  A number
                 that is added to the divisor is the weight of a v of 0
    """
    c, _, factor = match
    moved: Any = c.moved()
    share = least_share(_shares(match))
    if share is not None:
        moved = moved + c.size() * share
    out = rms(times(c.size(), factor), c.elem_dims)
    movement = times(moved, factor) if isinstance(moved, torch.Tensor) else None
    result = type(out)._wrap(None, out.norm_size, movement, out.elem_dims)  # type: ignore[arg-type]
    result._sensitivity = dict.fromkeys(arguments, 0)
    return result


def _quotients(input: Any, other: Any) -> Iterator[Match]:
    return _matches(facts(input), ((w, 1.0) for w in weights_of(other, exactly=False)))


def _products(of_a: Iterable[Sums], of_b: Iterable[Sums]) -> Iterator[Match]:
    """Of two tensors one of which is one over the sum of weights."""
    for c, f in ((of_a, of_b), (of_b, of_a)):
        yield from _matches(c, ((w.weights, w.scale) for w in f if isinstance(w, InverseOfWeights)))


def _of_known_shares(found: Iterator[Match], input: Any, other: Any) -> Match | None:
    return next((m for m in found if _is_bounded(m, input, other)), None)


def _quotient(args: Mapping[str, Any]) -> Match | None:
    if args["rounding_mode"] is not None:
        return None
    return _of_known_shares(_quotients(args["input"], args["other"]), args["input"], args["other"])


@normed_op(torch.div).register_norm(when=lambda args: _quotient(args) is not None)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """A weighted sum over the sum of the weights: see `_mean`.

    Gap:         values that are far apart, and weights that move against each other by their whole share, need not be had together
    """
    match = _quotient({"input": input, "other": other, "rounding_mode": None})
    assert match is not None, "the rule's condition has been checked"
    return _mean(match, "input", "other")


def _product(args: Mapping[str, Any]) -> Match | None:
    a, b = args["input"], args["other"]
    return _of_known_shares(_products(facts(a), facts(b)), a, b)


@normed_op(torch.mul).register_norm(when=lambda args: _product(args) is not None)
def mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """A weighted sum times one over the sum of the weights: see `_mean`.

    Gap:         values that are far apart, and weights that move against each other by their whole share, need not be had together
    """
    match = _product({"input": input, "other": other})
    assert match is not None, "the rule's condition has been checked"
    return _mean(match, "input", "other")


# -- weights over their own sum -------------------------------------------------------------------------------------------


def _share_of_sum(args: Mapping[str, Any]) -> tuple[ed.Dims, float, list[Relative]] | None:
    """Over which dimensions weights are divided by their sum, by what their shares are multiplied, and by which share they move."""
    a, b = args["input"], args["other"]
    if args["rounding_mode"] is not None:
        return None
    for dims, w, other, factor in own_sum(a, b):
        known = [r for r in (w.relative, other.relative) if r is not None]
        if known or a.perturbation_size is None and b.perturbation_size is None:
            return dims, factor, known
    return None


@normed_op(torch.div).register_norm(when=lambda args: _share_of_sum(args) is not None)
def div_by_own_sum(input: RMSTensor | L1Tensor, other: RMSTensor | L1Tensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """Weights over their sum.

    Value:       1, L1 over the dimensions of the sum      (an equality, or less where something is added to the sum)
    Sensitivity: r for weights that move by at most a share r of themselves
    Source:      dp_j = p_j (r_j - sum p r), and ``sum p_j |r_j - sum p r|`` is at most the deviation of r
    Gap:         the weights that move most need not be half of the sum
    """
    found = _share_of_sum({"input": input, "other": other, "rounding_mode": None})
    assert found is not None, "the rule's condition has been checked"
    dims, factor, shares = found
    share = least_share(shares)
    moved = None if share is None else times(share, factor)
    result = L1Tensor._wrap(None, bounded(factor, input.norm_size), moved, dims)
    result._sensitivity = {"input": 0, "other": 0}
    return result


# -- where the share is not known -----------------------------------------------------------------------------------------


def quotient_at_most(input: Any, other: Any, result: NormedTensor) -> NormedTensor:
    """What other rules say of a / b; no larger than what was summed, if it is a weighted mean."""
    return _at_most(next(_quotients(input, other), None), result)


def _at_most(match: Match | None, result: NormedTensor) -> NormedTensor:
    if match is None or not set(match[0].elem_dims) <= set(result.elem_dims):
        return result
    c, _, factor = match
    return rms(torch.minimum(result.norm_size, times(c.size(), factor)), result.elem_dims, sensitivity=result._sensitivity)


def _is_mean(args: Mapping[str, Any]) -> bool:
    return current_mode() == "bound" and next(_products(facts(args["input"]), facts(args["other"])), None) is not None


@normed_op(torch.mul).register_norm(when=_is_mean)
def mul_at_most(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """The same where it is not known by which share the weights move: value at most |v|, sensitivities of a product.

    Untried:     it is for inputs that move; `quotient_at_most`, the same of a quotient, is tried
    Gap:         values that are far apart, and weights that move against each other by their whole share, need not be had together
    """
    return _at_most(next(_products(facts(input), facts(other)), None), unconditional(torch.mul, input, other))


# -- einsum ---------------------------------------------------------------------------------------------------------------


def _placed(args: Mapping[str, Any]) -> list[tuple[Sums, ...]]:
    """What is known of both tensors, in the dimensions of a result that sums over none."""
    tensors = args["left"], args["right"]
    of_tensors, of_out = equation_labels(args["equation"], *(x.ndim for x in tensors))
    if any(len(set(labels)) < len(labels) or not set(labels) <= set(of_out) for labels in of_tensors):
        return [(), ()]
    place = {name: i - len(of_out) for i, name in enumerate(of_out)}
    return [
        placed(x, {i - x.ndim: place[name] for i, name in enumerate(labels)})
        for x, labels in zip(tensors, of_tensors, strict=True)
    ]


def _einsum_product(args: Mapping[str, Any]) -> Match | None:
    return _of_known_shares(_products(*_placed(args)), args["left"], args["right"])


@normed_op(torch.einsum).register_norm(when=lambda args: _einsum_product(args) is not None)
def einsum(equation: str, left: RMSTensor, right: RMSTensor) -> NormedTensor:
    """A weighted sum times one over the sum of the weights: see `_mean`.

    Gap:         values that are far apart, and weights that move against each other by their whole share, need not be had together
    """
    match = _einsum_product({"equation": equation, "left": left, "right": right})
    assert match is not None, "the rule's condition has been checked"
    return _mean(match, "left", "right")


@normed_op(torch.einsum).register_norm(when=lambda args: current_mode() == "bound" and any(_products(*_placed(args))))
def einsum_at_most(equation: str, left: RMSTensor, right: RMSTensor) -> NormedTensor:
    """The same where it is not known by which share the weights move: value at most |v|, sensitivities of a product.

    Untried:     it is for inputs that move; `quotient_at_most`, the same of a quotient, is tried
    Gap:         values that are far apart, and weights that move against each other by their whole share, need not be had together
    """
    match = next(_products(*_placed({"equation": equation, "left": left, "right": right})), None)
    return _at_most(match, unconditional(torch.einsum, equation, left, right))
