"""Between which numbers a function of another tensor is where that is 0, entry by entry: `WhereZero`.

    relu(u.abs() - softplus(t))         # 0 where u is
    torch.sqrt(u.abs() + 1) - 1         # 0 as well
    torch.exp(-(u.abs() / s) ** 2)      # 1

What is known of it starts at a modulus, and follows from what the ranges of functions of entries say of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import current_mode
from thunder_norm.core.known_ranges import range_within
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact
from thunder_norm.rules._shared import argument

_ZERO = Range(0.0, 0.0)
# What may be left of 0 by the rounding of numbers of size 1: ``(sqrt(1.004004) - 1) / 0.002 - 1``.
_ROUNDED = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class WhereZero:
    """A fact: where an entry of x is 0, this one is between these numbers, whatever else it is made of."""

    x: Source
    entries: Range


def is_zero_where(v: Any, x: Source) -> bool:
    """Whether each entry of v is 0 where that of x is, but for rounding."""
    if not isinstance(v, NormedTensor):
        return False
    at = _entries_where_zero(v, x)
    return at is not None and -_ROUNDED <= at.low <= at.high <= _ROUNDED


def _entries_where_zero(v: Any, x: Source) -> Range | None:
    """Between which numbers an argument's entries are where those of x are 0."""
    if isinstance(v, NormedTensor) and v.shape == x.backing.shape:
        found = next((f for f in every_fact(v) if isinstance(f, WhereZero) and f.x.is_same(x)), None)
        if found is not None:
            return found.entries
        if x.is_same(Source.of(v)):
            return _ZERO
    return range_within(v)


def _sources(args: tuple, kwargs: dict[str, Any]) -> list[Source]:
    """The tensors that arguments are known as functions of, each once."""
    found: list[Source] = []
    for f in (f for x in (*args, *kwargs.values()) for f in every_fact(x)):
        if isinstance(f, WhereZero) and not any(f.x.is_same(x) for x in found):
            found.append(f.x)
    return found


def _following(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """What is known of the result of a function of entries."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        of_entries = normed_op(op).range_rule
        if of_entries is None:
            return out._facts
        found = []
        for x in _sources(args, kwargs):
            if x.backing.shape != out.shape:
                continue
            at = of_entries(args, kwargs, lambda v, x=x: _entries_where_zero(v, x))
            if at is not None:
                found.append(WhereZero(x, at))
        return Alternatives((*every_fact(out), *found)) if found else out._facts

    return rule


def _modulus(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x = argument(args, kwargs, 0, "input", "self")
    if x.perturbation_size is None or current_mode() == "modula":
        return out._facts
    return Alternatives((*every_fact(out), WhereZero(Source.of(x), _ZERO)))


normed_op(torch.abs).register_fact(_modulus)

# functions of entries whose results are as large as what they are made of, or larger by broadcasting
_OF_ENTRIES = (
    torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.neg, torch.square, torch.pow, torch.sqrt, torch.exp, torch.expm1,
    torch.log1p, torch.log, torch.sigmoid, torch.tanh, torch.relu, F.relu, F.relu6, F.softplus, torch.clamp, torch.clamp_min,
    torch.clamp_max, torch.maximum, torch.minimum, torch.reciprocal, torch.where, F.threshold, F.hardtanh, F.leaky_relu, F.elu,
    F.gelu, F.silu, torch.erf, torch.atan, torch.asinh, torch.sinh, torch.sin, torch.nan_to_num, torch.abs,
)  # fmt: skip
for _op in _OF_ENTRIES:
    normed_op(_op).register_fact(_following(_op))
