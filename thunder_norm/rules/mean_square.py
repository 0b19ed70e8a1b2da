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

from thunder_norm import elem_dims as ed
from thunder_norm.dispatch import current_mode, normed_op
from thunder_norm.rules import powers
from thunder_norm.rules._shared import dims_tuple, like, refined, scalar
from thunder_norm.rules.normalization import normalized
from thunder_norm.tensors import LinfTensor, NormedTensor, RMSTensor


@dataclass(frozen=True, eq=False)
class MadeFrom:
    """A fact about a tensor: made from x, as ``x^2`` ("square"), its mean over `dims`, that plus `eps`, its root, or 1 / root."""

    step: str
    x: RMSTensor
    slope: float = 0.0  # of the square, per |x|: its claimed sensitivity
    dims: ed.Dims = ()
    eps: float = 0.0

    def is_about(self, x: Any) -> bool:
        """Whether x is what it was made from: the same values with the same claims."""
        mine = self.x
        return (
            type(x) is type(mine)
            and x.backing is mine.backing
            and x.norm_size is mine.norm_size
            and x.perturbation_size is mine.perturbation_size
            and x.elem_dims == mine.elem_dims
        )


def _fact(x: Any, step: str) -> MadeFrom | None:
    """What is known about x, if it is the result of that step."""
    fact = x._facts if isinstance(x, NormedTensor) else None
    return fact if isinstance(fact, MadeFrom) and fact.step == step else None


def _follows(step: str, **conditions: Callable[[Any], bool]) -> Callable[[dict[str, Any]], bool]:
    """The condition that `input` is the result of `step` and the other arguments are as they should be."""
    return lambda args: _fact(args["input"], step) is not None and all(ok(args[name]) for name, ok in conditions.items())


def _know(result: NormedTensor, fact: MadeFrom) -> NormedTensor:
    result._facts = fact
    return result


# -- the chain ------------------------------------------------------------------------------------------------------------


def _square(x: RMSTensor) -> NormedTensor:
    slope = 2.0 if current_mode() == "typical" else 2.0 * float(x.numel_normed) ** 0.5
    # a copy: x itself may be changed in place
    x_now = type(x)._wrap(x.backing, x.norm_size, x.perturbation_size, x.elem_dims)
    return _know(powers.square(x), MadeFrom("square", x_now, slope))


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
    fact = _fact(input, "square")
    assert fact is not None
    x, dims = fact.x, dims_tuple(dim, input.ndim)
    c = refined(x, tuple(d for d in x.elem_dims if d in dims)) ** 2
    result = LinfTensor(x.norm_size.square() * c, sensitivity={"input": 2 * c / fact.slope})
    return _know(result, replace(fact, step="mean", dims=dims))


@normed_op(torch.add).register_norm(when=_follows("mean", other=lambda c: c > 0, alpha=lambda c: c == 1))
def plus_eps(input: RMSTensor, other: int | float, alpha: int | float = 1) -> NormedTensor:
    """mean x^2 + eps, which is at least eps."""
    fact = _fact(input, "mean")
    assert fact is not None
    result = like(input, input.norm_size + other, sensitivity={"input": 1})
    return _know(result, replace(fact, step="shifted", eps=float(other)))


@normed_op(torch.sqrt).register_norm(when=_follows("shifted"))
def sqrt(input: RMSTensor) -> NormedTensor:
    """The root of mean x^2 + eps.  Its value is that of the root of n, attained; sensitivity 1 / (2 eps^0.5), at x = 0."""
    fact = _fact(input, "shifted")
    assert fact is not None
    result = like(input, input.norm_size.sqrt(), sensitivity={"input": 0.5 / fact.eps**0.5})
    return _know(result, replace(fact, step="root"))


def _inverse_root(input: RMSTensor) -> NormedTensor:
    fact = _fact(input, "shifted")
    assert fact is not None
    result = like(input, scalar(fact.eps**-0.5, input.norm_size), sensitivity={"input": 0.5 * fact.eps**-1.5})
    return _know(result, replace(fact, step="inverse root"))


@normed_op(torch.rsqrt).register_norm(when=_follows("shifted"))
def rsqrt(input: RMSTensor) -> NormedTensor:
    """1 / sqrt(mean x^2 + eps).  Value 1 / sqrt(eps), sensitivity 1 / (2 eps^(3/2)), both attained at x = 0."""
    return _inverse_root(input)


@normed_op(torch.pow).register_norm(when=_follows("shifted", exponent=lambda p: p == -0.5))
def pow_minus_half(input: RMSTensor, exponent: int | float) -> NormedTensor:
    """The same as a power."""
    return _inverse_root(input)


# -- its end --------------------------------------------------------------------------------------------------------------


def _normalized(fact: MadeFrom | None, name: str, divisor: str) -> RMSTensor:
    assert fact is not None
    result = normalized(fact.x, fact.dims, fact.eps, is_centred=False)
    # all of the movement is x's, and the divisor's is part of it
    result._sensitivity = {name: (result._sensitivity or {})["input"], divisor: 0}
    return result


def _divides(numerator: str, divisor: str, step: str) -> Callable[[dict[str, Any]], bool]:
    def condition(args: dict[str, Any]) -> bool:
        fact = _fact(args[divisor], step)
        return fact is not None and fact.is_about(args[numerator])

    return condition


@normed_op(torch.mul).register_norm(when=_divides("input", "other", "inverse root"))
def mul_inverse_root(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """x * rsqrt(mean x^2 + eps): `rms_norm`.

    Value:        n / sqrt(n^2 + eps), n = |x|    (attained)
    Sensitivity:  1 / sqrt(eps) to x              (attained at x = 0)
    """
    return _normalized(_fact(other, "inverse root"), "input", "other")


@normed_op(torch.mul).register_norm(when=_divides("other", "input", "inverse root"))
def inverse_root_mul(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """rsqrt(mean x^2 + eps) * x: `rms_norm`."""
    return _normalized(_fact(input, "inverse root"), "other", "input")


@normed_op(torch.div).register_norm(when=_divides("input", "other", "root"))
def div_root(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """x / sqrt(mean x^2 + eps): `rms_norm`."""
    return _normalized(_fact(other, "root"), "input", "other")
