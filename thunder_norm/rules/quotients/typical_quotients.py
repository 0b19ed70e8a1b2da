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

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._shared import SAME_DIMS, Number, is_moving, is_typical, like, refined, rms
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.quotients.range_bounds import times_logarithm
from thunder_norm.scalars import times

_TINY = 1e-30  # what is typically 0 has a large inverse, and no infinite one


Condition = Callable[[dict[str, Any]], bool]


def _has_size(name: str, takes_complex: bool = False) -> Condition:
    """Whether sizes are typical ones, and an argument has one."""

    def has_size(args: dict[str, Any]) -> bool:
        x = args[name]
        return is_typical() and (isinstance(x, NormedTensor) or is_moving(x)) and (takes_complex or not is_complex(x))

    return has_size


def _divides(args: dict[str, Any]) -> bool:
    return args["rounding_mode"] is None and _has_size("other", takes_complex=True)(args)


def _size(x: RMSTensor) -> torch.Tensor:
    return x.norm_size.clamp(min=_TINY)


def _as_gain(t: torch.Tensor, args: dict[str, Any]) -> type[NormedTensor]:
    """A parameter that is divided by starts as one that is multiplied with."""
    return LinfTensor


@normed_op(torch.div).register_norm(
    when=_divides, lift_dims={"input": SAME_DIMS["input"]}, lift_kinds={"other": _as_gain}, takes_complex=True
)
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


@normed_op(torch.div).register_norm(when=_divides, takes_complex=True)
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
    is_inverse = op is torch.reciprocal
    normed_op(op).register_norm(rule, when=_has_size("input", takes_complex=is_inverse), takes_complex=is_inverse)


_power(torch.sqrt, 0.5, "The root of x.  Typical: sqrt(n), and 1 / (2 sqrt(n)).")
_power(torch.rsqrt, -0.5, "1 / sqrt(x).  Typical: n^(-1/2), and n^(-3/2) / 2.")
_power(torch.reciprocal, -1, "1 / x.  Typical: 1 / n, and 1 / n^2.")


def _log(x: RMSTensor) -> RMSTensor:
    n = _size(x)
    return like(x, (n.log().square() + 1).sqrt(), sensitivity={"input": n.reciprocal()})


