"""Which of torch's operations go entry by entry, by their names."""

from __future__ import annotations

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
METADATA = frozenset("dtype device layout ndim dim is_floating_point is_complex is_cuda __class__ __dict__".split())


def is_entrywise(name: str) -> bool:
    """Whether an operation does the same to each entry, and to those of what it is broadcast with."""
    return name in _ENTRYWISE or name[2:-2] in _OPERATORS and name == f"__{name[2:-2]}__"


def out_of_place(name: str) -> str | None:
    """What an operation does to each entry that writes into its first argument."""
    if name.startswith("__i") and name.endswith("__") and name[3:-2] in _OPERATORS and name != "__invert__":
        return f"__{name[3:-2]}__"
    return name[:-1] if name.endswith("_") and not name.endswith("__") and name[:-1] in _ENTRYWISE else None
