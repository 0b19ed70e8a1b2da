"""Straight-through estimators: what is there, with the gradient of something else.

    z + (q - z).detach()                    # a quantized z
    hard - soft.detach() + soft             # one-hot, with softmax's gradient

The sum has the entries of q, or hard, and their norm, where the rules of sums know ``|q| + 2 |z|``.  It moves, as the rules of sums say,
as all of its terms do: so z counts, through which the gradient goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import lift
from thunder_norm.core.conversions import factor
from thunder_norm.core.known_ranges import known_range, range_within
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.rules._facts import Alternatives, Source, every_fact, unconditional, with_fact
from thunder_norm.rules._shared import Number, argument
from thunder_norm.rules.written_out.written_out_exponentials import DetachedFrom, sources_of
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Difference:
    """A fact: these entries, less those of another tensor, entry by entry.

    Attributes:
        size: the norm of what it is subtracted from, in the kind and over the elem_dims of the difference.
        entries: its range.
        less: what is subtracted, and what that was detached from; with claims of its own norm each.
    """

    size: torch.Tensor
    entries: Range
    less: tuple[Source, ...]


def _is_same(a: NormedTensor, sources: tuple[Source, ...]) -> bool:
    return any(own.is_same(s) for own in sources_of(a) for s in sources)


def _subtracted(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    if not isinstance(a, NormedTensor) or not isinstance(b, NormedTensor) or argument(args, kwargs, 2, "alpha", default=1) != 1:
        return out._facts
    if not a.shape == b.shape == out.shape or (c := factor(a, type(out), out.elem_dims)) is None:
        return out._facts
    return Alternatives((*every_fact(out), Difference(times(a.norm_size, c), known_range(a), tuple(sources_of(b)))))


normed_op(torch.sub).register_fact(_subtracted)


def _is_from_constant(args: dict[str, Any]) -> bool:
    a, b = args["input"], args["other"]
    is_plain = isinstance(a, torch.Tensor) and not isinstance(a, NormedTensor) and has_norm(a)
    return is_plain and isinstance(b, NormedTensor) and args["alpha"] == 1 and len(sources_of(b)) > 1 and a.shape == b.shape


@normed_op(torch.sub).register_norm(when=_is_from_constant, allow_plain_tensors="constant")
def sub(input: torch.Tensor, other: NormedTensor, alpha: Number = 1) -> NormedTensor:
    """A constant less what was detached: as every difference, and of what."""
    result = unconditional(torch.sub, input, other, alpha)
    size = lift(input, type(result), result.elem_dims).norm_size
    entries = range_within(input) or Range()
    return with_fact(result, Alternatives((*every_fact(result), Difference(size, entries, tuple(sources_of(other))))))


def _differences(x: Any) -> list[Difference]:
    """What is known of a difference, or of what it was detached from."""
    facts = [*every_fact(x), *(g for f in every_fact(x) if isinstance(f, DetachedFrom) for g in f.x.facts)]
    return [f for f in facts if isinstance(f, Difference)]


def _restored(a: Any, b: Any, alpha: Any) -> tuple[NormedTensor, NormedTensor, Difference] | None:
    """The difference, what is added to it, which is what was subtracted, and what is known; None of other sums."""
    if alpha != 1 or not isinstance(a, NormedTensor) or not isinstance(b, NormedTensor) or a.shape != b.shape:
        return None
    for difference, other in ((a, b), (b, a)):
        for found in _differences(difference):
            if _is_same(other, found.less):
                return difference, other, found
    return None


def _is_restored(args: dict[str, Any]) -> bool:
    return _restored(args["input"], args["other"], args["alpha"]) is not None


def _rounding(dtype: torch.dtype) -> float:
    """What two sums in floating point add, relative to the largest of their terms."""
    return 2 * torch.finfo(dtype).eps


@normed_op(torch.add).register_norm(when=_is_restored)
def add(input: NormedTensor, other: NormedTensor, alpha: Number = 1) -> NormedTensor:
    """``(a - b) + b``, where either b may be detached from the other: as every sum, and no larger than a but for rounding.

    Value:       |a| + 2 eps (|a| + |b|), eps that of the dtype
    Sensitivity: that of the sum: it is a's alone where both b move together, which nobody says
    Source:      ``a - b + b = a``
    Gap:         the movements of both b are counted, through which the gradient of the estimator goes
    """
    restored = _restored(input, other, alpha)
    assert restored is not None, "the rule's condition has been checked"
    difference, b, found = restored
    result = unconditional(torch.add, input, other, alpha)
    like_a = type(difference)._wrap(difference.backing, found.size, None, difference.elem_dims)
    to_a, to_b = (factor(x, type(result), result.elem_dims) for x in (like_a, b))
    if to_a is None or to_b is None:
        return result
    a, eps = times(found.size, to_a), _rounding(input.dtype)
    result.norm_size = torch.minimum(result.norm_size, a + eps * (a + times(b.norm_size, to_b)))
    return result


_entries_of_sums = normed_op(torch.add).range_rule


def _entries(args: tuple, kwargs: Mapping[str, Any], of: Any) -> Range | None:
    """Those of a, but for rounding, where it is ``(a - b) + b``."""
    assert _entries_of_sums is not None, "sums have one"
    whole = _entries_of_sums(args, kwargs, of)
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    restored = _restored(a, b, argument(args, kwargs, 2, "alpha", default=1))
    if restored is None:
        return whole
    _, other, found = restored
    beside = known_range(other)
    far = _rounding(other.dtype) * (found.entries.largest_modulus + beside.largest_modulus)
    entries = Range(found.entries.low - far, found.entries.high + far)
    return entries if whole is None else whole.between(max(whole.low, entries.low), min(whole.high, entries.high))


normed_op(torch.add).register_range(_entries, caps=True)