def _logarithm(op: Callable, base: float) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        found, unit = _log(input), 1 / math.log(base)
        return like(input, times(found.norm_size, unit), sensitivity={"input": times((found._sensitivity or {})["input"], unit)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f"{op.__name__} x.  Typical: sqrt(log(n)^2 + 1), and 1 / n, by the logarithm of the base: entries are within a factor of e of n."
    rule.__doc__ = f'{rule.__doc__}\n\nUntried:     in mode "bound" it does not apply'
    normed_op(op).register_norm(rule, when=_has_size("input"))


for _op, _base in ((torch.log, math.e), (torch.log2, 2.0), (torch.log10, 10.0)):
    _logarithm(_op, _base)


# Entries of which a function is defined on a part of the line only are typically no nearer to its end than this part of the way.
_INSIDE = 0.9


def _log1p(x: RMSTensor) -> RMSTensor:
    """Entries that are known not to be positive are -n, and others n."""
    n = x.norm_size
    r = -n.clamp(max=_INSIDE) if known_range(x).high <= 0 else n
    slope = (1 + r).reciprocal()
    return like(x, (r.log1p().square() + (r * slope).square()).sqrt(), sensitivity={"input": slope})


@normed_op(torch.log1p).register_norm(when=_has_size("input"))
def log1p(input: RMSTensor) -> RMSTensor:
    """log(1 + x).  Typical: ``sqrt(log(1 + r)^2 + (r / (1 + r))^2)`` and ``1 / (1 + r)``, r = n; -min(n, 0.9) of what is known not to be positive.

    Untried:     in mode "bound" it does not apply
    """
    return _log1p(input)


def _times_log(op: Callable, logarithm: Callable[[RMSTensor], RMSTensor], name: str) -> None:
    def by_tensor(input: RMSTensor, other: RMSTensor) -> RMSTensor:
        return times_logarithm(input, other, logarithm(other))

    def by_number(input: Number, other: RMSTensor) -> RMSTensor:
        logs, c = logarithm(other), math.fabs(input)
        return like(other, times(logs.norm_size, c), sensitivity={"other": times((logs._sensitivity or {})["input"], c)})

    for rule in (by_tensor, by_number):
        rule.__name__ = rule.__qualname__ = op.__name__
        rule.__doc__ = f"""a {name} b.  Typical: that of the product of a and `{name}`.

    Untried:     in mode "bound" it does not apply
    """
    normed_op(op).register_norm(by_tensor, when=_has_size("other"), lift_dims=SAME_DIMS)
    normed_op(op).register_norm(by_number, when=_has_size("other"))


_times_log(torch.xlogy, _log, "log")
_times_log(torch.special.xlog1py, _log1p, "log1p")


def _inside(op: Callable, ends: tuple[float, float], f: Callable, slope: Callable, doc: str) -> None:
    def rule(input: RMSTensor) -> RMSTensor:
        n = input.norm_size.clamp(*ends)
        return like(input, f(n), sensitivity={"input": slope(n)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f'{doc}\n\nUntried:     in mode "bound" it does not apply'
    normed_op(op).register_norm(rule, when=_has_size("input"))


_inside(
    torch.atanh,
    (0.0, _INSIDE),
    torch.atanh,
    lambda n: (1 - n.square()).reciprocal(),
    "arctanh x.  Typical: arctanh n, and 1 / (1 - n^2), for n of at most 0.9.",
)
_inside(
    torch.acosh,
    (1 / _INSIDE, math.inf),
    torch.acosh,
    lambda n: (n - 1).rsqrt() * (n + 1).rsqrt(),
    "arcosh x.  Typical: arcosh n, and 1 / sqrt(n^2 - 1), for n of at least 1 / 0.9.",
)
_inside(
    torch.erfinv,
    (0.0, _INSIDE),
    torch.erfinv,
    lambda n: math.sqrt(math.pi) / 2 * torch.erfinv(n).square().exp(),
    "The inverse of erf.  Typical: erfinv n, and sqrt(pi) / 2 e^(erfinv(n)^2), for n of at most 0.9.",
)
_inside(
    torch.tan,
    (0.0, _INSIDE * math.pi / 2),
    torch.tan,
    lambda n: torch.cos(n).square().reciprocal(),
    "tan x.  Typical: tan n, and 1 / cos(n)^2, for n of at most 0.9 pi / 2.",
)


_inside(
    torch.special.ndtri,
    (_TINY, _INSIDE),
    lambda p: (torch.special.ndtri(p).square() + 1).sqrt(),
    lambda p: math.sqrt(2 * math.pi) * (torch.special.ndtri(p).square() / 2).exp(),
    "The quantile of a Gaussian.  Typical: sqrt(q(n)^2 + 1), and sqrt(2 pi) e^(q(n)^2 / 2), for n of at most 0.9.",
)
_inside(
    torch.special.entr,
    (_TINY, math.inf),
    lambda p: p * (p.log().square() + 1).sqrt(),
    lambda p: (p.log().square() + 1).sqrt(),
    "-x log x.  Typical: n sqrt(log(n)^2 + 1), and sqrt(log(n)^2 + 1).",
)


@normed_op(torch.logit).register_norm(when=lambda args: args["eps"] is None and _has_size("input")(args))
def logit(input: RMSTensor, eps: float | None = None) -> RMSTensor:
    """log(x / (1 - x)).  Typical: sqrt(logit(n)^2 + 1), and 1 / (n (1 - n)), for n of at most 0.9.

    Untried:     in mode "bound" it does not apply
    """
    n = input.norm_size.clamp(_TINY, _INSIDE)
    slope = (n * (1 - n)).reciprocal()
    return like(input, (torch.logit(n).square() + 1).sqrt(), sensitivity={"input": slope})
