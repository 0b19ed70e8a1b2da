"""Typical sizes of quotients, roots and logarithms of what no norm keeps away from 0.

In mode "bound" these operations have no norm: an entry may be as close to 0 as one likes.  A program divides by what is not: here, in
the other modes, entries are as large as their norm says.  What is known to stay away from 0 has rules of its own, in `range_bounds`,
and what is known as a normalization in `written_out_groups`; both go before these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._shared import SAME_DIMS, Number, like, refined, rms, times
from thunder_norm.rules.binary import product_dims

_TINY = 1e-30  # what is typically 0 has a large inverse, and no infinite one


Condition = Callable[[dict[str, Any]], bool]


def _has_size(name: str) -> Condition:
    """Whether sizes are typical ones, and an argument has one."""

    def has_size(args: dict[str, Any]) -> bool:
        x = args[name]
        is_typical = current_mode() != "bound" and current_sensitivity() == "global"
        return is_typical and isinstance(x, NormedTensor) and not is_complex(x)

    return has_size


def _divides(args: dict[str, Any]) -> bool:
    return args["rounding_mode"] is None and _has_size("other")(args)


def _size(x: RMSTensor) -> torch.Tensor:
    return x.norm_size.clamp(min=_TINY)


@normed_op(torch.div).register_norm(when=_divides, lift_dims=SAME_DIMS)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b.

    Typical:     |a| / |b|; 1 / |b| to a, |a| / |b|^2 to b
    Source:      |d(1 / b)| = |db| / b^2, for entries of the size of b's norm
    Untried:     in mode "bound" it does not apply
    """
    dims, _ = product_dims(input, other)
    ca, inverse = refined(input, dims), _size(other).reciprocal()
    size = times(input.norm_size * inverse, ca)
    return rms(size, dims, sensitivity={"input": times(inverse, ca), "other": size * inverse})


@normed_op(torch.div).register_norm(when=_divides)
def number_over(input: Number, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """c / b.  Typical: |c| / |b|, and |c| / |b|^2.

    Untried:     in mode "bound" it does not apply
    """
    inverse = _size(other).reciprocal()
    size = times(inverse, math.fabs(input))
    return like(other, size, sensitivity={"other": size * inverse})


def _is_root_or_inverse(args: dict[str, Any]) -> bool:
    return (
        _has_size("input")(args) and isinstance(args["exponent"], int | float) and args["exponent"] < 1 and args["exponent"] != 0
    )


@normed_op(torch.float_power).register_norm(when=_is_root_or_inverse)
@normed_op(torch.pow).register_norm(when=_is_root_or_inverse)
def pow(input: RMSTensor, exponent: int | float) -> RMSTensor:
    """x^p, for p < 1.  Typical: n^p, and |p| n^(p - 1).

    Untried:     in mode "bound" it does not apply
    """
    n = _size(input)
    return like(input, n.pow(exponent), sensitivity={"input": times(n.pow(exponent - 1), math.fabs(exponent))})


def _power(op: Callable, exponent: float, doc: str) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        return pow(input, exponent)

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f'{doc}\n\nUntried:     in mode "bound" it does not apply'
    normed_op(op).register_norm(rule, when=_has_size("input"))


_power(torch.sqrt, 0.5, "The root of x.  Typical: sqrt(n), and 1 / (2 sqrt(n)).")
_power(torch.rsqrt, -0.5, "1 / sqrt(x).  Typical: n^(-1/2), and n^(-3/2) / 2.")
_power(torch.reciprocal, -1, "1 / x.  Typical: 1 / n, and 1 / n^2.")


def _logarithm(op: Callable, base: float) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        n, unit = _size(input), 1 / math.log(base)
        return like(input, times((n.log().square() + 1).sqrt(), unit), sensitivity={"input": times(n.reciprocal(), unit)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f"{op.__name__} x.  Typical: sqrt(log(n)^2 + 1), and 1 / n, by the logarithm of the base: entries are within a factor of e of n."
    rule.__doc__ = f'{rule.__doc__}\n\nUntried:     in mode "bound" it does not apply'
    normed_op(op).register_norm(rule, when=_has_size("input"))


for _op, _base in ((torch.log, math.e), (torch.log2, 2.0), (torch.log10, 10.0)):
    _logarithm(_op, _base)
