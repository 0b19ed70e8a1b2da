"""Operations element by element: their derivatives, and batches, which are the same operation once all operands are aligned.

Where two branches meet (``maximum`` of equal numbers) the derivative is torch's: the mean of both sides.

For one sample a 0-dim operand meets (5,) without ado; in a batch (N,) must be made (N, 1) to meet (N, 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from numbers import Number
from typing import Any

import torch

from thunder_norm.errors import MissingTransformRuleError, with_details
from thunder_norm.functions.batching import sample_ndim, sample_shape, tensors_of, to_sample_shape, with_sample_ndim
from thunder_norm.functions.derivatives import complex_of, of_operand, register_slopes
from thunder_norm.functions.programs import detach, is_complex
from thunder_norm.functions.registry import VjpRule, batching_rules, decompositions, jvp_rules, register_jvp, vjp_rules
from thunder_norm.tracing.torch_functions.torch_semantics import clamp
import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims, utils
from thunder.core.proxies import NumberProxy, TensorProxy, pyval
from thunder.core.symbol import Symbol

# -- derivatives of functions of one variable -----------------------------------------------------------------------------


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


@register_jvp(prims.abs)
def absolute(primals, tangents):
    """dy = sign(x) dx, 0 at 0; for complex numbers Re(conj(x) dx) / y, 0 at 0."""
    (x,), (dx,) = primals, tangents
    out = prims.abs(x)
    if not is_complex(x):
        return out, ltorch.mul(dx, ltorch.sign(x))
    inner = ltorch.add(ltorch.mul(prims.real(x), prims.real(dx)), ltorch.mul(prims.imag(x), prims.imag(dx)))
    return out, _over_size(inner, out)


def _over_size(t: TensorProxy, size: TensorProxy) -> TensorProxy:
    """t / size, 0 where that is 0, as all its derivatives are: nothing is divided by 0."""
    is_zero = ltorch.eq(size, 0.0)
    return ltorch.where(is_zero, 0.0, ltorch.true_divide(t, ltorch.where(is_zero, 1.0, size)))


def _absolute_backward(saved: tuple, g: TensorProxy) -> TensorProxy:
    """g sign(x); for complex numbers g x / y, 0 at 0."""
    x, out = saved
    if not is_complex(x):
        return ltorch.mul(g, ltorch.sign(x))
    return ltorch.mul(x, prims.convert_element_type(_over_size(g, out), x.dtype))


vjp_rules.add(prims.abs, VjpRule(lambda x: ((out := prims.abs(x)), (x, out)), _absolute_backward))


# -- of two or three ------------------------------------------------------------------------------------------------------


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


def _share(is_left: Callable, t: TensorProxy, mine: Any, other: Any) -> TensorProxy:
    """Of two, one of which is no number, both are chosen; of what is left nothing comes, be it infinite."""
    return clang.where(clang.eq(mine, other), ltorch.mul(t, 0.5), clang.where(is_left(mine, other), 0.0, t))


for _symbol, _is_left in ((prims.maximum, clang.lt), (prims.minimum, clang.gt)):
    register_slopes(
        _symbol,
        lambda t, y, a, b, _is_left=_is_left: _share(_is_left, t, a, b),
        lambda t, y, a, b, _is_left=_is_left: _share(_is_left, t, b, a),
    )


def _moves_at_bounds() -> bool:
    """Whether the installed torch's derivative of clamp is 1 at its bounds, as it was up to 2.13, or 0."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(max=1.0).sum(), x)[0])


_ABOVE, _BELOW = (ltorch.ge, ltorch.le) if _moves_at_bounds() else (ltorch.gt, ltorch.lt)


def _clamp_slope(t: TensorProxy, y: TensorProxy, x: TensorProxy, low: Any = None, high: Any = None) -> TensorProxy:
    for is_inside, bound in ((_ABOVE, low), (_BELOW, high)):
        t = t if bound is None else ltorch.where(is_inside(x, bound), t, 0.0)
    return t


register_slopes(clamp, _clamp_slope)


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
    if isinstance(a, Number | NumberProxy):  # of a number that is read from a tensor no value is known
        a = ltorch.mul(ltorch.ones_like(b), a)
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


def _polar(abs: TensorProxy, angle: TensorProxy) -> TensorProxy:
    """r (cos t + i sin t).  Torch 2.11's tangent of it has a wrong sign."""
    return complex_of(ltorch.mul(abs, ltorch.cos(angle)), ltorch.mul(abs, ltorch.sin(angle)))


decompositions.add(torch.polar, _polar)


def _rounded_quotient(a: Any, b: Any, *, rounding_mode: str | None = None, out: None = None) -> Any:
    """Constant wherever it is differentiable: torch's derivatives are 0, also by a zero, where those of the quotient are infinite."""
    if rounding_mode is None:
        return NotImplemented
    quotient = ltorch.floor_divide(a, b) if rounding_mode == "floor" else clang.trunc_divide(a, b)
    detach(quotient)
    return prims.shallow_copy(quotient)


