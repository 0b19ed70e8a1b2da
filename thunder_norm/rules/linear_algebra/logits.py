"""Scores of queries and keys, on their way to a softmax: how far they differ, whatever masks and biases are added.

Where logits are large a softmax moves little: in mode "typical" but two of them compete now and then.  A norm of logits does not tell
whether they are large or masked.  So the product of two activations notes its size, and what is added to it does not change that: the
more logits differ, the less a softmax moves, and an addition that is independent adds to their differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_mode, setting
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, fact, with_fact
from thunder_norm.rules._gaussian import softmax_gain
from thunder_norm.rules._shared import SAME_DIMS, Number
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Scores:
    """The entries are products of two activations, of this size, and what was added to them."""

    norm_size: torch.Tensor

    def times(self, c: float) -> Scores:
        """Of a multiple."""
        return Scores(times(self.norm_size, math.fabs(c)))


_asks_others: ContextVar[bool] = ContextVar("thunder_norm_asks_others", default=False)


def scores(result: NormedTensor) -> NormedTensor:
    """A product of two activations, which notes its size."""
    return _noted(result, Scores(result.norm_size)) if current_mode() == "typical" else result


def typical_softmax_gain(logits: NormedTensor, count: int) -> torch.Tensor | float:
    """At most how far a softmax of `count` logits moves, per entry of theirs, in the L1 norm: twice `softmax_gain`, of scores."""
    found = fact(logits, Scores)
    return 1.0 if found is None else 2 * softmax_gain(found.norm_size, count)


def _noted(result: NormedTensor, found: Scores) -> NormedTensor:
    facts = result._facts
    if facts is None or isinstance(facts, Alternatives):
        return with_fact(result, Alternatives((*(facts or ()), found)))
    return result


def _has(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: not _asks_others.get() and any(fact(args[name], Scores) is not None for name in names)


def _otherwise(op: Callable, *args: Any, **kwargs: Any) -> NormedTensor:
    """What the other rules say."""
    with setting(_asks_others, True):
        found = normed_op(op).find(args, kwargs)
        assert found is not None, "what takes scores takes any tensor"
        rule, bound = found
        prepared = rule.prepare(bound)
        return rule.run(prepared)


def _scores(x: RMSTensor) -> Scores:
    found = fact(x, Scores)
    assert found is not None, "the condition has seen it"
    return found


@normed_op(torch.mul).register_norm(mode="typical", when=_has("input"))
def scores_mul(input: RMSTensor, other: Number) -> NormedTensor:
    """c s: as every multiple."""
    return _noted(_otherwise(torch.mul, input, other), _scores(input).times(other))


@normed_op(torch.mul).register_norm(mode="typical", when=_has("other"))
def mul_scores(input: Number, other: RMSTensor) -> NormedTensor:
    """c s: as every multiple."""
    return _noted(_otherwise(torch.mul, input, other), _scores(other).times(input))


@normed_op(torch.div).register_norm(mode="typical", when=lambda args: args["rounding_mode"] is None and _has("input")(args))
def scores_div(input: RMSTensor, other: Number, *, rounding_mode: str | None = None) -> NormedTensor:
    """s / c: as every multiple."""
    return _noted(_otherwise(torch.div, input, other), _scores(input).times(1 / other if other else 0.0))


@normed_op(torch.add).register_norm(mode="typical", when=_has("input", "other"), lift_dims=SAME_DIMS)
def scores_add(input: RMSTensor, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
    """s + a b, and b + a s, with a bias or a mask b: as every sum."""
    found = fact(input, Scores) or _scores(other).times(alpha)
    return _noted(_otherwise(torch.add, input, other, alpha=alpha), found)


@normed_op(torch.masked_fill).register_norm(mode="typical", when=_has("input"), allow_plain_tensors="constant")
def scores_masked(input: RMSTensor, mask: torch.Tensor, value: Number) -> NormedTensor:
    """Scores, some of them masked: as `masked_fill`."""
    return _noted(_otherwise(torch.masked_fill, input, mask, value), _scores(input))
