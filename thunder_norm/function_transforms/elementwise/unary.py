"""Functions of one variable, element by element."""

from __future__ import annotations

import math
from typing import Any

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.function_transforms.complex_numbers import is_complex
from thunder_norm.function_transforms.elementwise.slopes import register_slopes
from thunder_norm.function_transforms.registry import VjpRule, register_jvp, vjp_rules

for _symbol in (prims.ceil, prims.floor, prims.round, prims.sign, prims.trunc):
    register_slopes(_symbol, None)


def _register(operation, derivative) -> None:
    """``derivative(x, y)`` is f'(x), given also y = f(x)."""
    register_slopes(operation, lambda t, y, x: clang.mul(t, derivative(x, y)))


def _square(x: TensorProxy) -> TensorProxy:
    return clang.mul(x, x)


def _gaussian(scale: float, x: TensorProxy) -> TensorProxy:
    return clang.mul(clang.exp(clang.neg(_square(x))), scale)


def _acosh(x: TensorProxy, y: TensorProxy) -> Any:
    if not is_complex(x):
        return clang.rsqrt(clang.sub(_square(x), 1.0))
    return clang.mul(clang.rsqrt(clang.sub(x, 1.0)), clang.rsqrt(clang.add(x, 1.0)))  # x^2 - 1 has another branch


_ROOT_PI = math.sqrt(math.pi)

_register(prims.acos, lambda x, y: clang.neg(clang.rsqrt(clang.sub(1.0, _square(x)))))
_register(prims.acosh, _acosh)
_register(prims.asin, lambda x, y: clang.rsqrt(clang.sub(1.0, _square(x))))
_register(prims.asinh, lambda x, y: clang.rsqrt(clang.add(_square(x), 1.0)))
_register(prims.atan, lambda x, y: clang.reciprocal(clang.add(_square(x), 1.0)))
_register(prims.atanh, lambda x, y: clang.reciprocal(clang.sub(1.0, _square(x))))
_register(prims.cos, lambda x, y: clang.neg(clang.sin(x)))
_register(prims.cosh, lambda x, y: clang.sinh(x))
_register(prims.digamma, lambda x, y: prims.zeta(clang.full_like(x, 2.0), x))
_register(prims.erf, lambda x, y: _gaussian(2.0 / _ROOT_PI, x))
_register(prims.erfc, lambda x, y: _gaussian(-2.0 / _ROOT_PI, x))
_register(prims.erfcinv, lambda x, y: clang.mul(clang.exp(_square(y)), -_ROOT_PI / 2))
_register(prims.erfinv, lambda x, y: clang.mul(clang.exp(_square(y)), _ROOT_PI / 2))
_register(prims.exp, lambda x, y: y)
_register(prims.exp2, lambda x, y: clang.mul(y, math.log(2)))
_register(prims.expm1, lambda x, y: clang.add(y, 1.0))
_register(prims.lgamma, lambda x, y: clang.digamma(x))
_register(prims.ndtri, lambda x, y: clang.mul(clang.exp(clang.mul(_square(y), 0.5)), math.sqrt(2 * math.pi)))
_register(prims.reciprocal, lambda x, y: clang.neg(_square(y)))
_register(prims.rsqrt, lambda x, y: clang.mul(clang.mul(_square(y), y), -0.5))
_register(prims.sin, lambda x, y: clang.cos(x))
_register(prims.sinh, lambda x, y: clang.cosh(x))
_register(prims.tan, lambda x, y: clang.add(_square(y), 1.0))
_register(prims.tanh, lambda x, y: clang.sub(1.0, _square(y)))
register_slopes(prims.neg, lambda t, y, x: clang.neg(t))
register_slopes(prims.log, lambda t, y, x: clang.true_divide(t, x))
register_slopes(prims.log10, lambda t, y, x: clang.true_divide(t, clang.mul(x, math.log(10))))
register_slopes(prims.log1p, lambda t, y, x: clang.true_divide(t, clang.add(x, 1.0)))
register_slopes(prims.log2, lambda t, y, x: clang.true_divide(t, clang.mul(x, math.log(2))))
register_slopes(prims.sqrt, lambda t, y, x: clang.true_divide(t, clang.mul(y, 2.0)))


def _frexp_slope(t: TensorProxy, exponent: TensorProxy) -> TensorProxy:
    return clang.true_divide(t, clang.exp2(prims.convert_element_type(exponent, t.dtype)))


@register_jvp(prims.frexp)
def frexp(primals, tangents):
    """x = mantissa 2^exponent, so the mantissa moves by dx / 2^exponent; the exponent does not move."""
    mantissa, exponent = prims.frexp(*primals)
    return (mantissa, exponent), (_frexp_slope(tangents[0], exponent), None)


def _frexp(x: TensorProxy) -> tuple:
    mantissa, exponent = prims.frexp(x)
    return (mantissa, exponent), exponent


vjp_rules.add(prims.frexp, VjpRule(_frexp, lambda exponent, g, _: _frexp_slope(g, exponent)))