decompositions.add(torch.div, _rounded_quotient)


# The bits of a number as those of another type: no derivative.
jvp_rules.add(prims.bitcast, lambda primals, tangents, **kwargs: (prims.bitcast(*primals, **kwargs), None))


# -- batches --------------------------------------------------------------------------------------------------------------


_PRIMITIVES = (
    "abs acos acosh add asin asinh atan atan2 atanh bitcast bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
    "bitwise_xor ceil clone convert_element_type cos cosh device_put digamma div eq erf erfc erfcinv erfinv exp exp2 expm1 floor fmod "
    "frexp ge gt imag isfinite le lerp lgamma log log10 log1p log2 lt maximum minimum mul ndtri ne neg nextafter pow real "
    "reciprocal remainder round rsqrt shallow_copy sign signbit sin sinh sqrt sub tan tanh trunc where zeta"
).split()

# Kept whole, although Thunder could take most of them apart: the result is shorter, and torch has kernels for them.
_COMPOSITES = (
    "abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or "
    "bitwise_right_shift bitwise_xor ceil celu clamp clone copysign cos cosh digamma div elu eq erf erfc erfinv exp exp2 expm1 floor "
    "floor_divide fmod ge gelu gt hardshrink hardsigmoid hardswish hardtanh imag isfinite isinf isnan ldexp le leaky_relu lerp lgamma "
    "log log10 log1p log2 logical_and logical_not logical_or logical_xor logsigmoid lt masked_fill maximum minimum mish mul "
    "nan_to_num ne neg nextafter polygamma pow real reciprocal relu relu6 remainder round rsqrt selu sigmoid sign signbit silu sin "
    "sinh softplus softshrink softsign sqrt square sub tan tanh tanhshrink threshold true_divide trunc where"
).split()

# Torch runs them as they are; nothing is known of what they consist of.
_OPAQUE = (
    "torch.absolute torch.angle torch.arccos torch.arccosh torch.arcsin torch.arcsinh torch.arctan torch.arctan2 torch.arctanh "
    "torch.clip torch.complex torch.conj_physical torch.deg2rad torch.detach torch.divide torch.fix torch.float_power torch.fmax "
    "torch.fmin torch.frac torch.gcd torch.heaviside torch.hypot torch.i0 torch.igamma torch.igammac torch.isclose torch.isneginf "
    "torch.isposinf torch.isreal torch.lcm torch.logaddexp torch.logaddexp2 torch.logit torch.multiply torch.negative torch.polar "
    "torch.positive torch.rad2deg torch.rsub torch.sgn torch.sinc torch.subtract torch.xlogy torch.greater torch.greater_equal "
    "torch.less torch.less_equal torch.not_equal"
).split() + [
    f"torch.special.{name}"
    for name in (
        "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erf erfc erfcx erfinv exp2 expm1 gammainc gammaincc gammaln i0 i0e i1 i1e "
        "log1p log_ndtr logit modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri psi round "
        "scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc spherical_bessel_j0 xlog1py xlogy"
    ).split()
]


def elementwise(operation: Symbol) -> Callable:
    """The rule of an operation that broadcasts its operands as torch does."""

    def rule(axis_size: int, in_dims: tuple, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of(in_dims, args)
        ndim = max(sample_ndim(t, d) for t, d in tensors)
        if len({t.dtype for t, _ in tensors}) > 1 and any(sample_ndim(t, d) == 0 for t, d in tensors):
            return NotImplemented  # 0-dim operands count less for the dtype of the result, and are not 0-dim in a batch
        given = [with_sample_ndim(a, d, ndim) if isinstance(a, TensorProxy) else a for a, d in zip(args, in_dims, strict=True)]
        return operation(*given, **kwargs), 0

    return rule


def primitive(operation: Symbol) -> Callable:
    """The rule of an elementwise primitive, whose operands have the same shape, except for 0-dim ones on the CPU."""

    def rule(axis_size: int, in_dims: tuple, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of(in_dims, args)
        if len(tensors) == 1:
            return operation(*args, **kwargs), 0
        shape = max((sample_shape(t, d) for t, d in tensors), key=len)

        def aligned(a: Any, d: int | None) -> Any:
            if not isinstance(a, TensorProxy) or (d is None and utils.is_cpu_scalar_tensor(a)):
                return a
            return to_sample_shape(axis_size, a, d, shape)

        return operation(*map(aligned, args, in_dims), **kwargs), 0

    return rule


for _name in _PRIMITIVES:
    _prim = prims.py_abs if _name == "py_abs" else getattr(prims, _name)
    batching_rules.add(_prim, primitive(_prim))

for _name in _COMPOSITES:
    batching_rules.add(getattr(ltorch, _name), elementwise(getattr(ltorch, _name)))

_auto_registered = {s.id: s for s in ltorch._torch_to_thunder_function_map.values() if isinstance(s, Symbol)}
for _id in _OPAQUE:
    batching_rules.add(_id, elementwise(_auto_registered[_id]))

batching_rules.add(clamp, elementwise(clamp))
