"""Choices, of which some entries are infinite, or numbers of one sign: minus infinity where a path is closed, -1e9 where a token is none.

torch.where(may_skip, before, torch.full_like(before, -math.inf))
torch.where(is_same, distances, math.inf).amin(-1)
tokens.masked_fill(is_padding, -1e9).max(1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range, range_of_constant
from thunder_norm.core.local import is_local
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import (
    Lowered,
    Masked,
    MaskedAbove,
    Raised,
    Source,
    fact,
    has_infinity,
    ruled,
    unconditional,
    values_known,
)
from thunder_norm.rules._shared import SAME_DIMS, Number, argument
from thunder_norm.rules.known_ranges.partial_sums import opposite
from thunder_norm.rules.layout.writing import with_entries
from thunder_norm.rules.weighted._infinities import (
    KINDS,
    Infinities,
    is_of_all_inputs,
    parts,
    stated,
    with_known,
)


def _side(x: Any, kind: type[Infinities], infinity: float, out: NormedTensor) -> tuple[Any, torch.Tensor | None] | None:
    """`parts` of what a choice is between, which may be a number."""
    if isinstance(x, int | float):
        with _disable_current_modes():
            x = torch.full((), x, dtype=torch.float64)
    return parts(x, kind, infinity, out.norm_size)


def _is_everywhere(mask: torch.Tensor | None) -> bool:
    values = None if mask is None else values_known(mask)
    if values is None:
        return False
    with _disable_current_modes():
        return bool(values.all())


def _chosen_mask(
    condition: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, shape: torch.Size
) -> torch.Tensor | None:
    """Where the infinite entries of two tensors are after a choice between them; None if that is not known.

    Of a condition without values it is known if it alone decides.
    """
    if condition.shape == shape and (a is None or b is None):
        if _is_everywhere(a):
            return condition
        if _is_everywhere(b):
            return opposite(condition)
    known = [None if m is None else values_known(m) for m in (condition, a, b)]
    if any(m is not None and k is None for m, k in zip((condition, a, b), known, strict=True)):
        return None
    with _disable_current_modes():
        here, *sides = (torch.zeros((), dtype=torch.bool) if k is None else k.cpu() for k in known)
        return torch.where(here, *sides).expand(tuple(shape))


def _is_between_infinities(args: dict[str, Any]) -> bool:
    """Whether one side is normed, or both, and something on either side is infinite."""
    sides = args["input"], args["other"]
    normed = [x for x in sides if isinstance(x, NormedTensor)]
    if not normed or not all(is_of_all_inputs(x) and isinstance(x, RMSTensor) for x in normed):
        return False
    return not isinstance(args["condition"], NormedTensor) and any(map(_is_infinite_in_part, sides))


def _is_infinite_in_part(x: Any) -> bool:
    if isinstance(x, NormedTensor):
        return (fact(x, Masked) or fact(x, MaskedAbove)) is not None
    return abs(x) == math.inf if isinstance(x, int | float) else has_infinity(x)


@normed_op(torch.where).register_norm(when=_is_between_infinities, allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def where(
    condition: torch.Tensor, input: RMSTensor | torch.Tensor | Number, other: RMSTensor | torch.Tensor | Number
) -> NormedTensor:
    """A choice, of which some entries are infinite: as ever; what the others are is remembered."""
    return unconditional(torch.where, condition, input, other)


def _chosen(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    condition, a, b = (argument(args, kwargs, i, *n) for i, n in enumerate((("condition",), ("input", "self"), ("other",))))
    if not _is_between_infinities({"condition": condition, "input": a, "other": b}):
        return with_known(out, [_beside(a, b, condition, out, False), _beside(b, a, condition, out, True)])
    return with_known(out, [_of_one_kind(*k, condition, (a, b), out) for k in KINDS])


def _of_one_kind(
    kind: type[Infinities], infinity: float, condition: torch.Tensor, sides: tuple[Any, Any], out: NormedTensor
) -> Infinities | None:
    found = [f for side in sides if (f := _side(side, kind, infinity, out)) is not None]
    if len(found) < 2 or all(mask is None for _, mask in found):
        return None
    (x, of_x), (y, of_y) = found
    mask = _chosen_mask(condition, of_x, of_y, out.shape)
    if mask is None:
        return None
    left = x if _is_everywhere(of_y) else y if _is_everywhere(of_x) else None
    if left is not None and left.shape == out.shape:  # all that is left is one of them, as it is
        return kind(Source.of(left), mask)
    claim = ruled(torch.where, (condition, x, y), {})
    return None if claim is None else stated(kind, claim, mask, out)


normed_op(torch.where).register_fact(_chosen)


def _beside(x: Any, value: Any, condition: Any, out: NormedTensor, of_value: bool) -> Lowered | Raised | None:
    """That the entries of a result are those of x, and where a condition is `of_value` numbers of one sign that do not move."""
    if isinstance(condition, NormedTensor) or not isinstance(x, RMSTensor) or x.shape != out.shape:
        return None
    found = _numbers(value)
    kind = None if found is None else Lowered if found.high <= 0 else Raised if found.low >= 0 else None
    return None if kind is None else kind(Source.of(x), condition if of_value else opposite(condition))


def _numbers(value: Any) -> Range | None:
    """Between which numbers constants are."""
    if not isinstance(value, torch.Tensor):
        return Range(float(value), float(value))
    if not isinstance(value, NormedTensor):
        return range_of_constant(value)
    found = known_range(value)
    return found if found.low == found.high else None


def _filled(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    given = dict(zip(("input", "mask", "value"), args, strict=False)) | kwargs
    return with_known(out, [_beside(given["input"], given["value"], given["mask"], out, True)])


normed_op(torch.masked_fill).register_fact(_filled)


def _written(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """``x[mask] = value``, of a mask of leading dimensions."""
    given = dict(zip(("input", "index", "value"), args, strict=False)) | kwargs
    x, index = given["input"], given["index"]
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.shape != x.shape[: index.ndim]:
        return out._facts
    mask = run_real(torch.reshape, (index, (*index.shape, *(1 for _ in x.shape[index.ndim :]))), {})
    return with_known(out, [_beside(x, given["value"], mask, out, True)])


with_entries.register_fact(_written)


def _full(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Infinity everywhere, in the shape of a normed tensor."""
    value = argument(args, kwargs, 1, "fill_value")
    kind = next((k for k, infinity in KINDS if value == infinity), None)
    if kind is None or is_local(out):
        return out._facts
    with _disable_current_modes():
        mask = torch.ones(tuple(out.shape), dtype=torch.bool)
    none = Source(LinfTensor, out.backing, torch.zeros_like(out.norm_size), None, ())
    return with_known(out, [kind(none, mask)])


normed_op(torch.full_like).register_fact(_full)
