"""Which of torch's operations go entry by entry, by their names, and of which dtype they take what has no dimensions."""

from __future__ import annotations

from typing import Any

from thunder_norm.op_names import is_in_place
from thunder.core import dtypes

_UNARY = (
    "abs neg sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid logit relu relu6 silu gelu softplus elu selu celu mish leaky_relu hardtanh hardsigmoid hardswish logsigmoid softsign "
    "tanhshrink erf erfc erfinv lgamma digamma sinc ceil floor round trunc frac isnan isinf isfinite logical_not bitwise_not positive "
    "absolute negative invert clone contiguous detach float double half bfloat16 int long bool to type nan_to_num"
)
_OF_SEVERAL = (
    "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin clamp "
    "clip clamp_min clamp_max where lerp addcmul addcdiv atan2 arctan2 hypot copysign xlogy logaddexp logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor lt le gt ge eq ne less less_equal greater greater_equal not_equal masked_fill"
)
_ENTRYWISE = frozenset((*_UNARY.split(), *_OF_SEVERAL.split()))
_OPERATORS = frozenset(
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs invert and rand or ror xor rxor "
    "lt le gt ge eq ne".split()
)
# Of what they take, they return another tensor in the same memory.
SHARING_MEMORY = frozenset("detach positive __pos__".split())
_DIVISIONS = frozenset("div divide floor_divide remainder fmod floordiv rfloordiv mod rmod".split())
METADATA = frozenset("dtype device layout ndim dim is_floating_point is_complex is_cuda __class__ __dict__".split())


def is_entrywise(name: str) -> bool:
    """Whether an operation does the same to each entry, and to those of what it is broadcast with."""
    return name in _ENTRYWISE or name[2:-2] in _OPERATORS and name == f"__{name[2:-2]}__"


def is_division(name: str) -> bool:
    """Whether an operation has torch raise for integers that are divided by zero."""
    return name in _DIVISIONS or (name.startswith("__") and name[2:-2] in _DIVISIONS)


def out_of_place(name: str) -> str | None:
    """What an operation does to each entry that writes into its first argument."""
    if name.startswith("__i") and name.endswith("__") and name[3:-2] in _OPERATORS and name != "__invert__":
        return f"__{name[3:-2]}__"
    return name[:-1] if is_in_place(name) and name[:-1] in _ENTRYWISE else None


def dtype_beside(dtype: Any, kinds: set[Any]) -> Any | None:
    """What a tensor without dimensions is taken as beside some of these kinds: it decides only where it is of a higher one."""
    if dtype in kinds or dtype is dtypes.bool8:  # as a condition it stays one
        return dtype
    floating = [k for k in kinds if dtypes.is_float_dtype(k)]
    integers = [k for k in kinds if dtypes.is_integer_dtype(k) and k is not dtypes.bool8]
    fitting = floating or ([] if dtypes.is_inexact_dtype(dtype) else integers)
    is_higher = dtypes.is_complex_dtype(dtype) or any(map(dtypes.is_complex_dtype, kinds))
    return fitting[0] if len(fitting) == 1 and not is_higher else None
