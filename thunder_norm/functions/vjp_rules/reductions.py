"""Products and variances."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.complex_numbers import holomorphic, is_complex
from thunder_norm.functions.jvp_rules._shared import factors, from_mean, halves, reduced, restored
from thunder_norm.functions.registry import register_vjp


def _prod(x: TensorProxy, dims: Sequence[int]) -> tuple[TensorProxy, tuple]:
    return prims.prod(x, dims), (x, reduced(x, dims))


@holomorphic
def _prod_backward(saved: tuple, g: TensorProxy) -> tuple:
    """The product of the other factors, in about log2(n) rounds: right where factors are 0, which (prod x) / x is not."""
    x, dims = saved
    if x.numel() == 0:
        return clang.full_like(x, 0), None
    rounds = []
    value = factors(x, dims)
    while value.shape[0] > 1:
        rounds.append(halves(value))
        a, b, last = rounds[-1]
        value = clang.mul(a, b)
        if last is not None:
            value = prims.cat([value, last], 0)
    gradient = clang.unsqueeze(g, 0)
    for a, b, last in reversed(rounds):
        n = a.shape[0]
        of_pairs = gradient if last is None else clang.slice_in_dim(gradient, 0, n)
        parts = [clang.mul(of_pairs, b), clang.mul(of_pairs, a)]
        if last is not None:
            parts.append(clang.slice_in_dim(gradient, n, n + 1))
        gradient = prims.cat(parts, 0)
    kept = tuple(d for d in range(x.ndim) if d not in dims)
    order = (*dims, *kept)
    spread = clang.reshape(gradient, tuple(x.shape[d] for d in order))
    return clang.transpose(spread, tuple(order.index(d) for d in range(x.ndim))), None


register_vjp(prims.prod)(_prod, _prod_backward)


def _of_variance(g: TensorProxy, x: TensorProxy, dims: Sequence[int], correction: float) -> TensorProxy:
    spread = restored(g, x, dims)
    return clang.mul(prims.convert_element_type(spread, x.dtype) if is_complex(x) else spread, from_mean(x, dims, correction))


def _var(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[TensorProxy, tuple]:
    return prims.var(x, dims, correction=correction), (x, reduced(x, dims), correction)


register_vjp(prims.var)(_var, lambda saved, g: (_of_variance(g, *saved), None))


def _var_mean(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[tuple, tuple]:
    return prims.var_mean(x, dims, correction=correction), (x, reduced(x, dims), correction)


def _var_mean_backward(saved: tuple, g: TensorProxy, g_mean: TensorProxy) -> tuple:
    x, dims, correction = saved
    of_mean = clang.true_divide(restored(g_mean, x, dims), math.prod(x.shape[d] for d in dims))
    return clang.add(_of_variance(g, x, dims, correction), of_mean), None


register_vjp(prims.var_mean)(_var_mean, _var_mean_backward)


def _std(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[TensorProxy, tuple]:
    out = prims.std(x, dims, correction=correction)
    return out, (x, reduced(x, dims), correction, out)


def _std_backward(saved: tuple, g: TensorProxy) -> tuple:
    """G / (2 std) times the gradient of the variance, 0 where std is 0."""
    x, dims, correction, out = saved
    is_zero = clang.eq(out, 0.0)  # what is divided by is another, so that derivatives of this are no 0 / 0
    scaled = clang.true_divide(clang.where(is_zero, 0.0, g), clang.where(is_zero, 1.0, clang.mul(out, 2.0)))
    return _of_variance(scaled, x, dims, correction), None


register_vjp(prims.std)(_std, _std_backward)
