"""Reductions: over the dimensions of one sample, never over the batch dimension."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

from thunder_norm.functions.batch_dims import shifted
from thunder_norm.functions.registry import batching_rules

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
