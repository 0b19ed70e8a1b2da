"""Between which numbers the entries of arguments and results are, as far as it is known (`ranges`)."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from thunder_norm.core.context import current_environment, current_mode, lift
from thunder_norm.core.conversions import factor
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import of_floats, spoiled
from thunder_norm.core.ranges import Range, range_of_values
from thunder_norm.core.registry import NormedOp
from thunder_norm.core.tensors import NormedTensor, has_norm, is_complex

_ANY = Range()
_LOSE_INFINITY = ("add", "sub", "rsub")  # what two terms leave of each other (x - floor x) is NaN where both are infinite


def range_of(value: Any) -> Range | None:
    """Between which numbers an argument is, or its entries are: that of a number is the number."""
    if isinstance(value, NormedTensor):
        return value._range
    if isinstance(value, torch.Tensor):
        return current_environment().range_of(value)
    return Range(value, value) if isinstance(value, int | float) else None


def known_range(value: Any) -> Range:
    """The same; all numbers where nothing is known."""
    return range_of(value) or _ANY


def range_by_rule(op: NormedOp, args: tuple, kwargs: dict) -> Range | None:
    """Between which numbers a result's entries are, where that is more than its norm says."""
    found = None if op.range_rule is None else of_floats(op.range_rule, args, kwargs, range_within)
    return None if found is None or found.is_known_by_norms_alone else found


def no_larger(op: NormedOp, result: Any, found: Range | None, dtype: torch.dtype) -> Any:
    """A rule's result, whose norm is at most that of the largest entry in a range: 1 - sigmoid(x) is at most 1, whatever the norms say."""
    if (
        not op.range_caps
        or found is None
        or current_mode() == "modula"
        or not isinstance(result, RMSTensor)
        or result._is_multilinear
    ):
        return result
    largest = found.rounded(dtype).largest_modulus
    if largest < math.inf:
        n = result.norm_size
        capped = n.clamp(max=largest)
        result.norm_size = spoiled(capped, n) if op.key in _LOSE_INFINITY else capped
    return result


def range_within(value: Any) -> Range | None:
    """What `range_of` says, for another operation's range: with ends that depend on norms, where they bound entries, and of constants by their values."""
    found = range_of(value)
    if not isinstance(value, torch.Tensor) or is_complex(value):
        return found
    if not isinstance(value, NormedTensor):
        if found is None or found.low < 0 < found.high:  # no sign by what made it: ``t[1:] - t[:-1]``
            found = range_of_constant(value) or found
        if found is not None or current_mode() != "bound" or not has_norm(value) or current_environment().is_constant(value):
            return found
        return _ANY.within(lambda: lift(value, LinfTensor).norm_size)
    if current_mode() != "bound":
        return found
    c = factor(value, LinfTensor, ())
    return found if c is None else (found or _ANY).within(functools.partial(torch.mul, value.norm_size, c))


def range_of_constant(t: torch.Tensor) -> Range | None:
    """Between which numbers the entries of a plain tensor are, if they are the program's own, or a buffer's, and known by now."""
    surroundings = current_environment()
    return range_of_values(surroundings.values_of(t)) if surroundings.counts_by_values(t) else None
