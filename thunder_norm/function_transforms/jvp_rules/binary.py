"""Functions of two or three variables, element by element.

Where two branches meet (``maximum`` of equal numbers) the tangent is torch's: the mean of both sides.
"""

from __future__ import annotations

from numbers import Number
from typing import Any

import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import NumberProxy, TensorProxy, pyval

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.function_transforms.jvp_rules._shared import minus, over, plus, register_constant, register_multilinear, times
from thunder_norm.function_transforms.registry import register_jvp

register_multilinear(prims.mul, 0, 1)
register_constant(prims.bitcast)


@register_jvp(prims.add)
def add(primals, tangents):
    """d(a + b) = da + db."""
    return prims.add(*primals), plus(*tangents)


@register_jvp(prims.sub)
def sub(primals, tangents):
    """d(a - b) = da - db."""
    return prims.sub(*primals), minus(*tangents)


@register_jvp(prims.div)
def div(primals, tangents):
    """d(a / b) = (da - (a / b) db) / b."""
    out = prims.div(*primals)
    return out, over(minus(tangents[0], times(tangents[1], out)), primals[1])


@register_jvp(prims.atan2)
def atan2(primals, tangents):
    """Angle: (b da - a db) / (a^2 + b^2)."""
    (a, b), (da, db) = primals, tangents
    square = clang.add(clang.mul(a, a), clang.mul(b, b))
    return prims.atan2(a, b), over(minus(times(da, b), times(db, a)), square)


@register_jvp(prims.fmod)
def fmod(primals, tangents):
    """a - b trunc(a / b), where trunc does not move."""
    (a, b), (da, db) = primals, tangents
    quotient = None if db is None else clang.trunc(clang.true_divide(a, b))
    return prims.fmod(a, b), minus(da, times(db, quotient))


@register_jvp(prims.remainder)
def remainder(primals, tangents):
    """a - b floor(a / b), where floor does not move."""
    (a, b), (da, db) = primals, tangents
    quotient = None if db is None else clang.floor(clang.true_divide(a, b))
    return prims.remainder(a, b), minus(da, times(db, quotient))


@register_jvp(prims.maximum)
def maximum(primals, tangents):
    """The tangent of the larger one, the mean where they are equal."""
    return prims.maximum(*primals), _of_the_chosen(*primals, *tangents, clang.gt)


@register_jvp(prims.minimum)
def minimum(primals, tangents):
    """The tangent of the smaller one, the mean where they are equal."""
    return prims.minimum(*primals), _of_the_chosen(*primals, *tangents, clang.lt)


def _of_the_chosen(a: Any, b: Any, da: TensorProxy | None, db: TensorProxy | None, is_chosen: Any) -> TensorProxy:
    share = clang.where(clang.eq(a, b), 0.5, clang.where(is_chosen(a, b), 1.0, 0.0))
    if db is None:
        return clang.mul(da, share)
    return plus(db, clang.mul(minus(da, db), share))


@register_jvp(prims.pow)
def power(primals, tangents):
    """d(a^b) = b a^(b-1) da + a^b ln(a) db; 0 da where b is 0, 0 db where a is 0 and b is not negative."""
    (a, b), (da, db) = primals, tangents
    out = prims.pow(a, b)
    return out, plus(_by_base(a, b, da), _by_exponent(a, b, out, db))


def _by_base(a: Any, b: Any, da: TensorProxy | None) -> TensorProxy | None:
    if da is None:
        return None
    if isinstance(b, Number | NumberProxy):
        exponent: Any = pyval(b)
        if exponent == 0:
            return None
        if exponent == 1:
            return da
        return clang.mul(da, clang.mul(a if exponent == 2 else clang.pow(a, exponent - 1), exponent))
    slope = clang.mul(b, clang.pow(a, clang.sub(b, 1.0)))
    return clang.mul(da, clang.where(clang.eq(b, 0.0), 0.0, slope))


def _by_exponent(a: Any, b: Any, out: TensorProxy, db: TensorProxy | None) -> TensorProxy | None:
    if db is None:
        return None
    if isinstance(a, Number | NumberProxy):
        a = clang.full_like(b, pyval(a))
    is_flat = clang.bitwise_and(clang.eq(a, 0.0), clang.ge(b, 0.0))
    return clang.mul(db, clang.where(is_flat, 0.0, clang.mul(out, clang.log(a))))


@register_jvp(prims.lerp)
def lerp(primals, tangents):
    """start + w (end - start): (1 - w) d start + w d end + (end - start) dw."""
    (start, end, weight), (d_start, d_end, d_weight) = primals, tangents
    moved = plus(times(d_start, clang.sub(1.0, weight)) if d_start is not None else None, times(d_end, weight))
    return ltorch.lerp(start, end, weight), plus(moved, None if d_weight is None else times(d_weight, clang.sub(end, start)))


@register_jvp(prims.where)
def where(primals, tangents):
    """The tangent of the side that was taken."""
    (condition, *_), (_, da, db) = primals, tangents
    pushed = prims.where(condition, *(0.0 if t is None else t for t in (da, db)))
    return prims.where(*primals), pushed


@register_jvp(prims.zeta)
def zeta(primals, tangents):
    """The derivative by q is minus s times that of s + 1; the one by s has no closed form."""
    (s, q), (ds, dq) = primals, tangents
    if ds is not None:
        raise MissingTransformRuleError(
            with_details("the zeta function has no derivative by its first argument", instead="give it as a number, or detach it")
        )
    return prims.zeta(s, q), times(dq, clang.mul(clang.neg(s), prims.zeta(clang.add(s, 1.0), q)))
