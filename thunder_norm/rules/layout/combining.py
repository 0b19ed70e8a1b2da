"""Norm rules for writing with a reduction, and at several indices at once: index_reduce, scatter_reduce, index_put, put.

What is written where is plain data.  Averages and extrema of several entries are no larger than their energies together, so
that they share the bounds of `replacing`; products are bounded by the largest entries.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import (
    Constant,
    align,
    as_kind,
    broadcast,
    maximum,
    negative,
    over_dims_of,
    refined,
    refuse,
    rms,
    root_sum_squares,
)
from thunder_norm.rules.layout.replacing import replaced, scatter, scatter_add
from thunder_norm.rules.reducing.running import largest_slope
from thunder_norm.scalars import times

_SOURCE = {"source": over_dims_of("input"), "input": over_dims_of("source")}
_SRC = {"src": over_dims_of("input"), "input": over_dims_of("src")}


def _multiplied(x: RMSTensor, part: RMSTensor, count: int, name: str, include_self: bool) -> LinfTensor:
    """Entries of x, times (or, where there are any, replaced by) a product of up to m = `count` entries of `part`.

    Value:       n max(1, s^m), or max(n, s, s^m) if x does not take part         (attained: constants)
    Sensitivity: max(1, s^m) or 1 to x; max_k k s^(k-1), k = 1 .. m, times n or 1, to the part
    """
    (a, c), (b, c_part) = as_kind(x, LinfTensor, ()), as_kind(part, LinfTensor, ())
    n, s = a.norm_size, b.norm_size
    power = s.pow(max(count, 1))
    slope, to_x = largest_slope(s, count) * c_part, torch.ones_like(n)
    if include_self:
        growth = power.clamp(min=1.0)
        return LinfTensor(n * growth, elem_dims=(), sensitivity={"input": growth * c, name: n * slope})
    return LinfTensor(maximum([n, s, power]), elem_dims=(), sensitivity={"input": to_x * c, name: slope})


def _averaged(x: RMSTensor, part: RMSTensor, count: int, name: str, include_self: bool) -> RMSTensor:
    """Rows of x, averaged with (or replaced by the average of) up to m = `count` rows of `part`, in the norm of rows.

    Value:       max(n, (n + m s) / (m + 1)), or max(n, s)    (attained: constants)
    Sensitivity: 1 to x where nothing is written; m / (m + 1), or 1, to the part
    """
    dims, (c, c_part) = align(x.shape, x, part)
    n, s = times(x.norm_size, c), times(part.norm_size, c_part)
    if not include_self:
        return rms(torch.maximum(n, s), dims, sensitivity={"input": c, name: c_part})
    mixed = (n + s * count) / (count + 1)
    return rms(torch.maximum(n, mixed), dims, sensitivity={"input": c, name: c_part * count / (count + 1)})


def _largest(x: RMSTensor, part: RMSTensor, count: int, name: str) -> RMSTensor:
    """Rows of x, each entry the largest (smallest) of its own and those of up to m = `count` rows of `part`.

    Value:       sqrt(n^2 + min(m, N) s^2), N entries in the norm of a row, max(n, s) from the largest entries     (attained)
    Sensitivity: 1 to x, sqrt(min(m, N)) to the part
    """
    dims, (c, c_part) = align(x.shape, x, part)
    c_part *= math.sqrt(max(min(count, ed.numel(x.shape, dims)), 1))
    sizes = times(x.norm_size, c), times(part.norm_size, c_part)
    value = root_sum_squares(*sizes) if ed.nontrivial(x.shape, dims) else maximum(sizes)
    return rms(value, dims, sensitivity={"input": c, name: c_part})


def _check(reduce: str) -> None:
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        raise NormMismatchError(f"no reduction is called {reduce!r}")


@normed_op(torch.index_reduce).register_norm(allow_plain_tensors="constant", lift_dims=_SOURCE)
def index_reduce(
    input: RMSTensor, dim: int, index: torch.Tensor, source: RMSTensor, reduce: str, *, include_self: bool = True
) -> RMSTensor:
    """Rows of x reduced with those of `source`, m of them, that a plain index assigns to each.

    mean, amax, amin where the norm runs over `dim` (of K positions):
      Value:       sqrt(n^2 + (m / K) s^2)   (approached: x elsewhere, each row of the source on one of its own)
      Sensitivity: 1 to x, sqrt(m / K) to the source
    mean: `_averaged`;  amax, amin: `_largest`;  prod: `_multiplied`, by the largest entries
    Source: ``(mean of squares) <= (sum of squares)``, ``max_i t_i^2 <= sum_i t_i^2``
    """
    _check(reduce)
    count = index.numel()
    if reduce == "prod":
        return _multiplied(input, source, count, "source", include_self)
    along = negative(dim, input.ndim) if input.ndim else 0
    if along in align(input.shape, input, source)[0]:
        return replaced(input, source, along, "source")
    if reduce == "mean":
        return _averaged(input, source, count, "source", include_self)
    return _largest(input, source, count, "source")


@normed_op(torch.scatter_reduce).register_norm(allow_plain_tensors="constant", lift_dims=_SRC)
def scatter_reduce(
    input: RMSTensor, dim: int, index: torch.Tensor, src: RMSTensor, reduce: str, *, include_self: bool = True
) -> RMSTensor:
    """out[index[i, e], e] = x and all src[i, e] that go there, reduced; m positions i.

    sum:               `scatter_add`                    (also without x where something is written: that is less)
    mean, amax, amin:  `scatter`, by energies; the mean of the largest entries: `_averaged`
    prod:              `_multiplied`, by the largest entries
    """
    _check(reduce)
    count = index.shape[dim] if index.ndim else 1
    if reduce == "prod":
        return _multiplied(input, src, count, "src", include_self)
    if reduce == "sum":
        return scatter_add(input, dim, index, src)
    if reduce == "mean" and not align(input.shape, input, src)[0]:
        return _averaged(input, src, count, "src", include_self)
    return scatter(input, dim, index, src)


refuse(
    normed_op(torch.segment_reduce),
    "segment_reduce has lengths that are data, and an empty segment is infinite: use index_add or index_reduce",
)


# -- at several indices at once -----------------------------------------------------------------------------------------------


def _written(x: RMSTensor, values: RMSTensor, dims: ed.Dims, c: float, is_sum: bool, times_added: int | None) -> RMSTensor:
    """x over `dims` with values of norm c |v| in the place of some entries, or added to them up to `times_added` times."""
    n, v = x.norm_size, times(values.norm_size, c)
    constant: Constant = c
    if times_added is not None:
        value, constant = n + times(v, times_added), c * times_added
    else:
        value = root_sum_squares(n, v) if is_sum else torch.maximum(n, v)
    return rms(value, dims, sensitivity={"input": 1, "values": constant})


def _most_often(indices: list) -> int:
    """How often one place may be named at most: once by a single mask, else by every tuple of indices."""
    given = [i for i in indices if i is not None]
    counts = [i.numel() for i in given if _is_mask(i)]
    if not given or len(given) == len(counts) == 1:
        return 1
    return math.prod(broadcast(*[i.shape for i in given if not _is_mask(i)], (max(counts, default=1),)))


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _is_of_rows(x: RMSTensor, indices: list) -> bool:
    """Whether x's norm runs only over dimensions behind those that are indexed: each row is written as a whole."""
    named = sum(i.ndim if i is not None and _is_mask(i) else 1 for i in indices)
    return all(i is not None for i in indices) and all(d >= named - x.ndim for d in ed.nontrivial(x.shape, x.elem_dims))


