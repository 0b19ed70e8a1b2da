"""Reductions, and operations along one dimension that keep it: softmax, cumulative sums, sorting, drawing by weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from thunder_norm.functions.batching import shifted, with_batch
from thunder_norm.functions.derivatives import conjugate, holomorphic, plus
from thunder_norm.functions.programs import is_complex
from thunder_norm.functions.registry import batching_rules, decompositions, register_jvp, register_vjp
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, Symbol

# -- what both directions compute -------------------------------------------------------------------------------------


def _reduced(x: TensorProxy, dims: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that a reduction is over: dimension 0 of a 0-dim tensor is none."""
    return tuple(dims) if x.ndim else ()


def _restored(value: TensorProxy, like: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """A result of a reduction over `dims`, broadcast to the shape of what was reduced."""
    kept = tuple(d for d in range(like.ndim) if d not in dims)
    return prims.broadcast_in_dim(value, tuple(like.shape), kept)


def _from_mean(x: TensorProxy, dims: Sequence[int], correction: float) -> TensorProxy:
    """2 / (n - correction) (x - mean x), the gradient of the variance over `dims`: NaN where n is not larger than the correction."""
    if isinstance(correction, NumberProxy) and correction.value is None:
        raise data_dependent("the correction of a variance", "a derivative")
    n = math.prod(x.shape[d] for d in dims)
    mean = clang.true_divide(prims.sum(x, dims), n)
    return clang.mul(clang.sub(x, _restored(mean, x, dims)), 2.0 / (n - correction) if n > correction else math.nan)


def _factors(x: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """What a product over `dims` multiplies, along dimension 0."""
    kept = tuple(d for d in range(x.ndim) if d not in dims)
    shape = (math.prod(x.shape[d] for d in dims), *(x.shape[d] for d in kept))
    return clang.reshape(clang.transpose(x, (*dims, *kept)), shape)


def _halves(x: TensorProxy) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    """The first and the second half along dimension 0, and the last row if their number is odd."""
    n = x.shape[0]
    return _rows(x, 0, n // 2), _rows(x, n // 2, n // 2 * 2), _rows(x, n - 1, n) if n % 2 else None


def _rows(x: TensorProxy, start: int, end: int) -> TensorProxy:
    return prims.slice_prim(x, [start, *[0] * (x.ndim - 1)], [end, *x.shape[1:]], [1] * x.ndim)


# -- tangents ---------------------------------------------------------------------------------------------------------


def _extremum(operation, primals, tangents):
    """The mean of the tangents of all elements that attain it."""
    (x, dims), (dx, _) = primals, tangents
    out = operation(x, dims)
    attains = clang.eq(x, _restored(out, x, dims))
    total = prims.sum(clang.where(attains, dx, 0.0), dims)
    count = prims.sum(prims.convert_element_type(attains, dx.dtype), dims)
    return out, clang.true_divide(total, count)


for _symbol in (prims.amax, prims.amin):
    register_jvp(_symbol)(partial(_extremum, _symbol))


def _moved_variance(x: TensorProxy, dx: TensorProxy, dims: Sequence[int], correction: float) -> TensorProxy:
    """d var = 2 / (n - correction) sum Re(conj(x - mean) dx)."""
    gradient = _from_mean(x, dims, correction)
    product = clang.mul(conjugate(gradient), dx)
    return prims.sum(prims.real(product) if is_complex(product) else product, dims)


@register_jvp(prims.var)
def var(primals, tangents, *, correction):
    """d var = 2 / (n - correction) sum (x - mean) dx."""
    x, dims = primals
    return prims.var(x, dims, correction=correction), _moved_variance(x, tangents[0], _reduced(x, dims), correction)


@register_jvp(prims.var_mean)
def var_mean(primals, tangents, *, correction):
    """The variance as in `var`, the mean by the mean of the tangent."""
    (x, dims), (dx, _) = primals, tangents
    over = _reduced(x, dims)
    mean = clang.true_divide(prims.sum(dx, over), math.prod(x.shape[d] for d in over))
    return prims.var_mean(x, dims, correction=correction), (_moved_variance(x, dx, over, correction), mean)


@register_jvp(prims.std)
def std(primals, tangents, *, correction):
    """d std = d var / (2 std), 0 where std is 0."""
    (x, dims), (dx, _) = primals, tangents
    out = prims.std(x, dims, correction=correction)
    is_zero = clang.eq(out, 0.0)  # see the vjp rule
    moved = clang.where(is_zero, 0.0, _moved_variance(x, dx, _reduced(x, dims), correction))
    return out, clang.true_divide(moved, clang.where(is_zero, 1.0, clang.mul(out, 2.0)))


@register_jvp(prims.prod)
def prod(primals, tangents):
    """Pairs of factors are multiplied together with their tangents, in about log2(n) rounds: right where factors are 0, too."""
    (x, dims), (dx, _) = primals, tangents
    out = prims.prod(x, dims)
    if x.numel() == 0:
        return out, None
    dims = _reduced(x, dims)
    value, tangent = _factors(x, dims), _factors(dx, dims)
    while value.shape[0] > 1:
        (a, b, last), (da, db, d_last) = _halves(value), _halves(tangent)
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


# -- cotangents -------------------------------------------------------------------------------------------------------


def _prod(x: TensorProxy, dims: Sequence[int]) -> tuple[TensorProxy, tuple]:
    return prims.prod(x, dims), (x, _reduced(x, dims))


@holomorphic
def _prod_backward(saved: tuple, g: TensorProxy) -> tuple:
    """The product of the other factors, in about log2(n) rounds: right where factors are 0, which (prod x) / x is not."""
    x, dims = saved
    if x.numel() == 0:
        return clang.full_like(x, 0), None
    rounds = []
    value = _factors(x, dims)
    while value.shape[0] > 1:
        rounds.append(_halves(value))
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
    spread = _restored(g, x, dims)
    return clang.mul(prims.convert_element_type(spread, x.dtype) if is_complex(x) else spread, _from_mean(x, dims, correction))


def _var(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[TensorProxy, tuple]:
    return prims.var(x, dims, correction=correction), (x, _reduced(x, dims), correction)


register_vjp(prims.var)(_var, lambda saved, g: (_of_variance(g, *saved), None))


def _var_mean(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[tuple, tuple]:
    return prims.var_mean(x, dims, correction=correction), (x, _reduced(x, dims), correction)


def _var_mean_backward(saved: tuple, g: TensorProxy, g_mean: TensorProxy) -> tuple:
    x, dims, correction = saved
    of_mean = clang.true_divide(_restored(g_mean, x, dims), math.prod(x.shape[d] for d in dims))
    return clang.add(_of_variance(g, x, dims, correction), of_mean), None


register_vjp(prims.var_mean)(_var_mean, _var_mean_backward)


def _std(x: TensorProxy, dims: Sequence[int], *, correction: float) -> tuple[TensorProxy, tuple]:
    out = prims.std(x, dims, correction=correction)
    return out, (x, _reduced(x, dims), correction, out)


def _std_backward(saved: tuple, g: TensorProxy) -> tuple:
    """g / (2 std) times the gradient of the variance, 0 where std is 0."""
    x, dims, correction, out = saved
    is_zero = clang.eq(out, 0.0)  # what is divided by is another, so that derivatives of this are no 0 / 0
    scaled = clang.true_divide(clang.where(is_zero, 0.0, g), clang.where(is_zero, 1.0, clang.mul(out, 2.0)))
    return _of_variance(scaled, x, dims, correction), None


register_vjp(prims.std)(_std, _std_backward)


# -- batches ----------------------------------------------------------------------------------------------------------


# Reductions that are kept whole, with `dim` their second argument, None for all dimensions.
_COMPOSITES = (
    ltorch.sum,
    ltorch.mean,
    ltorch.amax,
    ltorch.amin,
    ltorch.var,
    ltorch.std,
    ltorch.var_mean,
    ltorch.all_tensor,
    ltorch.any_tensor,
    ltorch.logsumexp,
)


def composite(operation: Symbol) -> Callable:
    """The rule of a reduction of torch's."""
    dim_is_keyword = inspect.signature(operation.meta).parameters["dim"].kind is inspect.Parameter.KEYWORD_ONLY

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        ndim = a.ndim - 1
        dims = tuple(range(ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        if ndim == 0 or not dims or dim_is_keyword:
            return NotImplemented  # torch reads "no dimensions" as "all"
        return operation(a, tuple(shifted(d, ndim) for d in dims), *args, **kwargs), 0

    return rule


def primitive(operation: Symbol) -> Callable:
    """The rule of a primitive reduction over `dims`, which may be none."""

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, dims: Any, **kwargs: Any) -> Any:
        if dims and a.ndim > 1:
            return operation(a, tuple(shifted(d, a.ndim - 1) for d in dims), **kwargs), 0
        if operation in (prims.var, prims.std, prims.var_mean):
            wide = prims.reshape(a, (*a.shape, 1))
            return operation(wide, (wide.ndim - 1,), **kwargs), 0
        return prims.clone(a), 0

    return rule


def arg_reduction(operation: Symbol) -> Callable:
    """The rule of argmax and argmin: positions in the flattened sample if there is no dimension."""

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, dim: int | None) -> Any:
        if dim is None or a.ndim == 1:
            return operation(prims.reshape(a, (axis_size, math.prod(a.shape[1:]))), 1), 0
        return operation(a, shifted(dim, a.ndim - 1)), 0

    return rule


for _operation in _COMPOSITES:
    batching_rules.add(_operation, composite(_operation))

for _operation in (prims.amax, prims.amin, prims.prod, prims.sum, prims.var, prims.var_mean, prims.std):
    batching_rules.add(_operation, primitive(_operation))

for _operation in (prims.argmax, prims.argmin):
    batching_rules.add(_operation, arg_reduction(_operation))


# -- batches of what keeps the dimension: softmax, cumulative sums, sorting, drawing by weights ---------------------------


def along(operation: Symbol, position: int = 1) -> Callable:
    """The rule of an operation along a dimension, which is its argument number `position`.

    A sample of rank 0 counts as one of a single element.
    """

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if a.ndim == 1:
            given[position - 1] = 1
            results = operation(prims.reshape(a, (axis_size, 1)), *given, **kwargs)
            return tree_map(lambda r: prims.reshape(r, (axis_size,)), results), 0
        given[position - 1] = shifted(given[position - 1], a.ndim - 1)
        return operation(a, *given, **kwargs), 0

    return rule


def multinomial(
    axis_size: int, in_dims: tuple, weights: TensorProxy, num_samples: int, replacement: bool, seed: int | None = None
) -> Any:
    """Draws for each sample: the rows of weights (C,) or (B, C) of all samples are rows of one matrix."""
    weights = with_batch(axis_size, weights, in_dims[0])
    rows = prims.reshape(weights, (math.prod(weights.shape[:-1]), weights.shape[-1]))
    drawn = prims.multinomial(rows, num_samples, replacement, seed)
    return prims.reshape(drawn, (*weights.shape[:-1], num_samples)), 0


batching_rules.add(prims.multinomial, multinomial)
for _operation in (ltorch._softmax, ltorch.log_softmax, ltorch.cumsum, prims.sort):
    batching_rules.add(_operation, along(_operation))
batching_rules.add(prims.topk, along(prims.topk, 2))


def of_two(operation: Symbol) -> Callable:
    """The rule of an operation on two tensors of one shape along a dimension, the third argument."""

    def rule(axis_size: int, in_dims: tuple, a: TensorProxy, b: TensorProxy, dim: int, *args: Any) -> Any:
        a, b = with_batch(axis_size, a, in_dims[0]), with_batch(axis_size, b, in_dims[1])
        return NotImplemented if a.ndim == 1 else (operation(a, b, shifted(dim, a.ndim - 1), *args), 0)

    return rule


# -- in other operations ----------------------------------------------------------------------------------------------


def takes_one_of_equals(bsym: BoundSymbol) -> bool:
    """Whether it is ``x.max(dim)``, whose gradient is that of the entry at the index which it returns; Thunder has one of `amax`."""
    return bsym.sym.id == ltorch.torch_max.id and isinstance(_dim_of_max(*bsym.args, **bsym.kwargs), int | NumberProxy)


def _dim_of_max(a: TensorProxy, dim: Any = None, keepdim: bool = False) -> Any:
    return dim


def _max(a: TensorProxy, dim: Any = None, keepdim: bool = False) -> Any:
    """The entry at the index, for a maximum along a dimension."""
    if not isinstance(dim, int | NumberProxy) or a.ndim == 0:
        return NotImplemented
    index = ltorch.argmax(a, dim, True)
    found = ltorch.gather(a, dim, index), index
    return found if keepdim else tuple(ltorch.squeeze(t, dim) for t in found)


decompositions.add(ltorch.torch_max, _max)
