"""What rules of several families have in common.

Rules call Thunder's own operations (``thunder.clang``, ``thunder.prims``): what they emit is transformed again by an outer
transform.  A tangent of None is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

from thunder_norm.functions.registry import register_jvp


def plus(a: TensorProxy | None, b: TensorProxy | None) -> TensorProxy | None:
    """The sum of two tangents."""
    if a is None or b is None:
        return b if a is None else a
    return clang.add(a, b)


def or_zeros(tangent: TensorProxy | None, primal: Any) -> Any:
    """A tangent as a tensor, or the number zero for a number."""
    if tangent is not None:
        return tangent
    return clang.full_like(primal, 0) if isinstance(primal, TensorProxy) else type(primal)(0)


def reduced(x: TensorProxy, dims: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that a reduction is over: dimension 0 of a 0-dim tensor is none."""
    return tuple(dims) if x.ndim else ()


def restored(reduced: TensorProxy, like: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """A result of a reduction over `dims`, broadcast to the shape of what was reduced."""
    kept = tuple(d for d in range(like.ndim) if d not in dims)
    return prims.broadcast_in_dim(reduced, tuple(like.shape), kept)


def from_mean(x: TensorProxy, dims: Sequence[int], correction: float) -> TensorProxy:
    """2 / (n - correction) (x - mean x), the gradient of the variance over `dims`: NaN where n is not larger than the correction."""
    n = math.prod(x.shape[d] for d in dims)
    mean = clang.true_divide(prims.sum(x, dims), n)
    return clang.mul(clang.sub(x, restored(mean, x, dims)), 2.0 / (n - correction) if n > correction else math.nan)


def factors(x: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """What a product over `dims` multiplies, along dimension 0."""
    kept = tuple(d for d in range(x.ndim) if d not in dims)
    shape = (math.prod(x.shape[d] for d in dims), *(x.shape[d] for d in kept))
    return clang.reshape(clang.transpose(x, (*dims, *kept)), shape)


def halves(x: TensorProxy) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    """The first and the second half along dimension 0, and the last row if their number is odd."""
    n = x.shape[0]
    return _rows(x, 0, n // 2), _rows(x, n // 2, n // 2 * 2), _rows(x, n - 1, n) if n % 2 else None


def _rows(x: TensorProxy, start: int, end: int) -> TensorProxy:
    return prims.slice_prim(x, [start, *[0] * (x.ndim - 1)], [end, *x.shape[1:]], [1] * x.ndim)


def register_linear(operation: Symbol, *arguments: int) -> None:
    """Rule of an operation that is linear in `arguments` together: the tangent is the operation on their tangents."""

    def rule(primals: tuple, tangents: tuple, **kwargs: Any) -> tuple:
        pushed = list(primals)
        for i in arguments:
            pushed[i] = or_zeros(tangents[i], primals[i])
        return operation(*primals, **kwargs), operation(*pushed, **kwargs)

    register_jvp(operation)(rule)


def register_multilinear(operation: Symbol, *arguments: int) -> None:
    """Rule of an operation that is linear in each of `arguments` by itself: one term for each."""

    def rule(primals: tuple, tangents: tuple, **kwargs: Any) -> tuple:
        out, total = operation(*primals, **kwargs), None
        for i in arguments:
            if tangents[i] is not None:
                total = plus(total, operation(*primals[:i], tangents[i], *primals[i + 1 :], **kwargs))
        return out, total

    register_jvp(operation)(rule)
