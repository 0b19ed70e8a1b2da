"""Functions element by element.

A rule's gradients may still have the shape of the result where an operand is 0-dim: the evaluator sums them.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy

from thunder_norm.function_transforms.registry import register_vjp


def _minimum(a: Any, b: Any) -> tuple[TensorProxy, tuple]:
    return prims.minimum(a, b), (a, b)


def _minimum_backward(saved: tuple, g: TensorProxy) -> tuple:
    """To the smaller one; half to each where they are equal, as in torch."""
    a, b = saved
    share = clang.where(clang.eq(a, b), 0.5, clang.where(clang.lt(a, b), 1.0, 0.0))
    to_a = clang.mul(g, share)
    return to_a, clang.sub(g, to_a)


register_vjp(prims.minimum)(_minimum, _minimum_backward)


def _remainder(a: Any, b: Any) -> tuple[TensorProxy, tuple]:
    return prims.remainder(a, b), (a, b)


def _remainder_backward(saved: tuple, g: TensorProxy) -> tuple:
    """a - b floor(a / b), where floor does not move."""
    a, b = saved
    return g, clang.neg(clang.mul(g, clang.floor(clang.true_divide(a, b)))) if isinstance(b, TensorProxy) else None


register_vjp(prims.remainder)(_remainder, _remainder_backward)


def _lerp(start: TensorProxy, end: TensorProxy, weight: Any) -> tuple[TensorProxy, tuple]:
    return ltorch.lerp(start, end, weight), (start, end, weight)


def _lerp_backward(saved: tuple, g: TensorProxy) -> tuple:
    """start + w (end - start)."""
    start, end, weight = saved
    to_end = clang.mul(g, weight)
    to_weight = clang.mul(g, clang.sub(end, start)) if isinstance(weight, TensorProxy) else None
    return clang.sub(g, to_end), to_end, to_weight


register_vjp(prims.lerp)(_lerp, _lerp_backward)


def _real_backward(saved: TensorProxy, g: TensorProxy) -> TensorProxy:
    return prims.convert_element_type(g, saved.dtype) if dtypes.is_complex_dtype(saved.dtype) else g


register_vjp(prims.real)(lambda a: (prims.real(a), a), _real_backward)
register_vjp(prims.imag)(
    lambda a: (prims.imag(a), a), lambda a, g: clang.mul(prims.convert_element_type(g, a.dtype), complex(0, 1))
)

for _symbol in (prims.round, prims.trunc):
    register_vjp(_symbol)(lambda a, _symbol=_symbol: (_symbol(a), None), lambda saved, g: None)


def _zeta(s: Any, q: Any) -> tuple[TensorProxy, tuple]:
    return prims.zeta(s, q), (s, q)


def _zeta_backward(saved: tuple, g: TensorProxy) -> tuple:
    """By q, minus s times that of s + 1; there is no derivative by s in closed form, and torch has none either."""
    s, q = saved
    return None, clang.mul(g, clang.mul(clang.neg(s), prims.zeta(clang.add(s, 1.0), q)))


register_vjp(prims.zeta)(_zeta, _zeta_backward)
