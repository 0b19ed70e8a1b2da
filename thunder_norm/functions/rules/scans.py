"""Operations along one dimension that keep it: softmax, cumulative sums, sorting, drawing by weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import Symbol

from thunder_norm.functions.backwards import softmax_backward
from thunder_norm.functions.batch_dims import shifted, with_batch
from thunder_norm.functions.registry import batching_rules


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


for _operation in (ltorch.log_softmax_backward, softmax_backward):
    batching_rules.add(_operation, of_two(_operation))
