"""Norm rules for entries by their order or how often they occur: median, quantile, mode, unique, sort; histograms are refused.

D is the set of reduced dimensions, E that of elem_dims; see `reductions` for extrema.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.context import run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Filled, Source, fact, moves_with
from thunder_norm.rules._shared import as_kind, dims_tuple, like, negative, refuse, refuse_perturbation, root, scaled, spread
from thunder_norm.rules.reducing.reductions import Dim, picked
from thunder_norm.scalars import times

# -- medians and quantiles ---------------------------------------------------------------------------------------------------


@normed_op(torch.median).register_norm
def median(input: RMSTensor, dim: int, keepdim: bool = False) -> tuple:
    """The middle entry along a dimension, bounded as `amax`, and its index."""
    return picked(input, dim, keepdim), None


@normed_op(torch.median).register_norm
def median_of_all(input: RMSTensor) -> RMSTensor:
    """The middle of all entries, bounded as `amax`."""
    return picked(input, None, False)


@normed_op(torch.nanmedian).register_norm
def nanmedian(input: RMSTensor, dim: int, keepdim: bool = False) -> tuple:
    """The middle of the entries along a dimension that are numbers, bounded as `amax`, and its index."""
    return _picked_number(input, dim, keepdim), None


@normed_op(torch.nanmedian).register_norm
def nanmedian_of_all(input: RMSTensor) -> NormedTensor:
    """The middle of all entries that are numbers, bounded as `amax`."""
    return _picked_number(input, None, False)


def _picked_number(x: RMSTensor, dim: Dim, keepdim: bool) -> NormedTensor:
    """`picked` among the entries that are known to be numbers, if there are some wherever it picks: NaN elsewhere."""
    result, filled = picked(x, dim, keepdim), fact(x, Filled)
    if filled is None:
        return result
    has = filled.kept
    for d in dims_tuple(dim, x.ndim):
        has = run_real(torch.any, (has, d, True), {})
    constant = (result._sensitivity or {})["input"]
    everywhere = run_real(torch.logical_or, (run_real(torch.all, (has,), {}), filled.is_number), {})
    size = torch.where(everywhere, times(filled.norm_size, constant), times(x.norm_size, constant))
    return moves_with(Source.of(x), like(x, size, result.elem_dims), constant, "input")


@normed_op(torch.kthvalue).register_norm
def kthvalue(input: RMSTensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple:
    """The k-th smallest entry along a dimension, bounded as `amax`, and its index."""
    return picked(input, dim, keepdim), None


@normed_op(torch.quantile).register_norm(allow_plain_tensors="constant")
@normed_op(torch.nanquantile).register_norm(allow_plain_tensors="constant")
def quantile(
    input: RMSTensor, q: float | torch.Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> RMSTensor:
    """The q-th quantile over D, or for each of several plain q, along a new first dimension.

    Value:       as `amax`: n from the largest entry, attained; from RMS over K entries sqrt(K) n, attained for the extremes (a
                 median needs half of the energy of all, and no more than sqrt(2) n is found)
    Sensitivity: the same factor (attained: the entry that is the quantile moves alone)
    Source:      ordering is Lipschitz in the largest entry; interpolation is a convex combination
    """
    return picked(input, dim, keepdim)


@normed_op(torch.mode).register_norm
def mode(input: RMSTensor, dim: int = -1, keepdim: bool = False) -> tuple:
    """The entry that occurs most often along a dimension, bounded as `amax`, and its index.

    Value:       n from the largest entry, attained; otherwise as `amax`
    Sensitivity: none: of two entries that occur as often either may be moved out of its place
    """
    refuse_perturbation(torch.mode, input)
    return picked(input, dim, keepdim), None


# -- how often entries occur --------------------------------------------------------------------------------------------------


def _distinct(op: Any, x: RMSTensor) -> LinfTensor:
    refuse_perturbation(op, x)
    return LinfTensor(as_kind(x, LinfTensor, ())[0].norm_size, elem_dims=())


@normed_op(torch.ops.aten._unique2.default).register_norm
def unique2(input: RMSTensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> tuple:
    """Distinct entries, by the largest, n; where they came from and their counts have no norm.

    Value:       n from the largest entry, attained; an RMS norm is converted to it
    Sensitivity: none: equal entries that move apart change the result's shape
    """
    return _distinct(torch.unique, input), None, None


@normed_op(torch.ops.aten.unique_dim.default).register_norm
def unique_dim(
    input: RMSTensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple:
    """Distinct slices along a dimension: `unique2`."""
    return _distinct(torch.unique, input), None, None


@normed_op(torch.unique_consecutive).register_norm
def unique_consecutive(
    input: RMSTensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Entries (slices) unlike the one before: `unique2`; with as many results as torch's function has, ATen's has three."""
    distinct = _distinct(torch.unique_consecutive, input)
    plain = (None,) * (return_inverse + return_counts)
    return (distinct, *plain) if plain else distinct


for _name in (
    "histc",
    "histogram",
    "histogramdd",
    "_histogramdd_bin_edges",
    "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors",
):
    refuse(
        normed_op(getattr(torch, _name)),
        "a histogram counts entries: a norm of the input says nothing about how they are distributed, and counts do not move with "
        "it but jump; the largest possible count is the number of entries",
    )


# -- sorting ------------------------------------------------------------------------------------------------------------------


def rearranged(x: RMSTensor, dim: int) -> float:
    """Factor of a rearrangement along `dim` that differs between the elements of E."""
    if x.ndim == 0 or negative(dim, x.ndim) in x.elem_dims:
        return 1.0
    return spread(root(min(x.shape[dim], x.numel_normed)))


@normed_op(torch.sort).register_norm
def sort(input: RMSTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple:
    """Entries in order along a dimension, and their indices, which have no norm.

    Value:       n if the norm runs over the dimension, or is the largest entry; else sqrt(min(K, N)) n: as `amax`
    Sensitivity: the same factor
    Source:      rearrangement inequality
    """
    return scaled(input, rearranged(input, dim)), None


@normed_op(torch.sort).register_norm
def sort_stable(input: RMSTensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple:
    """`sort`, as ATen's overload with `stable` has it."""
    return sort(input, dim)


@normed_op(torch.topk).register_norm
def topk(input: RMSTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple:
    """The k largest (smallest) entries along a dimension of K, and their indices.

    Value:       sqrt(K / k) n if the norm runs over the dimension, n from the largest entry, else as `sort`
    Sensitivity: the same factor
    """
    c = rearranged(input, dim)
    if input.ndim and negative(dim, input.ndim) in input.elem_dims:
        c *= spread(root(input.shape[dim] / max(k, 1)))
    return scaled(input, c), None


@normed_op(torch.msort).register_norm
def msort(input: RMSTensor) -> RMSTensor:
    """Entries in order along the first dimension: `sort`, without indices."""
    return scaled(input, rearranged(input, 0))
