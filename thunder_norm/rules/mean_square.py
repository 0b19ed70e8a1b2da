"""Normalizations written out: ``x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)``, as in Llama and T5.

Op by op this has no useful bound: a norm says nothing about how small ``mean x^2`` is, and a product forgets that both factors
come from one x.  The rules here remember it: each result of the chain carries a fact about which x it was made from, and the
last product, recognised by the identity of x, is bounded as the rms_norm it is.  Where the chain is broken, the facts are gone
and the general rules apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Source, fact, is_rms, moves_with, unconditional, with_fact
from thunder_norm.rules._shared import dims_tuple, like, refined
from thunder_norm.rules.normalization import normalized


@dataclass(frozen=True, eq=False)
class MeanSquare:
    """A fact: x^2 ("square"), its mean over `dims` ("mean"), that plus `eps` ("shifted"), its "root", or 1 / root ("inverse")."""

    x: Source
    step: str
    slope: float  # claimed sensitivity of the square, per |x|
    dims: ed.Dims = ()
    eps: float = 0.0


def _follows(step: str, **conditions: Callable[[Any], bool]) -> Callable[[dict[str, Any]], bool]:
    """The condition that `input` is the result of `step` and the other arguments are as they should be."""

    def condition(args: dict[str, Any]) -> bool:
        found = fact(args["input"], MeanSquare)
        return found is not None and found.step == step and all(ok(args[name]) for name, ok in conditions.items())

    return condition


def _fact(x: NormedTensor) -> MeanSquare:
    found = fact(x, MeanSquare)
    assert found is not None, "the rule's condition has been checked"
    return found


# -- the chain ------------------------------------------------------------------------------------------------------------


def _square(x: RMSTensor) -> NormedTensor:
    slope = 2.0 if current_mode() == "typical" else 2.0 * float(x.numel_normed) ** 0.5
    return with_fact(unconditional(torch.square, x), MeanSquare(Source.of(x), "square", slope))


@normed_op(torch.pow).register_norm(when=lambda args: args["exponent"] == 2)
def pow_two(input: RMSTensor, exponent: int | float) -> NormedTensor:
    """x^2: as every power, and what it was made from."""
    return _square(input)


@normed_op(torch.square).register_norm(when=lambda args: True)
def square(input: RMSTensor) -> NormedTensor:
    """x^2: as every square, and what it was made from."""
    return _square(input)


@normed_op(torch.mul).register_norm(when=lambda args: args["input"] is args["other"])
def mul_self(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """x x: as a square; half of its sensitivity belongs to each factor."""
    result = _square(input)
    half = (result._sensitivity or {})["input"] * 0.5
    result._sensitivity = {"input": half, "other": half}
    return result


@normed_op(torch.mean).register_norm(when=_follows("square", keepdim=lambda keepdim: keepdim is True))
def mean_of_squares(input: RMSTensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> NormedTensor:
    """mean x^2 over D, for x in RMS over E: the largest.

    Value:        n^2, n = |x| over the dimensions that E and D share    (an equality)
    Sensitivity:  2 n to x; as a factor of what the square claimed
    """
    found = _fact(input)
    x, dims = found.x.tensor(), dims_tuple(dim, input.ndim)
    c = refined(x, tuple(d for d in x.elem_dims if d in dims)) ** 2
    result = LinfTensor(x.norm_size.square() * c, sensitivity={"input": 2 * c / found.slope})
    return with_fact(result, replace(found, step="mean", dims=dims))


@normed_op(torch.add).register_norm(when=_follows("mean", other=lambda c: c > 0, alpha=lambda c: c == 1))
def plus_eps(input: RMSTensor, other: int | float, alpha: int | float = 1) -> NormedTensor:
    """mean x^2 + eps, which is at least eps."""
    found = _fact(input)
    result = like(input, input.norm_size + other, sensitivity={"input": 1})
    return with_fact(result, replace(found, step="shifted", eps=float(other)))


@normed_op(torch.sqrt).register_norm(when=_follows("shifted"))
def sqrt(input: RMSTensor) -> NormedTensor:
    """The root of mean x^2 + eps.  Its value is that of the root of n, attained; sensitivity 1 / (2 eps^0.5), at x = 0."""
    found = _fact(input)
    result = like(input, input.norm_size.sqrt(), sensitivity={"input": 0.5 / found.eps**0.5})
    return with_fact(result, replace(found, step="root"))


def _inverse_root(input: RMSTensor) -> NormedTensor:
    found = _fact(input)
    result = like(input, bounded(found.eps**-0.5, input.norm_size), sensitivity={"input": 0.5 * found.eps**-1.5})
    return with_fact(result, replace(found, step="inverse"))


@normed_op(torch.rsqrt).register_norm(when=_follows("shifted"))
def rsqrt(input: RMSTensor) -> NormedTensor:
    """1 / sqrt(mean x^2 + eps).  Value 1 / sqrt(eps), sensitivity 1 / (2 eps^(3/2)), both attained at x = 0."""
    return _inverse_root(input)


@normed_op(torch.pow).register_norm(when=_follows("shifted", exponent=lambda p: p == -0.5))
def pow_minus_half(input: RMSTensor, exponent: int | float) -> NormedTensor:
    """The same as a power."""
    return _inverse_root(input)


# -- its end --------------------------------------------------------------------------------------------------------------


def _divides(numerator: str, divisor: str, step: str) -> Callable[[dict[str, Any]], bool]:
    """The condition that `divisor` is the `step` of the very `numerator`."""

    def condition(args: dict[str, Any]) -> bool:
        x, found = args[numerator], fact(args[divisor], MeanSquare)
        return found is not None and found.step == step and is_rms(x) and found.x.is_same(Source.of(x))

    return condition


def _normalized(divisor: NormedTensor) -> NormedTensor:
    """x / sqrt(mean x^2 + eps): `rms_norm`.

    Value:        n / sqrt(n^2 + eps), n = |x|    (attained)
    Sensitivity:  1 / sqrt(eps) to x              (attained at x = 0); the divisor moves with x only
    """
    found = _fact(divisor)
    result = normalized(found.x.tensor(), found.dims, found.eps, is_centred=False)
    return moves_with(found.x, result, (result._sensitivity or {})["input"], "input", "other")


@normed_op(torch.mul).register_norm(when=_divides("input", "other", "inverse"))
def mul_inverse(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """x * rsqrt(mean x^2 + eps), see `_normalized`."""
    return _normalized(other)


@normed_op(torch.mul).register_norm(when=_divides("other", "input", "inverse"))
def inverse_mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """rsqrt(mean x^2 + eps) * x, see `_normalized`."""
    return _normalized(input)


@normed_op(torch.div).register_norm(when=_divides("input", "other", "root"))
def div_root(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """x / sqrt(mean x^2 + eps), see `_normalized`."""
    return _normalized(other)
