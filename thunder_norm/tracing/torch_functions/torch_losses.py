"""Losses of ``torch.nn.functional`` whose operation in Thunder silently does something else: entries of the table of `torch_semantics`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    return F._Reduction.legacy_get_string(size_average, reduce)


def _is_of_other_dimensions(input: Any) -> bool:
    return isinstance(input, TensorProxy) and input.ndim not in (0, 2, 4)


def _in_known_dimensions(input: TensorProxy, target: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """An input [N, C, ...] or [C] and targets with classes, or without, as torch sees them where dimensions are other than 2 and 4.

    Thunder's gradient is that of images, and has their shape; of [C] it fails as that of a sum does.
    """
    if not _is_of_other_dimensions(input):
        return input, target
    if input.ndim == 1:
        return ltorch.unsqueeze(input, 0), ltorch.unsqueeze(target, 0)
    n, positions = input.shape[0], math.prod(input.shape[2:])
    shape = (n, target.shape[1], 1, positions) if target.ndim == input.ndim else (n, 1, positions)
    return ltorch.reshape(input, (n, input.shape[1], 1, positions)), ltorch.reshape(target, shape)


def _reduced(each: TensorProxy, input: TensorProxy, reduction: str) -> TensorProxy:
    """The sum of the losses of `_in_known_dimensions`, or they themselves in the shape of the input's positions.

    Thunder asks torch for the gradient of a sum with a weight of all in float64, which torch takes in the dtype of the input alone.
    """
    if reduction == "sum":
        return ltorch.sum(each)
    is_reshaped = _is_of_other_dimensions(input)
    return ltorch.reshape(each, (*input.shape[:1], *input.shape[2:]) if input.ndim > 1 else ()) if is_reshaped else each


def _of_nothing(input: TensorProxy, reduction: str) -> TensorProxy:
    """The loss where there are no targets, whose gradient Thunder has none of, or one that fails: nothing, 0, or a mean that is NaN."""
    each = ltorch.sum(input, min(input.ndim - 1, 1))
    if reduction == "none":
        return each
    total = ltorch.sum(each)
    return total if reduction == "sum" else ltorch.true_divide(total, 0.0)


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Thunder's ignores the class -1 by default, and the places of its arguments are others."""
    reduction = _reduction(size_average, reduce, reduction)
    if 0 in target.shape:
        return _of_nothing(input, reduction)
    scores, labels = _in_known_dimensions(input, target)
    if reduction in ("none", "sum"):
        return _reduced(ltorch.nll_loss(scores, labels, weight, ignore_index, "none"), input, reduction)
    return ltorch.nll_loss(scores, labels, weight, ignore_index, reduction)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Thunder's mean of smoothed labels counts what those to be ignored have."""
    reduction = _reduction(size_average, reduce, reduction)
    if 0 in target.shape:
        return _of_nothing(input, reduction)
    scores, labels = _in_known_dimensions(input, target)
    is_smoothed_mean = reduction == "mean" and label_smoothing > 0 and dtypes.is_exact_dtype(labels.dtype)
    if is_smoothed_mean or reduction in ("none", "sum"):
        each = ltorch.cross_entropy(scores, labels, weight, None, ignore_index, None, "none", label_smoothing)
        if is_smoothed_mean:
            return ltorch.true_divide(ltorch.sum(each), _total_weight(labels, weight, ignore_index))
        return _reduced(each, input, reduction)
    return ltorch.cross_entropy(scores, labels, weight, None, ignore_index, None, reduction, label_smoothing)


def _total_weight(labels: TensorProxy, weight: TensorProxy | None, ignore_index: int) -> TensorProxy:
    counts = ltorch.ne(labels, ignore_index)
    if weight is None:
        return ltorch.sum(counts)
    return ltorch.sum(ltorch.where(counts, weights_of(ltorch.where(counts, labels, 0), weight), 0.0))


def weights_of(labels: TensorProxy, weight: TensorProxy) -> TensorProxy:
    """For each label, whatever their shape, the weight [C] of its class."""
    rows = ltorch.reshape(labels, (math.prod(labels.shape),))
    return ltorch.reshape(ltorch.index_select(weight, 0, rows), tuple(labels.shape))


ENTRIES: dict[Callable, Callable] = {F.nll_loss: _nll_loss, F.cross_entropy: _cross_entropy}
