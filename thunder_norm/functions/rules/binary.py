"""Functions of two or three variables, element by element.

Where two branches meet (``maximum`` of equal numbers) the derivative is torch's: the mean of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from numbers import Number
from typing import Any

import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import NumberProxy, TensorProxy, pyval

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.functions.derivatives import of_operand, register_slopes
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import VjpRule, jvp_rules, register_jvp, vjp_rules

register_slopes(prims.add, lambda t, y, a, b: t, lambda t, y, a, b: t)
register_slopes(prims.sub, lambda t, y, a, b: t, lambda t, y, a, b: ltorch.neg(t))
register_slopes(prims.mul, lambda t, y, a, b: ltorch.mul(t, b), lambda t, y, a, b: ltorch.mul(t, a))
register_slopes(
    prims.div,
    lambda t, y, a, b: ltorch.true_divide(t, b),
    lambda t, y, a, b: ltorch.neg(ltorch.true_divide(ltorch.mul(t, y), b)),
)


def _over_square(t: TensorProxy, a: Any, b: Any) -> TensorProxy:
    square = ltorch.add(ltorch.mul(a, a), ltorch.mul(b, b))
    return ltorch.true_divide(t, ltorch.where(ltorch.eq(square, 0.0), 1.0, square))


# the angle of (b, a): (b da - a db) / (a^2 + b^2), and 0 at the origin as torch has it
register_slopes(
    prims.atan2,
    lambda t, y, a, b: _over_square(ltorch.mul(t, b), a, b),
    lambda t, y, a, b: ltorch.neg(_over_square(ltorch.mul(t, a), a, b)),
)

# a - b trunc(a / b) and a - b floor(a / b), where trunc and floor do not move
for _symbol, _rounded in ((prims.fmod, ltorch.trunc), (prims.remainder, ltorch.floor)):
    register_slopes(
        _symbol,
        lambda t, y, a, b: t,
        lambda t, y, a, b, _rounded=_rounded: ltorch.neg(ltorch.mul(t, _rounded(ltorch.true_divide(a, b)))),
    )


def _share(is_chosen: Callable, mine: Any, other: Any) -> TensorProxy:
    return clang.where(clang.eq(mine, other), 0.5, clang.where(is_chosen(mine, other), 1.0, 0.0))


for _symbol, _is_chosen in ((prims.maximum, clang.gt), (prims.minimum, clang.lt)):
    register_slopes(
        _symbol,
        lambda t, y, a, b, _is_chosen=_is_chosen: ltorch.mul(t, _share(_is_chosen, a, b)),
        lambda t, y, a, b, _is_chosen=_is_chosen: ltorch.mul(t, _share(_is_chosen, b, a)),
    )


def _by_base(t: TensorProxy, y: TensorProxy, a: TensorProxy, b: Any) -> TensorProxy:
    """b a^(b-1) t; 0 where b is 0."""
    if isinstance(b, Number | NumberProxy):
        exponent: Any = pyval(b)
        if exponent == 0:
            return ltorch.mul(t, 0.0)
        if exponent == 1:
            return t
        return ltorch.mul(t, ltorch.mul(a if exponent == 2 else ltorch.pow(a, exponent - 1), exponent))
    slope = ltorch.mul(b, ltorch.pow(a, ltorch.sub(b, 1.0)))
    return ltorch.mul(t, ltorch.where(ltorch.eq(b, 0.0), 0.0, slope))


def _by_exponent(t: TensorProxy, y: TensorProxy, a: Any, b: TensorProxy) -> TensorProxy:
    """a^b ln(a) t; 0 where a is 0 and b, a real number, is not negative."""
    if isinstance(a, Number | NumberProxy):
        a = ltorch.full_like(b, pyval(a))
    is_flat = ltorch.bitwise_and(ltorch.eq(a, 0.0), ltorch.ge(prims.real(b) if is_complex(b) else b, 0.0))
    if is_complex(b):
        is_flat = ltorch.bitwise_and(is_flat, ltorch.eq(prims.imag(b), 0.0))
    return ltorch.mul(t, ltorch.where(is_flat, 0.0, ltorch.mul(y, ltorch.log(a))))


register_slopes(prims.pow, _by_base, _by_exponent)

# start + w (end - start)
register_slopes(
    prims.lerp,
    lambda t, y, start, end, weight: ltorch.mul(t, ltorch.sub(1.0, weight)),
    lambda t, y, start, end, weight: ltorch.mul(t, weight),
    lambda t, y, start, end, weight: ltorch.mul(t, ltorch.sub(end, start)),
    runs=ltorch.lerp,
)


def _refuse_order(args: tuple, moving: Container[str]) -> None:
    if isinstance(args[0], TensorProxy) and args[0].name in moving:
        raise MissingTransformRuleError(
            with_details("the zeta function has no derivative by its first argument", instead="give it as a number, or detach it")
        )


# by q: minus s times the zeta function of s + 1
register_slopes(
    prims.zeta,
    None,
    lambda t, y, s, q: ltorch.mul(t, ltorch.mul(ltorch.neg(s), prims.zeta(ltorch.add(s, 1.0), q))),
    check_active=_refuse_order,
)


def _zero(like: TensorProxy) -> float | complex:
    return 0j if is_complex(like) else 0.0


@register_jvp(prims.where)
def where(primals, tangents):
    """The tangent of the side that was taken."""
    (condition, *_), (_, da, db) = primals, tangents
    out = prims.where(*primals)
    return out, prims.where(condition, *(_zero(out) if t is None else t for t in (da, db)))


def _where_backward(saved: tuple, g: TensorProxy) -> tuple:
    """To the side that was taken."""
    condition, *sides = saved
    chosen = (lambda: prims.where(condition, g, _zero(g)), lambda: prims.where(condition, _zero(g), g))
    found = (of_operand(c(), a) if isinstance(a, TensorProxy) else None for c, a in zip(chosen, sides, strict=True))
    return None, *found


vjp_rules.add(prims.where, VjpRule(lambda *args: (prims.where(*args), args), _where_backward))

# The bits of a number as those of another type: no derivative.
jvp_rules.add(prims.bitcast, lambda primals, tangents, **kwargs: (prims.bitcast(*primals, **kwargs), None))
