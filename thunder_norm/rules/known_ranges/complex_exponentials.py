"""Exponentials of complex tensors, as state space models have them, and complex numbers beside tensors.

``|e^z| = e^(Re z)``: where the real part is known to be at most h, as ``-exp(a) + i b`` says, no entry is larger than e^h.  So real parts
are followed from what makes complex tensors to their exponential, as facts.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_environment, current_mode, lift
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import range_of, range_of_constant
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.ranges import OfEntries, Range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, has_norm, is_complex
from thunder_norm.rules._facts import fact, unconditional, with_fact
from thunder_norm.rules._shared import SAME_DIMS, argument, is_moving, like, over_dims_of, refined, rms, scaled
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.entrywise.powers import reach
from thunder_norm.rules.known_ranges.ranges import Known, Of
from thunder_norm.scalars import times

_LARGE = 700.0  # e to that is a float64


@dataclass(frozen=True, eq=False)
class RealPart(OfEntries):
    """A fact: between which numbers the real parts of a complex tensor are."""

    range: Range


@dataclass(frozen=True, eq=False)
class Modulus(OfEntries):
    """A fact: between which numbers the moduli of a complex tensor are."""

    range: Range


# -- complex numbers beside tensors ---------------------------------------------------------------------------------------


def _is_number(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda args: isinstance(args[name], builtins.complex)


def _turned(x: NormedTensor, result: NormedTensor, c: builtins.complex) -> NormedTensor:
    """A real tensor times an imaginary number has no real part."""
    return with_fact(result, RealPart(Range(0.0, 0.0))) if c.real == 0 and not is_complex(x) else result


@normed_op(torch.mul).register_norm(when=_is_number("other"), takes_complex=True)
def mul_complex(input: NormedTensor, other: Any) -> NormedTensor:
    """c a for a complex number.  Value |c| |a|, sensitivity |c|, in every kind."""
    return _turned(input, scaled(input, abs(other)), other)


@normed_op(torch.mul).register_norm(when=_is_number("input"), takes_complex=True)
def complex_mul(input: Any, other: NormedTensor) -> NormedTensor:
    """c b for a complex number.  Value |c| |b|, sensitivity |c|, in every kind.

    Untried:     in eager programs torch takes the number second: `mul_complex`
    """
    return _turned(other, scaled(other, abs(input), name="other"), input)


@normed_op(torch.div).register_norm(when=_is_number("other"), takes_complex=True)
def div_complex(input: NormedTensor, other: Any) -> NormedTensor:
    """a / c for a complex number.  Value |a| / |c|, sensitivity 1 / |c|, in every kind."""
    return _turned(input, scaled(input, 1 / abs(other)), 1 / other)


@normed_op(torch.sub).register_norm(when=_is_number("other"), takes_complex=True)
@normed_op(torch.add).register_norm(when=_is_number("other"), takes_complex=True)
def add_complex(input: RMSTensor, other: Any, alpha: Any = 1) -> RMSTensor:
    """a + alpha c for a complex number.

    Value:       |a| + |alpha c|      (attained by a constant a of c's phase)
    Sensitivity: 1
    Gap:         a real tensor has the phase of a real number alone
    """
    return like(input, input.norm_size + abs(alpha * other), sensitivity={"input": 1})


@normed_op(torch.rsub).register_norm(when=_is_number("other"), takes_complex=True)
def rsub_complex(input: RMSTensor, other: Any) -> RMSTensor:
    """c - a for a complex number.  Value |c| + |a|, attained by a constant; sensitivity 1."""
    return add_complex(input, other)


# -- real parts -----------------------------------------------------------------------------------------------------------


def _real_part(x: Any) -> Range | None:
    """The range of the real parts of a tensor's entries; a real tensor's own."""
    if isinstance(x, torch.Tensor) and is_complex(x):
        if not isinstance(x, NormedTensor) and is_moving(x):  # made from parameters: what made it says more than it does itself
            x = lift(x, LinfTensor, ())
        found = fact(x, RealPart)
        return None if found is None else found.range
    return range_of(x) if isinstance(x, NormedTensor | int | float) else None


def _is_known(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether some of the arguments are complex, and the real parts of all are known."""
    return lambda args: (
        any(isinstance(args[n], torch.Tensor) and is_complex(args[n]) for n in names)
        and all(_real_part(args[n]) is not None for n in names)
    )


@normed_op(torch.complex).register_norm(
    when=lambda args: range_of(args["real"]) is not None,
    lift_dims={"real": over_dims_of("imag"), "imag": over_dims_of("real")},
)
def complex(real: RMSTensor, imag: RMSTensor) -> NormedTensor:
    """a + i b: as ever, and its real parts."""
    found = range_of(real)
    assert found is not None, "the rule's condition has been checked"
    return with_fact(unconditional(torch.complex, real, imag), RealPart(found))


def _sum(op: Callable, sign: float) -> None:
    def rule(input: RMSTensor, other: RMSTensor, alpha: int | float = 1) -> NormedTensor:
        a, b = _real_part(input), _real_part(other)
        assert a is not None and b is not None, "the rule's condition has been checked"
        return with_fact(unconditional(op, input, other, alpha), RealPart(a.plus(b.scaled(sign * float(alpha)))))

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f"a {'+' if sign > 0 else '-'} alpha b: as ever, and its real parts."
    normed_op(op).register_norm(rule, when=_is_known("input", "other"), takes_complex=True)


_sum(torch.add, 1.0)
_sum(torch.sub, -1.0)


def _is_scaled(args: Mapping[str, Any]) -> bool:
    a, b = args["input"], args["other"]
    if not all(isinstance(t, torch.Tensor) for t in (a, b)) or is_complex(a) == is_complex(b):
        return False
    return range_of(b if is_complex(a) else a) is not None and _real_part(a if is_complex(a) else b) is not None


@normed_op(torch.mul).register_norm(when=_is_scaled, takes_complex=True)
def mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """A complex tensor times a real one: as ever, and its real parts."""
    a, b = _real_part(input), _real_part(other)
    assert a is not None and b is not None, "the rule's condition has been checked"
    return with_fact(unconditional(torch.mul, input, other), RealPart(a.times(b)))


def _is_scaled_by_integers(args: Mapping[str, Any]) -> bool:
    x, other = args["input"], args["other"]
    is_plain = isinstance(other, torch.Tensor) and not isinstance(other, NormedTensor) and not has_norm(other)
    if not is_plain or not isinstance(x, torch.Tensor) or not is_complex(x):
        return False
    # a tensor made from parameters is taken by the rule as it is lifted here
    normed = x if isinstance(x, NormedTensor) or current_environment().is_constant(x) else lift(x, RMSTensor)
    return fact(normed, RealPart) is not None and range_of_constant(other) is not None


@normed_op(torch.mul).register_norm(when=_is_scaled_by_integers, allow_plain_tensors="constant", takes_complex=True)
def mul_integers(input: RMSTensor, other: torch.Tensor) -> NormedTensor:
    """A complex tensor times integers that are known by now, such as places: as ever, and its real parts."""
    known, by = fact(input, RealPart), range_of_constant(other)
    assert known is not None and by is not None, "the rule's condition has been checked"
    return with_fact(unconditional(torch.mul, input, other), RealPart(known.range.times(by)))


def _has_fact(args: Mapping[str, Any]) -> bool:
    return fact(args["input"], RealPart) is not None


@normed_op(torch.unsqueeze).register_norm(when=_has_fact, takes_complex=True)
def unsqueeze(input: RMSTensor, dim: int) -> NormedTensor:
    """The same numbers: as ever, and their real parts."""
    return with_fact(unconditional(torch.unsqueeze, input, dim), fact(input, RealPart))


@normed_op(torch.Tensor.__getitem__).register_norm(when=_has_fact, takes_complex=True)
def getitem(input: RMSTensor, index: Any) -> NormedTensor:
    """Some of the numbers: as ever, and their real parts."""
    return with_fact(unconditional(torch.Tensor.__getitem__, input, index), fact(input, RealPart))


# -- exponentials ---------------------------------------------------------------------------------------------------------


@normed_op(torch.exp).register_norm(when=lambda args: is_complex(args["input"]), takes_complex=True)
def exp(input: LinfTensor | RMSTensor) -> RMSTensor:
    """e^z of complex numbers.

    Value:       e^R for the largest modulus R, or e^h for real parts of at most h if that is less    (attained by real numbers)
    Sensitivity: the same
    Typical:     e^(n^2 / 2): the real parts are Gaussian, of variance n^2 / 2; as far as n <= 1, times n beyond, as of real numbers; at
                 most e^h
    Source:      |e^z| = e^(Re z), and so is the modulus of the derivative
    Gap:         what made z need not be able to bring its real part to the end of its range, where it moves z most
    """
    found = fact(input, RealPart)
    n = reach(input)
    size = torch.exp(n)
    if current_mode() not in ("bound", "modula"):
        size = torch.exp(n.clamp(max=1.0).square() / 2) * n.clamp(min=1.0)
    high = math.inf if found is None else found.range.high
    if high < _LARGE:
        size = torch.minimum(size, bounded(math.exp(high), n))
    result = like(input, size, sensitivity={"input": size})
    if found is None:
        return result
    low = math.exp(min(found.range.low, _LARGE)) if found.range.low > -math.inf else 0.0
    return with_fact(result, Modulus(Range(low, math.exp(high) if high < _LARGE else math.inf)))  # type: ignore[return-value]


# -- quotients ------------------------------------------------------------------------------------------------------------


def _away(x: Any) -> Range | None:
    """Between which positive numbers the real parts of complex numbers are, or of their negatives; moduli are no less."""
    is_given = isinstance(x, torch.Tensor) and is_complex(x) and not (isinstance(x, NormedTensor) and is_local(x))
    found = _real_part(x) if is_given else None
    return None if found is None else next((r for r in (found, found.negative()) if r.is_well_above(0.0)), None)


def _is_over_complex(args: Mapping[str, Any]) -> bool:
    return current_mode() == "bound" and args["rounding_mode"] is None and _away(args["other"]) is not None


def _inverse_of(x: RMSTensor) -> torch.Tensor:
    found = _away(x)
    assert found is not None, "the rule's condition has been checked"
    return 1 / found.least_of(x.norm_size)


@normed_op(torch.div).register_norm(when=_is_over_complex, takes_complex=True, lift_dims=SAME_DIMS)
def div_away(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / z, for complex z whose real parts are of one sign and at least c > 0 in modulus.

    Value:       |a| / c
    Sensitivity: 1 / c to a;  k |a| / c^2 to z, k = sqrt(N) where both are RMS over the same dimensions, as in a product
    Source:      |z| >= |Re z|; |d(1 / z)| = |dz| / |z|^2
    Gap:         the norm of z counts by c alone, and imaginary parts not at all
    """
    inverse = _inverse_of(other)
    dims, k = product_dims(input, other)
    ca = refined(input, dims)
    size = input.norm_size * inverse
    return rms(times(size, ca), dims, sensitivity={"input": times(inverse, ca), "other": times(size * inverse, k)})


@normed_op(torch.reciprocal).register_norm(
    when=lambda args: _is_over_complex({"other": args["input"], "rounding_mode": None}), takes_complex=True
)
def reciprocal_away(input: RMSTensor) -> RMSTensor:
    """1 / z, for complex z whose real parts are of one sign and at least c > 0 in modulus.

    Value:       1 / c      (attained: real numbers)
    Sensitivity: 1 / c^2    (attained there)
    Source:      |z| >= |Re z|
    Gap:         one entry is as small as c, and not all of them
    """
    inverse = _inverse_of(input)
    return like(input, bounded(inverse, input.norm_size), sensitivity={"input": inverse.square()})


@normed_op(torch.div).register_norm(when=_is_over_complex, takes_complex=True)
def number_over_complex(input: int | float, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """c / z for a number c: |c| times `reciprocal_away`.

    Gap:         that of `reciprocal_away`
    """
    inverse, c = reciprocal_away(other), math.fabs(input)
    return like(other, times(inverse.norm_size, c), sensitivity={"other": (inverse._sensitivity or {})["input"] * c})


_of_real = normed_op(torch.abs).range_rule
assert _of_real is not None, "`ranges` gave it one"


def _modulus(args: tuple, kwargs: Mapping[str, Any], of: Of) -> Known:
    """Of moduli: those of an exponential by its real parts."""
    x = argument(args, kwargs, 0, "input", "self")
    if not is_complex(x):
        return _of_real(args, kwargs, of)  # type: ignore[misc]
    found = fact(x, Modulus)
    return Range(0.0, math.inf) if found is None else found.range


normed_op(torch.abs).register_range(_modulus, takes_complex=True)
