"""Functions of one variable, element by element."""

from __future__ import annotations

import math

from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy

from thunder_norm.function_transforms.jvp_rules._shared import over, register_constant, register_pointwise
from thunder_norm.function_transforms.registry import register_jvp

for _symbol in (prims.ceil, prims.floor, prims.round, prims.sign, prims.trunc):
    register_constant(_symbol)


def _square(x: TensorProxy) -> TensorProxy:
    return clang.mul(x, x)


def _gaussian(scale: float, x: TensorProxy) -> TensorProxy:
    return clang.mul(clang.exp(clang.neg(_square(x))), scale)


_ROOT_PI = math.sqrt(math.pi)

register_pointwise(prims.acos, lambda x, y: clang.neg(clang.rsqrt(clang.sub(1.0, _square(x)))))
register_pointwise(prims.acosh, lambda x, y: clang.rsqrt(clang.sub(_square(x), 1.0)))
register_pointwise(prims.asin, lambda x, y: clang.rsqrt(clang.sub(1.0, _square(x))))
register_pointwise(prims.asinh, lambda x, y: clang.rsqrt(clang.add(_square(x), 1.0)))
register_pointwise(prims.atan, lambda x, y: clang.reciprocal(clang.add(_square(x), 1.0)))
register_pointwise(prims.atanh, lambda x, y: clang.reciprocal(clang.sub(1.0, _square(x))))
register_pointwise(prims.cos, lambda x, y: clang.neg(clang.sin(x)))
register_pointwise(prims.cosh, lambda x, y: clang.sinh(x))
register_pointwise(prims.digamma, lambda x, y: prims.zeta(clang.full_like(x, 2.0), x))
register_pointwise(prims.erf, lambda x, y: _gaussian(2.0 / _ROOT_PI, x))
register_pointwise(prims.erfc, lambda x, y: _gaussian(-2.0 / _ROOT_PI, x))
register_pointwise(prims.erfcinv, lambda x, y: clang.mul(clang.exp(_square(y)), -_ROOT_PI / 2))
register_pointwise(prims.erfinv, lambda x, y: clang.mul(clang.exp(_square(y)), _ROOT_PI / 2))
register_pointwise(prims.exp, lambda x, y: y)
register_pointwise(prims.exp2, lambda x, y: clang.mul(y, math.log(2)))
register_pointwise(prims.expm1, lambda x, y: clang.add(y, 1.0))
register_pointwise(prims.lgamma, lambda x, y: clang.digamma(x))
register_pointwise(prims.ndtri, lambda x, y: clang.mul(clang.exp(clang.mul(_square(y), 0.5)), math.sqrt(2 * math.pi)))
register_pointwise(prims.reciprocal, lambda x, y: clang.neg(_square(y)))
register_pointwise(prims.rsqrt, lambda x, y: clang.mul(clang.mul(_square(y), y), -0.5))
register_pointwise(prims.sin, lambda x, y: clang.cos(x))
register_pointwise(prims.sinh, lambda x, y: clang.cosh(x))
register_pointwise(prims.tan, lambda x, y: clang.add(_square(y), 1.0))
register_pointwise(prims.tanh, lambda x, y: clang.sub(1.0, _square(y)))


@register_jvp(prims.log)
def log(primals, tangents):
    """dy = dx / x."""
    return prims.log(*primals), over(tangents[0], primals[0])


@register_jvp(prims.log10)
def log10(primals, tangents):
    """dy = dx / (x ln 10)."""
    return prims.log10(*primals), over(tangents[0], clang.mul(primals[0], math.log(10)))


@register_jvp(prims.log1p)
def log1p(primals, tangents):
    """dy = dx / (1 + x)."""
    return prims.log1p(*primals), over(tangents[0], clang.add(primals[0], 1.0))


@register_jvp(prims.log2)
def log2(primals, tangents):
    """dy = dx / (x ln 2)."""
    return prims.log2(*primals), over(tangents[0], clang.mul(primals[0], math.log(2)))


@register_jvp(prims.sqrt)
def sqrt(primals, tangents):
    """dy = dx / (2 y)."""
    out = prims.sqrt(*primals)
    return out, over(tangents[0], clang.mul(out, 2.0))


@register_jvp(prims.abs)
def absolute(primals, tangents):
    """dy = sign(x) dx, 0 at 0; for complex numbers Re(conj(x) dx) / y, 0 at 0."""
    (x,), (dx,) = primals, tangents
    out = prims.abs(x)
    if not dtypes.is_complex_dtype(x.dtype):
        return out, clang.mul(dx, clang.sign(x))
    inner = clang.add(clang.mul(prims.real(x), prims.real(dx)), clang.mul(prims.imag(x), prims.imag(dx)))
    return out, clang.where(clang.eq(out, 0.0), 0.0, clang.true_divide(inner, out))


@register_jvp(prims.frexp)
def frexp(primals, tangents):
    """x = mantissa 2^exponent, so the mantissa moves by dx / 2^exponent; the exponent does not move."""
    mantissa, exponent = prims.frexp(*primals)
    scale = clang.exp2(prims.convert_element_type(exponent, mantissa.dtype))
    return (mantissa, exponent), (over(tangents[0], scale), None)
