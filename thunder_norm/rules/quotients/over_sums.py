"""Quotients of what is not negative and a sum that it is a term of.

    gain = p / (p + r)                       # a Kalman filter's, of variances p and r
    F.softplus(a) / (F.softplus(a) + F.softplus(b))
    x.square() / (1 + x.square())

By the ranges of both such a quotient is anything above 0; it is a share of the sum, at most 1, and moves as one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact
from thunder_norm.rules._least_moduli import least_modulus
from thunder_norm.rules._shared import argument, refined, rms
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.known_ranges.ranges import Known, Of


@dataclass(frozen=True, eq=False)
class AtLeast:
    """A fact: no entry is less than the one of x there, and none of x is negative."""

    x: Source


def _terms(x: Any) -> list[AtLeast]:
    """What a term that is not negative is at least: itself, and what it is a sum of."""
    if not isinstance(x, RMSTensor) or known_range(x).low < 0:
        return []
    return [AtLeast(Source.of(x)), *(f for f in every_fact(x) if isinstance(f, AtLeast))]


def _is_not_negative(x: Any) -> bool:
    return known_range(x).low >= 0


def _of_a_sum(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    alpha = argument(args, kwargs, 2, "alpha", default=1)
    if current_mode() != "bound" or alpha != 1 or not _is_not_negative(a) or not _is_not_negative(b):
        return out._facts
    found = [*_terms(a), *_terms(b)]
    return Alternatives((*every_fact(out), *found)) if found else out._facts


normed_op(torch.add).register_fact(_of_a_sum)


def _is_share(x: Any, total: Any) -> bool:
    if not isinstance(x, RMSTensor) or not isinstance(total, RMSTensor) or known_range(x).low < 0:
        return False
    own = Source.of(x)
    return any(isinstance(f, AtLeast) and f.x.is_same(own) for f in every_fact(total))


def _is_kept_share(args: dict[str, Any]) -> bool:
    """Whether it is a share of a sum that stays away from 0."""
    x, total = args["input"], args["other"]
    if current_mode() != "bound" or args["rounding_mode"] is not None or not isinstance(total, RMSTensor) or is_local(total):
        return False
    return _is_share(x, total) and known_range(total).is_well_above(0.0)


@normed_op(torch.div).register_norm(when=_is_kept_share)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """x / s, where ``0 <= x <= s`` and s is at least c > 0, entry by entry.

    Value:       min(1, |x| / c)         (attained: x = s)
    Sensitivity: 1 / c to x and to s     (attained: x = s = c)
    Source:      ``d(x / s) = (dx - (x / s) ds) / s``, with ``x / s <= 1``
    Gap:         the norm of s counts by c alone, and one entry is as small as that
    """
    c = least_modulus(other)
    dims, _ = product_dims(input, other)
    a, b = refined(input, dims) / c, refined(other, dims) / c
    n = input.norm_size
    return rms(spoiled((n * a).clamp(max=1.0), n), dims, sensitivity={"input": a, "other": b})


_entries_of_quotients = normed_op(torch.div).range_rule


def _entries(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Between 0 and 1, where it is a share."""
    assert _entries_of_quotients is not None, "quotients have one"
    found = _entries_of_quotients(args, kwargs, of)
    is_whole = kwargs.get("rounding_mode") is None and current_mode() == "bound"
    if not is_whole or not _is_share(argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")):
        return found
    return Range(0.0, 1.0) if found is None else found.between(max(found.low, 0.0), min(found.high, 1.0))


normed_op(torch.div).register_range(_entries)
