"""How far a tensor is from its entries rounded, and what a division by a number leaves.

    cell = x.floor().long();  w = x - cell          # between 0 and 1: weights of a grid's corners
    x - x.trunc()
    x % 1.0

By norms alone such a difference is as large as both.  Where sizes are typical ones, integers count as well; they are a plain tensor, which has no
facts of its own: what they are is remembered beside them, for as long as nothing is written into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.context import current_environment, current_mode
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact
from thunder_norm.rules._shared import argument
from thunder_norm.rules.known_ranges.ranges import Known, Of


@dataclass(frozen=True, eq=False)
class Rounded:
    """A fact: it is x less numbers from `low` to `high`; the memory of x had been written into so often."""

    x: Source
    writes: int
    low: float
    high: float


_integers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the plain tensor: how often it had been written into, and what it is


def _writes_into(t: torch.Tensor) -> int:
    return current_environment().writes_into(t)


def _rounded(x: NormedTensor, low: float, high: float) -> Rounded:
    return Rounded(Source.of(x), _writes_into(x.backing), low, high)


def _rounding(low: float, high: float) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x = argument(args, kwargs, 0, "input", "self")
        if not isinstance(x, NormedTensor) or is_complex(x) or argument(args, kwargs, 1, "decimals", default=0) != 0:
            return out._facts
        return Alternatives((*every_fact(out), _rounded(x, low, high)))

    return rule


_WAYS = {torch.floor: (0.0, 1.0), torch.ceil: (-1.0, 0.0), torch.trunc: (-1.0, 1.0), torch.round: (-0.5, 0.5)}
for _op, _between in _WAYS.items():
    normed_op(_op).register_fact(_rounding(*_between))


def _cast(args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
    """Remember what integers are that a normed tensor was cast to: those it is, or rounded towards 0."""
    x = argument(args, kwargs, 0, "input", "self")
    if not isinstance(x, NormedTensor) or isinstance(out, NormedTensor) or not isinstance(out, torch.Tensor) or is_complex(x):
        return
    if out.dtype not in (torch.int64, torch.int32):
        return
    found = fact(x, Rounded) or _rounded(x, 0.0 if known_range(x).low >= 0 else -1.0, 1.0)
    _integers[out] = _writes_into(out), found


for _op in (torch.Tensor.to, torch.Tensor.type, torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default):
    normed_op(_op).register_condition(_cast)


def _known(t: Any) -> Rounded | None:
    """What a tensor is of another, where neither has been written into since; of integers where nothing is claimed of those beyond their dtype."""
    found = fact(t, Rounded)
    if found is None and current_mode() != "bound" and isinstance(t, torch.Tensor) and not isinstance(t, NormedTensor):
        noted = _integers.get(t)
        found = noted[1] if noted is not None and noted[0] == _writes_into(t) else None
    return found if found is not None and found.writes == _writes_into(found.x.backing) else None


def _shifted(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """A number more."""
    x, by = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    found = fact(x, Rounded)
    if found is None or type(by) not in (int, float) or argument(args, kwargs, 2, "alpha", default=1) != 1:
        return out._facts
    return Alternatives((*every_fact(out), replace(found, low=found.low - by, high=found.high - by)))


normed_op(torch.add).register_fact(_shifted)


def _away(x: Any, other: Any) -> Range | None:
    """Of x less what it is rounded to."""
    found = _known(other)
    if found is None or not isinstance(x, NormedTensor) or not found.x.is_same(Source.of(x)):
        return None
    return Range(found.low, found.high)


def _of_differences(op: Callable, is_reversed: bool) -> None:
    """Have the range rule of a difference know what is left of a tensor by what it is rounded to, in either order."""
    earlier = normed_op(op).range_rule
    assert earlier is not None, "differences have one"

    def rule(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
        whole = earlier(args, kwargs, of)
        a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
        if argument(args, kwargs, 2, "alpha", default=1) != 1:
            return whole
        found, opposite = _away(a, b), _away(b, a)
        known = found if opposite is None else opposite.negative()
        if known is None:
            return whole
        known = known.negative() if is_reversed else known
        return known if whole is None else whole.between(max(whole.low, known.low), min(whole.high, known.high))

    normed_op(op).register_range(rule, caps=True)


_of_differences(torch.sub, is_reversed=False)
_of_differences(torch.rsub, is_reversed=True)


def _left(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """What the division by a number leaves, rounded down: of the number's sign."""
    by = argument(args, kwargs, 1, "other")
    if type(by) not in (int, float) or not math.isfinite(by):
        return None
    return Range(min(by, 0.0), max(by, 0.0))


normed_op(torch.remainder).register_range(_left)
normed_op(torch.frac).register_range(lambda args, kwargs, of: Range(-1.0, 1.0))