def _values_dims(t: torch.Tensor, arguments: dict[str, Any]) -> ed.Dims:
    x = arguments["input"]
    is_of_rows = isinstance(x, RMSTensor) and _is_of_rows(x, arguments["indices"])
    return over_dims_of("input")(t, arguments) if is_of_rows else ()


_VALUES = {"input": over_dims_of("values"), "values": _values_dims}


@normed_op(torch.index_put).register_norm(allow_plain_tensors="constant", lift_dims=_VALUES)
def index_put(input: RMSTensor, indices: list[torch.Tensor], values: RMSTensor, accumulate: bool = False) -> RMSTensor:
    """x with values at the places that plain tensors of indices (or masks) name, None for whole dimensions.

    Value:       max(n, v) where whole rows are written and the norm is of rows, attained; else v is of its largest entries and
                 sqrt(n^2 + v^2)                                              (approached where nearly everything is written)
                 accumulated, n + m v where one place may be named m times    (attained: the same place every time)
    Sensitivity: 1 to x; that of v, m times if accumulated
    """
    most = _most_often(indices) if accumulate else None
    if _is_of_rows(input, indices):
        return _written(input, values, input.elem_dims, refined(values, input.elem_dims), False, most)
    _, c = as_kind(values, LinfTensor, ())
    return _written(input, values, input.elem_dims, c, bool(input.elem_dims), most)


@normed_op(torch.ops.aten._unsafe_index_put.default).register_norm(allow_plain_tensors="constant", lift_dims=_VALUES)
def unsafe_index_put(input: RMSTensor, indices: list[torch.Tensor], values: RMSTensor, accumulate: bool = False) -> RMSTensor:
    """`index_put`, of indices that are known to fit."""
    return index_put(input, indices, values, accumulate)


@normed_op(torch.Tensor.put).register_norm(allow_plain_tensors="constant", lift_dims=_SOURCE)
def put(input: RMSTensor, index: torch.Tensor, source: RMSTensor, accumulate: bool = False) -> RMSTensor:
    """x with the entries of `source` at places of the flattened tensor that a plain index names: `index_put` of entries."""
    _, c = as_kind(source, LinfTensor, ())
    out: Any = _written(input, source, input.elem_dims, c, bool(input.elem_dims), index.numel() if accumulate else None)
    out._sensitivity["source"] = out._sensitivity.pop("values")
    return out
