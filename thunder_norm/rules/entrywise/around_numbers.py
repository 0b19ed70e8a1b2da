"""What is near a number, in mode "typical": a number and something beside it, and functions of such.

    (torch.sqrt(1 + 0.004 * (v.abs() + 1.001)) - 1) / 0.002

By sizes alone the difference of two numbers near 1 is as large as both, and a program that divides it by 0.002, and squares it, moves 250000
times as far as it does.  What a number less is remembered of is as large as what is beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, every_fact, fact
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Around:
    """A fact: the entries are this number, and beside it what has this size."""

    number: float
    beside: torch.Tensor

    def times(self, c: float) -> Around:
        """A multiple."""
        return Around(self.number * c, times(self.beside, abs(c)))


def around(x: NormedTensor) -> Around:
    """What a tensor is near: a number, or else 0."""
    return fact(x, Around) or Around(0.0, x.norm_size)


def size_of_sum(x: NormedTensor, by: float, number: float) -> torch.Tensor:
    """Of ``by x + number``: the sum of both sizes, or in mode "typical" what is left where the number is near that of x."""
    size = times(x.norm_size, abs(by)) + abs(number)
    if current_mode() != "typical" or (known := fact(x, Around)) is None:
        return size
    left = known.times(by)
    return torch.minimum(size, left.beside + abs(left.number + number))


def _with(out: NormedTensor, found: Around | None) -> Any:
    if found is None or not math.isfinite(found.number):
        return out._facts
    return Alternatives((*every_fact(out), found))


def _operands(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    found = dict(zip(("input", "other"), args, strict=False)) | kwargs
    return found.get("input"), found.get("other")


def _is_followed(x: Any, out: NormedTensor) -> bool:
    is_typical = current_mode() == "typical" and isinstance(x, RMSTensor)
    return is_typical and x.shape == out.shape and x.elem_dims == out.elem_dims


def _sum(sign_of_input: float, sign_of_other: float) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        a, b = _operands(args, kwargs)
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        by_a, by_b = (sign_of_input, sign_of_other * alpha) if sign_of_input > 0 else (sign_of_input * alpha, sign_of_other)
        for x, by, number, times_number in ((a, by_a, b, by_b), (b, by_b, a, by_a)):
            if _is_followed(x, out) and isinstance(number, int | float):
                left = around(x).times(by)
                return _with(out, Around(left.number + times_number * number, left.beside))
        return out._facts

    return rule


normed_op(torch.add).register_fact(_sum(1.0, 1.0))
normed_op(torch.sub).register_fact(_sum(1.0, -1.0))
normed_op(torch.rsub).register_fact(_sum(-1.0, 1.0))


def _multiple(args: tuple, kwargs: dict[str, Any], out: NormedTensor, is_divided: bool = False) -> Any:
    a, b = _operands(args, kwargs)
    for x, number in ((a, b), (b, a)):
        if _is_followed(x, out) and isinstance(number, int | float) and (known := fact(x, Around)) is not None:
            if not is_divided:
                return _with(out, known.times(number))
            return _with(out, known.times(1 / number)) if x is a and number and not kwargs.get("rounding_mode") else out._facts
    return out._facts


normed_op(torch.mul).register_fact(_multiple)
normed_op(torch.div).register_fact(lambda args, kwargs, out: _multiple(args, kwargs, out, is_divided=True))


def _of_root(at: Around) -> Around | None:
    root = math.sqrt(at.number) if at.number > 0 else 0.0
    return Around(root, at.beside / (2 * root)) if root else None


def _of_square(at: Around) -> Around:
    return Around(at.number**2, times(at.beside, 2 * abs(at.number)) + at.beside.square())


def _of_logarithm(at: Around) -> Around | None:
    return Around(math.log(at.number), at.beside / at.number) if at.number > 0 else None


def _of_exponential(at: Around) -> Around | None:
    e = math.exp(at.number) if at.number < 700 else math.inf
    return Around(e, times(torch.expm1(at.beside), e)) if 0 < e < math.inf else None


def _of_log1p(at: Around) -> Around | None:
    return _of_logarithm(Around(1 + at.number, at.beside))


def _of_expm1(at: Around) -> Around | None:
    found = _of_exponential(at)
    return None if found is None else Around(math.expm1(at.number), found.beside)


# what a function makes of a number and of what is beside it: as far as its graph goes, or its tangent where that lies above
_FUNCTIONS: dict[Callable, Callable[[Around], Around | None]] = {
    torch.sqrt: _of_root,
    torch.square: _of_square,
    torch.log: _of_logarithm,
    torch.exp: _of_exponential,
    torch.log1p: _of_log1p,
    torch.expm1: _of_expm1,
    torch.neg: lambda at: at.times(-1.0),
}
_POWERS = {2: _of_square, 0.5: _of_root}


def _function(f: Callable[[Around], Around | None]) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x = args[0] if args else kwargs.get("input")
        return _with(out, f(around(x))) if isinstance(x, RMSTensor) and _is_followed(x, out) else out._facts

    return rule


def _power(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x, exponent = (*args, kwargs.get("exponent"))[:2]
    f = _POWERS.get(exponent) if isinstance(exponent, int | float) else None
    return out._facts if f is None else _function(f)((x,), {}, out)


for _op, _f in _FUNCTIONS.items():
    normed_op(_op).register_fact(_function(_f))
normed_op(torch.pow).register_fact(_power)
