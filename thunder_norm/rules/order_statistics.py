"""Norm rules for entries picked by their order or how often they occur: quantile, mode, unique; histograms are refused.

D is the set of reduced dimensions, E that of elem_dims; see `reductions` for extrema, medians and sorting.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import as_kind, refuse, refuse_perturbation, scaled
from thunder_norm.rules.reductions import picked, rearranged


@normed_op(torch.msort).register_norm
def msort(input: RMSTensor) -> RMSTensor:
    """Entries in order along the first dimension: `sort`, without indices."""
    return scaled(input, rearranged(input, 0))


@normed_op(torch.quantile).register_norm(allow_plain_tensors=True)
@normed_op(torch.nanquantile).register_norm(allow_plain_tensors=True)
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
