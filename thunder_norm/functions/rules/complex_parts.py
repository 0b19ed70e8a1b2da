"""Operations on complex numbers that are linear over the reals only, and the modulus.

For those the transpose is with respect to ``Re(conj(a) b)``, the inner product of PyTorch's gradients.
"""

from __future__ import annotations

import torch

from thunder_norm.functions.derivatives import complex_of, conj_physical, summed_to
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import VjpRule, decompositions, jvp_rules, register_jvp, vjp_rules
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy


def _complex(a: TensorProxy, like: TensorProxy) -> TensorProxy:
    return prims.convert_element_type(a, like.dtype)


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
    return ltorch.mul(x, _complex(_over_size(g, out), x))


vjp_rules.add(prims.abs, VjpRule(lambda x: ((out := prims.abs(x)), (x, out)), _absolute_backward))


def _linear(operation, pulled) -> None:
    """Of one argument and linear over the reals: the tangent is the operation on the tangent; ``pulled(x, g)`` is its transpose."""
    jvp_rules.add(operation, lambda primals, tangents: (operation(*primals), operation(*tangents)))
    vjp_rules.add(operation, VjpRule(lambda x: (operation(x), x), pulled))


_linear(prims.real, lambda x, g: _complex(g, x) if is_complex(x) else g)
_linear(prims.imag, lambda x, g: ltorch.mul(_complex(g, x), complex(0, 1)))
_linear(conj_physical, lambda x, g: conj_physical(g) if is_complex(x) else g)


@register_jvp(complex_of)
def complex_(primals, tangents):
    """The tangents of the parts; zero where one does not move."""
    parts = (ltorch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True))
    return complex_of(*primals), complex_of(*parts)


vjp_rules.add(
    complex_of,
    VjpRule(
        lambda real, imag: (complex_of(real, imag), (real, imag)),
        lambda saved, g: (summed_to(prims.real(g), saved[0]), summed_to(prims.imag(g), saved[1])),
    ),
)


@register_jvp(prims.convert_element_type)
def convert_element_type(primals, tangents):
    """The tangent in the other dtype; of a real one made of complex numbers the real part."""
    return prims.convert_element_type(*primals), _converted(tangents[0], primals[1])


def _converted(t: TensorProxy, dtype: dtypes.dtype) -> TensorProxy:
    if is_complex(t) and not dtypes.is_complex_dtype(dtypes.to_dtype(dtype)):
        t = prims.real(t)
    return prims.convert_element_type(t, dtype)


vjp_rules.add(
    prims.convert_element_type,
    VjpRule(lambda x, dtype: (prims.convert_element_type(x, dtype), x), lambda x, g: (_converted(g, x.dtype), None)),
)


def _polar(abs: TensorProxy, angle: TensorProxy) -> TensorProxy:
    """r (cos t + i sin t).  Torch 2.11's tangent of it has a wrong sign."""
    return complex_of(ltorch.mul(abs, ltorch.cos(angle)), ltorch.mul(abs, ltorch.sin(angle)))


decompositions.add(torch.polar, _polar)
