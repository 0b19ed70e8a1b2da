"""Embeddings: rows of a table, selected, averaged or summed.

A table's norm is RMS over the last dimension and the maximum over rows, the operator norm from L1 (one-hot or probability rows)
to RMS.  Probability rows times a table are a `matmul`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import L1Tensor, LinfTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import VectorKind, as_kind, spread
from thunder_norm.scalars import times


def _rows(weight: VectorKind) -> tuple[NormedTensor, float]:
    """The table with the maximum over rows, and what that costs."""
    return as_kind(weight, type(weight), tuple(d for d in weight.elem_dims if d == -1))


@normed_op(F.embedding).register_norm(allow_plain_tensors="constant")
def embedding(
    input: torch.Tensor,
    weight: VectorKind,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> NormedTensor:
    """y = W[input].

    input: indices, without a norm;  weight: [rows, d], RMS over d, maximum over rows
    Value:        |y| <= |W|      (attained: the largest row)
    Sensitivity:  1
    Raises NormMismatchError with max_norm, which changes the table in place.
    """
    if max_norm is not None:
        raise NormMismatchError("embedding with max_norm rescales rows of its table in place; rescale the table beforehand")
    rows, c = _rows(weight)
    return type(rows)(rows.norm_size, elem_dims=rows.elem_dims, sensitivity={"weight": c})


@normed_op(torch.ops.aten.embedding.default).register_norm(allow_plain_tensors="constant")
def _embedding_aten(
    weight: VectorKind,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> NormedTensor:
    """`embedding` with ATen's order of arguments."""
    return embedding(indices, weight)


def _embedding_bag(weight: VectorKind, largest_bag: int, mode: str, per_sample: LinfTensor | None, name: str) -> NormedTensor:
    rows, c = _rows(weight)
    if mode == "sum":
        gain = float(largest_bag)
    elif mode == "mean":
        gain = 1.0
    else:  # each feature may come from a row of its own
        count = max(min(largest_bag, rows.numel_normed), 1)
        gain = float(count) if isinstance(rows, L1Tensor) else spread(math.sqrt(count))
    sensitivity = {name: gain * c}
    value = times(rows.norm_size, gain)
    if per_sample is not None:
        sensitivity = {name: per_sample.norm_size * (gain * c), "per_sample_weights": value}
        value = value * per_sample.norm_size
    return type(rows)(value, elem_dims=rows.elem_dims, sensitivity=sensitivity)


def _largest_bag(input: torch.Tensor) -> int:
    """Most rows in a bag: known for a matrix of indices; offsets may put all of a vector into one bag."""
    return input.shape[-1]


@normed_op(F.embedding_bag).register_norm(allow_plain_tensors="constant")
def embedding_bag(
    input: torch.Tensor,
    weight: VectorKind,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: LinfTensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> NormedTensor:
    """Mean, sum or maximum of the rows in each bag, of at most m.

    weight: [rows, d], RMS over d, maximum over rows;  per_sample_weights: largest entry (only with "sum")
    Value:        |W| (mean), m |W| (sum, times |per_sample_weights|), sqrt(min(m, d)) |W| (max;
                  min(m, d) for L1)    (attained: equal rows; spikes)
    Sensitivity:  the value's derivative
    Raises NormMismatchError with max_norm.
    """
    if max_norm is not None:
        raise NormMismatchError("embedding_bag with max_norm rescales rows of its table in place; rescale the table beforehand")
    return _embedding_bag(weight, _largest_bag(input), mode, per_sample_weights, "weight")


@normed_op(torch.ops.aten._embedding_bag.default).register_norm(allow_plain_tensors="constant")
def _embedding_bag_aten(
    weight: VectorKind,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: LinfTensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[NormedTensor | None, ...]:
    """`embedding_bag` with ATen's order of arguments and further outputs without a norm.

    Gap:         how many indices a bag has is data; all of them are counted
    """
    out = _embedding_bag(weight, _largest_bag(indices), ("sum", "mean", "max")[mode], per_sample_weights, "weight")
    return (out, None, None, None)
