"""Elementwise operations: the same operation, once the dimensions of all operands are aligned.

For one sample a 0-dim operand meets (5,) without ado; in a batch (N,) must be made (N, 1) to meet (N, 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims, utils
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

from thunder_norm.functions.batch_dims import sample_ndim, sample_shape, tensors_of, to_sample_shape, with_sample_ndim
from thunder_norm.functions.registry import batching_rules

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
    "torch.clip torch.complex torch.conj_physical torch.deg2rad torch.divide torch.fix torch.float_power torch.fmax "
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
