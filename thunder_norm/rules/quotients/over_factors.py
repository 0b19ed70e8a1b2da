"""Quotients of a function of a product and one of its factors: what is 0 where the factor is, divided by it.

    x + torch.sin(a * x) ** 2 / a           # snake
    torch.tanh(x / t * s) / s

A norm of a does not keep it away from 0; but a function f with f(0) = 0 and bounded slopes has ``f(a x) / a = x f(a x) / (a x)``, which is no
larger than x by the steepest slope, and moves smoothly with a where f'' is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment, current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact
from thunder_norm.rules._shared import argument, refined, rms
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class OfProduct:
    """A fact: ``f(a x)``, entry by entry, with f(0) = 0.

    Attributes:
        a: a factor that is one number for several entries of x.
        writes: how often the memory of that had been written into.
        x: the other one.
        reach: what no value of f exceeds in modulus.
        slope: the same of f'.
        bend: the same of f''.
    """

    a: Source
    writes: int
    x: Source
    reach: float = math.inf
    slope: float = 1.0
    bend: float = 0.0


def _with(out: NormedTensor, found: list[OfProduct]) -> Any:
    return Alternatives((*every_fact(out), *found)) if found else out._facts


def _writes_into(t: torch.Tensor) -> int:
    return current_environment().writes_into(t)


def _product(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    if a is b:
        return _with(out, [_squared(f) for f in every_fact(a) if isinstance(f, OfProduct)])
    is_known = current_mode() == "bound" and isinstance(a, RMSTensor) and isinstance(b, RMSTensor) and not is_local(out)
    if not is_known or is_complex(out) or a.backing is b.backing:
        return out._facts
    pairs = [(s, x) for s, x in ((a, b), (b, a)) if x.shape == out.shape and s.backing.numel() < out.backing.numel()]
    return _with(out, [OfProduct(Source.of(s), _writes_into(s.backing), Source.of(x)) for s, x in pairs])


normed_op(torch.mul).register_fact(_product)


def _function(reach: float, bend: float) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """What a function g makes of f: ``(g f)'' = g'' f'^2 + g' f''``, of slopes up to 1."""

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        f = fact(argument(args, kwargs, 0, "input", "self"), OfProduct)
        return _with(out, [] if f is None else [replace(f, reach=reach, bend=bend * f.slope**2 + f.bend)])

    return rule


_LARGEST_BENDS = {torch.sin: (1.0, 1.0), torch.tanh: (1.0, 4 / 27**0.5), torch.atan: (math.pi / 2, 27**0.5 / 8)}
for _op, (_reach, _bend) in _LARGEST_BENDS.items():
    normed_op(_op).register_fact(_function(_reach, _bend))


def _squared(f: OfProduct) -> OfProduct:
    """``(f^2)' = 2 f f'`` and ``(f^2)'' = 2 f'^2 + 2 f f''``; of a sine ``f f' = sin(2 u) / 2`` and ``f'^2 + f f'' = cos(2 u)``."""
    if f.reach == math.inf:
        return replace(f, slope=math.inf, bend=math.inf)
    if f.reach == f.slope == f.bend == 1:
        return replace(f, bend=2.0)
    return replace(f, reach=f.reach**2, slope=2 * f.reach * f.slope, bend=2 * f.slope**2 + 2 * f.reach * f.bend)


def _power(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    f = fact(argument(args, kwargs, 0, "input", "self"), OfProduct)
    is_square = argument(args, kwargs, 1, "exponent", default=2) == 2
    return _with(out, [_squared(f)] if f is not None and is_square else [])


for _op in (torch.pow, torch.square):
    normed_op(_op).register_fact(_power)


def _over_factor(x: Any, by: torch.Tensor) -> OfProduct | None:
    """What x is of a product one of whose factors is in that tensor."""
    for f in every_fact(x):
        if not isinstance(f, OfProduct) or f.a.backing is not by or f.writes != _writes_into(by) or f.x.backing.shape != x.shape:
            continue
        return f if f.reach < math.inf and not is_local(x) else None
    return None


def _divides(args: dict[str, Any]) -> bool:
    x, by = args["input"], args["other"]
    if args["rounding_mode"] is not None or current_mode() != "bound" or not isinstance(by, torch.Tensor):
        return False
    f = _over_factor(x, by.backing if isinstance(by, NormedTensor) else by)
    return f is not None and (not isinstance(by, NormedTensor) or by.norm_size is f.a.norm_size)


@normed_op(torch.div).register_norm(when=_divides)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """f(a x) / a, entry by entry, for f with f(0) = 0, |f'| <= S and |f''| <= C.

    Value:       S |x|                        (approached: f(u) = S u near 0, for a -> 0)
    Sensitivity: S to x, and C / 2 times the largest entry of x times |x| to a
    Source:      ``d(f(a x) / a) / da = x^2 (u f'(u) - f(u)) / u^2`` with u = a x, and ``|u f'(u) - f(u)| <= C u^2 / 2`` (Taylor)
    Gap:         slopes are less where u is large
    """
    f = _over_factor(input, other.backing)
    assert f is not None, "the rule's condition has been checked"
    x, a = f.x.tensor(), f.a.tensor()
    dims = ed.canonical(x.elem_dims, input.ndim) if x.elem_dims else ()
    n = x.norm_size
    moved = None if f.x.perturbation_size is None else times(f.x.perturbation_size, f.slope)
    if f.a.perturbation_size is not None:
        by_a = times(f.a.perturbation_size, refined(a, ())) * n.square() * (refined(x, ()) * f.bend / 2)
        moved = by_a if moved is None else moved + by_a
    out = type(rms(n, dims))._wrap(None, spoiled(times(n, f.slope), n), moved, dims)  # type: ignore[arg-type]
    out._sensitivity = {"input": 0, "other": 0}
    return out
