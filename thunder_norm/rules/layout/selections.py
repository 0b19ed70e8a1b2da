"""Norm rules for entries chosen among two tensors, and for the comparisons that choose.

Operands are broadcast, as in `binary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.rules._facts import Filled, has_infinity, is_plain, with_fact
from thunder_norm.rules._shared import (
    SAME_DIMS,
    Number,
    align,
    broadcast,
    is_constant_along,
    maximum,
    rms,
    root_sum_squares,
    scalar,
)
from thunder_norm.scalars import times


def one_of(operands: Mapping[str, NormedTensor | Number], is_blockwise: bool = False) -> RMSTensor:
    """Each entry from one of the operands: energies add, unless whole groups of elem_dims come from one of them.

    Typically as many entries are from each of k tensors: the mean of their energies, of which one that moves alone has a share 1 / k.
    Where all move the result moves as they do on average, and not as their sum, which would double in each step of a bisection.
    """
    tensors = {name: x for name, x in operands.items() if isinstance(x, NormedTensor)}
    dims, factors = align(broadcast(*(x.shape for x in tensors.values())), *tensors.values())
    sizes = [times(x.norm_size, c) for x, c in zip(tensors.values(), factors, strict=True)]
    if current_mode() == "typical" and 1 < len(tensors) == len(operands):
        share = 1 / len(tensors)
        do_all_move = all(x.perturbation_size is not None for x in tensors.values())
        constants = [c * (share if do_all_move else math.sqrt(share)) for c in factors]
        return rms(
            times(root_sum_squares(*sizes), math.sqrt(share)), dims, sensitivity=dict(zip(tensors, constants, strict=True))
        )
    sizes += [scalar(math.fabs(x), sizes[0]) for x in operands.values() if not isinstance(x, NormedTensor) and x != 0]
    value = maximum(sizes) if is_blockwise or not dims else root_sum_squares(*sizes)
    return rms(value if len(sizes) > 1 else sizes[0], dims, sensitivity=dict(zip(tensors, factors, strict=True)))


@normed_op(torch.fmax).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.fmin).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.max).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.min).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.maximum).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.minimum).register_norm(lift_dims=SAME_DIMS)
def maximum_of(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """max(a, b) and min(a, b).

    Value:       sqrt(|a|^2 + |b|^2), for LinfTensors max(|a|, |b|)    (attained: disjoint supports)
    Sensitivity: 1 to each
    Typical:     see `one_of`
    Source:      max(a, b)^2 <= a^2 + b^2
    """
    return one_of({"input": input, "other": other})


@normed_op(torch.where).register_norm(allow_plain_tensors="constant", lift_dims=SAME_DIMS)
def where(condition: torch.Tensor, input: RMSTensor | Number, other: RMSTensor | Number) -> RMSTensor:
    """a where the condition holds, b elsewhere; the condition is a plain tensor, a and b may be numbers.

    Value:       sqrt(|a|^2 + |b|^2), for LinfTensors or a condition that does not vary along elem_dims max(|a|, |b|)
                 (attained: disjoint supports)
    Sensitivity: 1 to each
    Typical:     see `one_of`
    """
    operands = [x for x in (input, other) if isinstance(x, NormedTensor)]
    if not operands:  # of a condition on parameters alone
        numbers = (float(x) for x in (input, other) if not isinstance(x, NormedTensor))
        size = torch.full((), max(map(math.fabs, numbers)), dtype=NORM_DTYPE, device=condition.device)
        return rms(size, (), sensitivity={})
    dims, _ = align(broadcast(condition.shape, *(x.shape for x in operands)), *operands)
    return one_of({"input": input, "other": other}, is_blockwise=is_constant_along(condition, dims))


def _is_filled(args: dict[str, Any]) -> bool:
    condition, input, other = args["condition"], args["input"], args["other"]
    is_one = is_plain(other) and other.ndim == 0 and isinstance(input, RMSTensor) and condition.shape == input.shape
    return is_one and not has_infinity(other)


@normed_op(torch.where).register_norm(allow_plain_tensors="constant", when=_is_filled)
def where_filled(condition: torch.Tensor, input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """a where the condition holds, else one plain entry: as `where`, and what the norm is without that entry if it is NaN."""
    is_number = other.norm_size == other.norm_size
    numbers = LinfTensor(torch.where(is_number, other.norm_size, 0.0), backing=other.backing)
    size = where(condition, input, numbers).norm_size
    return with_fact(where(condition, input, other), Filled(condition, is_number, size))


# -- comparisons ------------------------------------------------------------------------------------------------------------


def _comparison(input: NormedTensor | torch.Tensor | Number, other: NormedTensor | torch.Tensor | Number) -> None:
    """The plain tensor of bools: it has no norm.

    What is made with it as a mask takes it as given: sensitivities hold while no comparison changes, and beyond that where the
    sides meet, as in ``where(x > 0, x, 0.1 * x)``.
    """


def _closeness(
    input: NormedTensor | torch.Tensor,
    other: NormedTensor | torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> None:
    """As `_comparison`."""


def _test(input: NormedTensor) -> None:
    """The plain tensor of bools: it has no norm."""


@written_as(torch.equal)
def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """What a program decides by, as by ``(x == y).all()``."""
    return input.shape == other.shape and bool((input == other).all())


@written_as(torch.allclose)
def allclose(input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """The same, by `torch.isclose`."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


for _op in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_and, torch.logical_or, torch.logical_xor):
    normed_op(_op).register_norm(_comparison, allow_plain_tensors="constant")
normed_op(torch.isclose).register_norm(_closeness, allow_plain_tensors="constant")
for _op in (torch.isnan, torch.isinf, torch.isfinite, torch.isposinf, torch.isneginf, torch.logical_not, torch.signbit):
    normed_op(_op).register_norm(_test)
