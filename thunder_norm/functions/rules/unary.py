"""Functions of one variable, element by element."""

from __future__ import annotations

import math
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.derivatives import register_slopes
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import VjpRule, register_jvp, vjp_rules

for _symbol in (prims.ceil, prims.floor, prims.round, prims.sign, prims.trunc):
    register_slopes(_symbol, None)


def _register(operation, derivative) -> None:
    """``derivative(x, y)`` is f'(x), given also y = f(x)."""
    register_slopes(operation, lambda t, y, x: ltorch.mul(t, derivative(x, y)))


def _square(x: TensorProxy) -> TensorProxy:
    return ltorch.mul(x, x)


def _gaussian(scale: float, x: TensorProxy) -> TensorProxy:
    return ltorch.mul(ltorch.exp(ltorch.neg(_square(x))), scale)


def _acosh(x: TensorProxy, y: TensorProxy) -> Any:
    if not is_complex(x):
        return ltorch.rsqrt(ltorch.sub(_square(x), 1.0))
    return ltorch.mul(ltorch.rsqrt(ltorch.sub(x, 1.0)), ltorch.rsqrt(ltorch.add(x, 1.0)))  # x^2 - 1 has another branch


_ROOT_PI = math.sqrt(math.pi)

_register(prims.acos, lambda x, y: ltorch.neg(ltorch.rsqrt(ltorch.sub(1.0, _square(x)))))
_register(prims.acosh, _acosh)
_register(prims.asin, lambda x, y: ltorch.rsqrt(ltorch.sub(1.0, _square(x))))
_register(prims.asinh, lambda x, y: ltorch.rsqrt(ltorch.add(_square(x), 1.0)))
_register(prims.atan, lambda x, y: ltorch.reciprocal(ltorch.add(_square(x), 1.0)))
_register(prims.atanh, lambda x, y: ltorch.reciprocal(ltorch.sub(1.0, _square(x))))
_register(prims.cos, lambda x, y: ltorch.neg(ltorch.sin(x)))
_register(prims.cosh, lambda x, y: ltorch.sinh(x))
_register(prims.digamma, lambda x, y: prims.zeta(ltorch.full_like(x, 2.0), x))
_register(prims.erf, lambda x, y: _gaussian(2.0 / _ROOT_PI, x))
_register(prims.erfc, lambda x, y: _gaussian(-2.0 / _ROOT_PI, x))
_register(prims.erfcinv, lambda x, y: ltorch.mul(ltorch.exp(_square(y)), -_ROOT_PI / 2))
_register(prims.erfinv, lambda x, y: ltorch.mul(ltorch.exp(_square(y)), _ROOT_PI / 2))
_register(prims.exp, lambda x, y: y)
_register(prims.exp2, lambda x, y: ltorch.mul(y, math.log(2)))
_register(prims.expm1, lambda x, y: ltorch.add(y, 1.0))
_register(prims.lgamma, lambda x, y: ltorch.digamma(x))
_register(prims.ndtri, lambda x, y: ltorch.mul(ltorch.exp(ltorch.mul(_square(y), 0.5)), math.sqrt(2 * math.pi)))
_register(prims.reciprocal, lambda x, y: ltorch.neg(_square(y)))
_register(prims.rsqrt, lambda x, y: ltorch.mul(ltorch.mul(_square(y), y), -0.5))
_register(prims.sin, lambda x, y: ltorch.cos(x))
_register(prims.sinh, lambda x, y: ltorch.cosh(x))
_register(prims.tan, lambda x, y: ltorch.add(_square(y), 1.0))
_register(prims.tanh, lambda x, y: ltorch.sub(1.0, _square(y)))
register_slopes(prims.neg, lambda t, y, x: ltorch.neg(t))
register_slopes(prims.log, lambda t, y, x: ltorch.true_divide(t, x))
register_slopes(prims.log10, lambda t, y, x: ltorch.true_divide(t, ltorch.mul(x, math.log(10))))
register_slopes(prims.log1p, lambda t, y, x: ltorch.true_divide(t, ltorch.add(x, 1.0)))
register_slopes(prims.log2, lambda t, y, x: ltorch.true_divide(t, ltorch.mul(x, math.log(2))))
register_slopes(prims.sqrt, lambda t, y, x: ltorch.true_divide(t, ltorch.mul(y, 2.0)))


def _frexp_slope(t: TensorProxy, exponent: TensorProxy) -> TensorProxy:
    return ltorch.true_divide(t, ltorch.exp2(prims.convert_element_type(exponent, t.dtype)))


@register_jvp(prims.frexp)
def frexp(primals, tangents):
    """x = mantissa 2^exponent, so the mantissa moves by dx / 2^exponent; the exponent does not move."""
    mantissa, exponent = prims.frexp(*primals)
    return (mantissa, exponent), (_frexp_slope(tangents[0], exponent), None)


def _frexp(x: TensorProxy) -> tuple:
    mantissa, exponent = prims.frexp(x)
    return (mantissa, exponent), exponent


vjp_rules.add(prims.frexp, VjpRule(_frexp, lambda exponent, g, _: _frexp_slope(g, exponent)))
