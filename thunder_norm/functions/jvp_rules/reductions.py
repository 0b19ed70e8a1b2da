"""Reductions, and choices along a dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.complex_numbers import conjugate, is_complex
from thunder_norm.functions.jvp_rules._shared import factors, from_mean, halves, plus, reduced, restored
from thunder_norm.functions.registry import register_jvp


def _extremum(operation, primals, tangents):
    """The mean of the tangents of all elements that attain it."""
    (x, dims), (dx, _) = primals, tangents
    out = operation(x, dims)
    attains = clang.eq(x, restored(out, x, dims))
    total = prims.sum(clang.where(attains, dx, 0.0), dims)
    count = prims.sum(prims.convert_element_type(attains, dx.dtype), dims)
    return out, clang.true_divide(total, count)


for _symbol in (prims.amax, prims.amin):
    register_jvp(_symbol)(partial(_extremum, _symbol))


def _moved_variance(x: TensorProxy, dx: TensorProxy, dims: Sequence[int], correction: float) -> TensorProxy:
    """d var = 2 / (n - correction) sum Re(conj(x - mean) dx)."""
    gradient = from_mean(x, dims, correction)
    product = clang.mul(conjugate(gradient), dx)
    return prims.sum(prims.real(product) if is_complex(product) else product, dims)


@register_jvp(prims.var)
def var(primals, tangents, *, correction):
    """d var = 2 / (n - correction) sum (x - mean) dx."""
    x, dims = primals
    return prims.var(x, dims, correction=correction), _moved_variance(x, tangents[0], reduced(x, dims), correction)


@register_jvp(prims.var_mean)
def var_mean(primals, tangents, *, correction):
    """The variance as in `var`, the mean by the mean of the tangent."""
    (x, dims), (dx, _) = primals, tangents
    over = reduced(x, dims)
    mean = clang.true_divide(prims.sum(dx, over), math.prod(x.shape[d] for d in over))
    return prims.var_mean(x, dims, correction=correction), (_moved_variance(x, dx, over, correction), mean)


@register_jvp(prims.std)
def std(primals, tangents, *, correction):
    """d std = d var / (2 std), 0 where std is 0."""
    (x, dims), (dx, _) = primals, tangents
    out = prims.std(x, dims, correction=correction)
    is_zero = clang.eq(out, 0.0)  # see the vjp rule
    moved = clang.where(is_zero, 0.0, _moved_variance(x, dx, reduced(x, dims), correction))
    return out, clang.true_divide(moved, clang.where(is_zero, 1.0, clang.mul(out, 2.0)))


@register_jvp(prims.prod)
def prod(primals, tangents):
    """Pairs of factors are multiplied together with their tangents, in about log2(n) rounds: right where factors are 0, too."""
    (x, dims), (dx, _) = primals, tangents
    out = prims.prod(x, dims)
    if x.numel() == 0:
        return out, None
    dims = reduced(x, dims)
    value, tangent = factors(x, dims), factors(dx, dims)
    while value.shape[0] > 1:
        (a, b, last), (da, db, d_last) = halves(value), halves(tangent)
        value, tangent = clang.mul(a, b), plus(clang.mul(da, b), clang.mul(a, db))
        if last is not None:
            value, tangent = prims.cat([value, last], 0), prims.cat([tangent, d_last], 0)
    return out, prims.squeeze(tangent, (0,))


def _chosen(tangent: TensorProxy, indices: TensorProxy, dim: int) -> TensorProxy:
    return tangent if tangent.ndim == 0 else prims.gather(tangent, indices, dim)


@register_jvp(prims.topk)
def topk(primals, tangents):
    """The tangents of the elements that were taken."""
    values, indices = prims.topk(*primals)
    return (values, indices), (_chosen(tangents[0], indices, primals[2]), None)


@register_jvp(prims.sort)
def sort(primals, tangents):
    """The tangents in the order of the values."""
    values, indices = prims.sort(*primals)
    return (values, indices), (_chosen(tangents[0], indices, primals[1]), None)
