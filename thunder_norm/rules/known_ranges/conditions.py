"""What a comparison says of a tensor where it holds, and where it does not.

    torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
    x / torch.where(length > 1e-6, length, torch.ones_like(length))
    length.masked_fill(length < 1e-6, 1.0)

What is chosen by ``length > 1e-6`` is more than 1e-6, whatever the norms.  The bools are a plain tensor, which has no facts of its own: who they
are is remembered beside them, for as long as nothing is written into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.context import current_environment
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import Source
from thunder_norm.rules._shared import argument
from thunder_norm.rules.known_ranges import partial_sums  # noqa: F401 - its rules of what is chosen are those that are asked here
from thunder_norm.rules.known_ranges.ranges import Known, Of

_EVERYWHERE = Range()


@dataclass(frozen=True, eq=False)
class _Said:
    """Between which numbers a tensor is where a condition holds, and where it does not."""

    x: Source
    writes: int
    true: Range
    false: Range


_said: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the tensor of bools: how often it had been written into, and what it says


def _writes_into(t: torch.Tensor) -> int:
    return current_environment().writes_into(t)


def _compare(is_more: bool) -> Callable[[tuple, Mapping[str, Any], Any], None]:
    """Of ``a > b``, or ``a >= b``; or of ``a < b``.  A number that is no number is where it does not hold: norms are none then either."""

    def rule(args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
        a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
        if isinstance(out, NormedTensor) or not isinstance(out, torch.Tensor):
            return
        more, less = (a, b) if is_more else (b, a)
        of_more, of_less = known_range(more), known_range(less)
        said = [
            _Said(Source.of(x), _writes_into(x.backing), true, false)
            for x, true, false in (
                (more, Range(low=of_less.low), Range(high=of_less.high)),
                (less, Range(high=of_more.high), Range(low=of_more.low)),
            )
            if isinstance(x, NormedTensor) and not is_complex(x) and (true.says_something or false.says_something)
        ]
        if said:
            _said[out] = _writes_into(out), said

    return rule


for _op in (torch.gt, torch.ge):
    normed_op(_op).register_condition(_compare(True))
for _op in (torch.lt, torch.le):
    normed_op(_op).register_condition(_compare(False))


def _where_it_holds(condition: Any, x: Any, holds: bool) -> Range:
    """Between which numbers the entries of x are where a condition holds, or does not, by what it compares."""
    found = _said.get(condition) if isinstance(condition, torch.Tensor) and isinstance(x, NormedTensor) else None
    if found is None or found[0] != _writes_into(condition):
        return _EVERYWHERE
    own, writes = Source.of(x), _writes_into(x.backing)
    return next((s.true if holds else s.false for s in found[1] if s.x.is_same(own) and s.writes == writes), _EVERYWHERE)


def _kept(found: Range | None, where: Range) -> Range | None:
    """Those of a range that are in another one too."""
    if not where.says_something:
        return found
    found = found or _EVERYWHERE
    low, high = max(found.low, where.low), min(found.high, where.high)
    least, most = found.least if low == found.low else None, found.most if high == found.high else None
    return found if low > high else Range(low, high, averaged=found.averaged, least=least, most=most)


def _by_condition(op: Callable, at: int, name: str, sides: Mapping[tuple[int, str], bool]) -> None:
    """Have the range rule of an operation know which entries are left of what a condition keeps.

    Args:
        op: the operation.
        at: the place of the condition.
        name: its name.
        sides: place and name of what is kept where the condition holds (True), and where it does not.
    """
    earlier = normed_op(op).range_rule
    assert earlier is not None, "`ranges` gave it one"

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        condition = argument(args, kwargs, at, name)
        given = [(argument(args, kwargs, i, n, "self"), holds) for (i, n), holds in sides.items()]
        where = {id(x): _where_it_holds(condition, x, holds) for x, holds in given}
        if len(where) < len(given):  # both are one tensor
            return earlier(args, kwargs, of)
        return earlier(args, kwargs, lambda v: _kept(of(v), where.get(id(v), _EVERYWHERE)))

    normed_op(op).register_range(rule)


_by_condition(torch.where, 0, "condition", {(1, "input"): True, (2, "other"): False})
_by_condition(torch.masked_fill, 1, "mask", {(0, "input"): False})
