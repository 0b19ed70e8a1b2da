"""Scores of queries and keys, on their way to a softmax: how far they differ, whatever masks and biases are added.

Where logits are large a softmax moves little: in mode "typical" but two of them compete now and then.  A norm of logits does not tell
whether they are large or masked.  So the product of two activations notes its size, and what is added to it does not change that: the
more logits differ, the less a softmax moves, and an addition that is independent adds to their differences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.context_variables import setting
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, fact, with_fact
from thunder_norm.rules._gaussian import softmax_gain
from thunder_norm.rules._shared import SAME_DIMS, Number
from thunder_norm.rules.layout.writing import with_entries
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Scores:
    """The entries are products of two activations, of this size, and what was added to them.

    `partly` are the sizes of products among these that are the same along some dimensions, counted from the end: scores of relative
    positions that were made for rows and for columns.
    """

    norm_size: torch.Tensor
    partly: tuple[tuple[torch.Tensor, frozenset[int]], ...] = ()

    def times(self, c: float) -> Scores:
        """Of a multiple."""
        c = math.fabs(c)
        return Scores(times(self.norm_size, c), tuple((times(n, c), dims) for n, dims in self.partly))

    def along(self, dim: int) -> torch.Tensor:
        """The size of what differs along a dimension: of independent products."""
        return _together([self.norm_size, *(n for n, dims in self.partly if dim not in dims)])

    def anywhere(self) -> torch.Tensor:
        """The size of what differs between any two."""
        found = [self.along(dim) for dim in sorted(frozenset().union(*(dims for _, dims in self.partly)))]
        return functools.reduce(torch.minimum, found) if found else self.norm_size


def _together(sizes: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.hypot, sizes)


_asks_others: ContextVar[bool] = ContextVar("thunder_norm_asks_others", default=False)


def scores(result: NormedTensor) -> NormedTensor:
    """A product of two activations, which notes its size."""
    return _noted(result, Scores(result.norm_size)) if current_mode() == "typical" else result


def typical_softmax_gain(logits: NormedTensor, dim: int) -> torch.Tensor | float:
    """At most how far a softmax along `dim` moves, per entry of the logits, in the L1 norm: twice `softmax_gain`, of scores."""
    found = fact(logits, Scores)
    return 1.0 if found is None else 2 * softmax_gain(found.along(dim), logits.shape[dim])


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
    result = _otherwise(torch.add, input, other, alpha=alpha)
    a, b = fact(input, Scores), fact(other, Scores)
    return _noted(result, _sum(a, input, b.times(alpha), other) if a and b else a or _scores(other).times(alpha))


def _sum(a: Scores, input: RMSTensor, b: Scores, other: RMSTensor) -> Scores:
    """Of independent scores, either of which may be the same along dimensions of the other."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    terms = [
        (n, dims | _broadcast(x, shape)) for s, x in ((a, input), (b, other)) for n, dims in ((s.norm_size, _NOWHERE), *s.partly)
    ]
    whole = [n for n, dims in terms if not dims] or [torch.zeros_like(a.norm_size)]
    return Scores(_together(whole), tuple((n, dims) for n, dims in terms if dims))


_NOWHERE: frozenset[int] = frozenset()


def _broadcast(x: RMSTensor, shape: Sequence[int]) -> frozenset[int]:
    """Along which dimensions of a shape x is the same, counted from the end."""
    return frozenset(-d for d in range(1, len(shape) + 1) if shape[-d] > 1 and (d > x.ndim or x.shape[-d] == 1))


@normed_op(torch.masked_fill).register_norm(mode="typical", when=_has("input"), allow_plain_tensors="constant")
def scores_masked(input: RMSTensor, mask: torch.Tensor, value: Number) -> NormedTensor:
    """Scores, some of them masked: as `masked_fill`."""
    return _noted(_otherwise(torch.masked_fill, input, mask, value), _scores(input))


# -- other places ---------------------------------------------------------------------------------------------------------


def _moved(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Of the same entries in another place, or of some of them."""
    found = fact(args[0], Scores) if args else None
    return out._facts if found is None else _noted(out, Scores(found.anywhere()))._facts


for _op in (
    torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.unsqueeze, torch.squeeze, torch.Tensor.view, torch.reshape,
    torch.flatten, torch.unflatten, torch.transpose, torch.permute, torch.movedim, torch.Tensor.__getitem__, torch.narrow,
    torch.select, torch.clone, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float, torch.Tensor.type_as, torch.detach,
    F.dropout,
):  # fmt: skip
    normed_op(_op).register_fact(_moved)


def _joined(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Of several beside each other: those that differ least."""
    parts = args[0] if args else kwargs.get("tensors", ())
    found = [s.anywhere() for part in parts if (s := fact(part, Scores)) is not None]
    return (
        _noted(out, Scores(functools.reduce(torch.minimum, found)))._facts if found and len(found) == len(parts) else out._facts
    )


normed_op(torch.cat).register_fact(_joined)


def _written(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Of scores among which others are written, or numbers that mask them; of those alone where they are all."""
    (input, index, value), before = args, fact(args[0], Scores)
    after = fact(value, Scores)
    names = index if isinstance(index, tuple) else (index,)
    is_whole = isinstance(value, torch.Tensor) and value.numel() == input.numel()
    if after is not None and is_whole and not any(isinstance(name, torch.Tensor | list) for name in names):
        return _noted(out, Scores(after.anywhere()))._facts
    if before is None or after is None and isinstance(value, torch.Tensor):
        return out._facts
    sizes = [s.anywhere() for s in (before, after) if s is not None]
    return _noted(out, Scores(functools.reduce(torch.minimum, sizes)))._facts


with_entries.register_fact(_written)
