"""Norm rules for rounded division and remainders, for parts of floating point numbers, and other functions of two that jump.

As in `steps`: they have values, but no sensitivity to what makes them jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder_norm.core.context import run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import bounded, spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import (
    SAME_DIMS,
    Number,
    align,
    broadcast,
    like,
    maximum,
    refuse,
    refuse_perturbation,
    rms,
    root_sum_squares,
    scalar,
)
from thunder_norm.rules.entrywise.binary import NO_DIVISION, gain_of, scale_by
from thunder_norm.rules.entrywise.powers import only_largest_entry
from thunder_norm.scalars import times

# -- rounded quotients ------------------------------------------------------------------------------------------------------


def _is_rounded(arguments: dict) -> bool:
    return arguments["rounding_mode"] is not None


@normed_op(torch.div).register_norm(allow_plain_tensors="constant", when=_is_rounded)
def div_rounded(input: RMSTensor, other: Number | torch.Tensor, *, rounding_mode: str) -> RMSTensor:
    """a / b rounded, b a number or a plain tensor.

    Value:       |a| max |1 / b|, rounded down that plus 1       (approached by integers; as |a| -> 0 from below)
    Sensitivity: none, it jumps
    Gap:         a norm need not be made of multiples of the divisor, which rounding keeps
    """
    refuse_perturbation(torch.div, input)
    if isinstance(other, torch.Tensor):
        quotient = scale_by(input, gain_of(run_real(torch.reciprocal, (other,), {}), input), "input")
        size, dims = quotient.norm_size, quotient.elem_dims
    elif other == 0:
        raise NormMismatchError("division by 0")
    else:
        size, dims = times(input.norm_size, 1 / math.fabs(other)), input.elem_dims
    return rms(size + 1 if rounding_mode == "floor" else size, dims)


@normed_op(torch.floor_divide).register_norm(allow_plain_tensors="constant")
def floor_divide(input: RMSTensor, other: Number | torch.Tensor) -> RMSTensor:
    """a / b rounded down: `div_rounded`.

    Gap:         as for `div_rounded`
    """
    return div_rounded(input, other, rounding_mode="floor")


refuse(normed_op(torch.floor_divide), NO_DIVISION)


# -- remainders -------------------------------------------------------------------------------------------------------------


def _moving(*operands: NormedTensor | torch.Tensor | Number) -> list:
    return [t for t in operands if isinstance(t, NormedTensor)]


@normed_op(torch.fmod).register_norm
def fmod(input: RMSTensor, other: Number) -> RMSTensor:
    """What the division of x by a number m, rounded towards 0, leaves.  Value min(n, |m|); no sensitivity.

    Gap:         n need not be a remainder below |m| everywhere: larger entries leave less
    """
    refuse_perturbation(torch.fmod, input)
    return like(input, spoiled(input.norm_size.clamp(max=math.fabs(other)), input.norm_size))


@normed_op(torch.fmod).register_norm(lift_dims=SAME_DIMS)
def fmod_by_tensor(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """What the division of a by b, rounded towards 0, leaves.  Value min(|a|, |b|), approached; no sensitivity.

    It is no larger than a, and smaller than b, entry by entry.
    Gap:         the remainder of a is a itself only where |a| < |b|, which both norms need not allow everywhere
    """
    refuse_perturbation(torch.fmod, *_moving(input, other))
    dims, (ca, cb) = align(broadcast(input.shape, other.shape), input, other)
    size = torch.minimum(times(input.norm_size, ca), times(other.norm_size, cb))
    return rms(spoiled(size, input.norm_size), dims)


@normed_op(torch.fmod).register_norm(allow_plain_tensors="constant")
def fmod_by_integers(input: RMSTensor, other: torch.Tensor) -> RMSTensor:
    """What the division by a plain tensor of integers leaves: `fmod_by_tensor`, from the largest of them.

    Gap:         as for `fmod_by_tensor`; smaller integers leave less than the largest
    """
    gain = gain_of(other, input)
    assert isinstance(gain, RMSTensor), "it is lifted to a LinfTensor"
    return fmod_by_tensor(input, gain)


@normed_op(torch.remainder).register_norm
def remainder(input: RMSTensor, other: Number) -> RMSTensor:
    """What the division of x by a number m, rounded down, leaves: between 0 and m.  Value |m|; no sensitivity.

    Gap:         only entries next to 0, of the other sign, leave nearly m
    """
    refuse_perturbation(torch.remainder, input)
    return like(input, scalar(math.fabs(other), input.norm_size))


@normed_op(torch.remainder).register_norm(lift_dims=SAME_DIMS)
def remainder_by_tensor(input: RMSTensor | Number, other: RMSTensor) -> RMSTensor:
    """What the division of a (or a number) by b, rounded down, leaves.  Value |b|, approached by a -> 0; no sensitivity.

    Gap:         only entries next to 0, of the other sign, leave nearly b
    """
    refuse_perturbation(torch.remainder, *_moving(input, other))
    shape = broadcast(input.shape, other.shape) if isinstance(input, NormedTensor) else tuple(other.shape)
    dims, (c,) = align(shape, other)
    return rms(times(other.norm_size, c), dims)


@normed_op(torch.remainder).register_norm(allow_plain_tensors="constant")
def remainder_by_integers(input: RMSTensor, other: torch.Tensor) -> RMSTensor:
    """What the division by a plain tensor of integers leaves: `remainder_by_tensor`, from the largest of them.

    Gap:         as for `remainder_by_tensor`; smaller integers leave less than the largest
    """
    gain = gain_of(other, input)
    assert isinstance(gain, RMSTensor), "it is lifted to a LinfTensor"
    return remainder_by_tensor(input, gain)


# -- bounded functions of two -----------------------------------------------------------------------------------------------


def _bounded(op: Callable, size: float, doc: str, at_infinity: bool = False) -> None:
    def rule(input: RMSTensor | torch.Tensor, other: RMSTensor | torch.Tensor) -> RMSTensor:
        operands = _moving(input, other)
        refuse_perturbation(op, *operands)
        dims, _ = align(broadcast(input.shape, other.shape), *operands)
        n = maximum([x.norm_size for x in operands])
        return rms(bounded(size, n) if at_infinity else spoiled(scalar(size, n), n), dims)

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = doc
    normed_op(op).register_norm(rule, allow_plain_tensors="constant")


_bounded(
    torch.atan2, math.pi, "Angle of (b, a).  Value pi, attained; no sensitivity, on the negative axis it jumps.", at_infinity=True
)
_bounded(
    torch.igamma,
    1.0,
    "P(a, x), in [0, 1].  Value 1, approached as a -> 0; no sensitivity, at a = 0 = x it jumps.\n\nGap: norms of a and x do not count.",
)
_bounded(
    torch.igammac,
    1.0,
    "1 - P(a, x), in [0, 1].  Value 1, attained at x = 0; no sensitivity, at a = 0 = x it jumps.\n\nGap: norms of a and x do not count.",
)


# -- floating point numbers -------------------------------------------------------------------------------------------------


@normed_op(torch.nextafter).register_norm(allow_plain_tensors="constant")
def nextafter(input: RMSTensor, other: RMSTensor | torch.Tensor) -> RMSTensor:
    """The number after x on the way to y.

    Value:       (1 + e) n + s, e the precision and s the smallest normal number of the type      (attained at powers of 2, away from 0)
    Sensitivity: none: on the way from below y to above it, it jumps by two numbers
    """
    refuse_perturbation(torch.nextafter, *_moving(input, other))
    dims, (c,) = align(broadcast(input.shape, other.shape), input)
    numbers = torch.finfo(input.dtype)
    size = times(input.norm_size, c * (1 + numbers.eps)) + numbers.tiny
    return rms(size + bounded(0.0, other.norm_size) if isinstance(other, NormedTensor) else size, dims)


@normed_op(torch.frexp).register_norm
def frexp(input: RMSTensor) -> tuple:
    """x = m 2^e with 1/2 <= |m| < 1, or m = 0.  Value of m 1, approached; no sensitivity, at powers of 2 it jumps.  e is plain.

    Gap:         only numbers just below powers of 2 have a mantissa next to 1
    """
    refuse_perturbation(torch.frexp, input)
    return like(input, scalar(1.0, input.norm_size)), None


@normed_op(torch.ldexp).register_norm(allow_plain_tensors="constant")
def ldexp(input: NormedTensor, other: torch.Tensor) -> NormedTensor:
    """x 2^b with a plain tensor b.  Value |x| max 2^b, sensitivity max 2^b, both attained where b is constant."""
    return scale_by(input, gain_of(run_real(torch.exp2, (other,), {}), input), "input")


@normed_op(torch.ldexp).register_norm
def ldexp_by_normed(input: RMSTensor, other: LinfTensor | RMSTensor) -> RMSTensor:
    """x 2^b.  Value |x| 2^|b| for the largest entry of b, attained; sensitivities 2^|b|, and log(2) |x| 2^|b| to b.

    Raises NormMismatchError for an RMS norm of b (see `exp`).
    """
    only_largest_entry(other, "a power of 2", in_every_mode=True)
    gain = torch.exp2(other.norm_size)
    dims, (c,) = align(broadcast(input.shape, other.shape), input)
    size = times(input.norm_size * gain, c)
    return rms(size, dims, sensitivity={"input": times(gain, c), "other": size * math.log(2)})


@normed_op(torch.heaviside).register_norm(allow_plain_tensors="constant")
def heaviside(input: RMSTensor | torch.Tensor, values: RMSTensor | torch.Tensor) -> RMSTensor:
    """0, 1, or v where x = 0.

    Value:       from the largest entry of v max(1, |v|), attained; from RMS sqrt(1 + |v|^2), approached by a spike of v, all else 1
    Sensitivity: 1 to v; none to x, at 0 it jumps
    Gap:         from RMS a constant v and ones cannot be in the same places
    """
    refuse_perturbation(torch.heaviside, *_moving(input))
    shape, operands = broadcast(input.shape, values.shape), _moving(input, values)
    if isinstance(values, NormedTensor):
        dims, (c,) = align(shape, values)
        n = times(values.norm_size, c)
    else:
        dims, _ = align(shape, *operands)
        n, c = gain_of(values, operands[0]).norm_size, 1.0
    is_rms = isinstance(values, NormedTensor) and bool(dims)
    size = root_sum_squares(n, scalar(1.0, n)) if is_rms else n.clamp(min=1.0)
    size = size + bounded(0.0, input.norm_size) if isinstance(input, NormedTensor) else size
    return rms(size, dims, sensitivity={"values": c})
