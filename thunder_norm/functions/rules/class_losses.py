"""Losses of classes: what Thunder picks by the labels it pads, and wraps around labels that are out of range, which torch refuses."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.functions.batching import sample_ndim, to_sample_shape, with_batch, with_sample_ndim
from thunder_norm.functions.registry import batching_rules, decompositions, register_vjp
from thunder_norm.functions.rules.neural import with_kernel
from thunder_norm.tracing.torch_functions.torch_losses import weights_of
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy


def _nll_loss_kernel(
    a: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten.nll_loss_forward if a.ndim <= 2 else torch.ops.aten.nll_loss2d_forward
    return kernel(a, target, weight, ("none", "mean", "sum").index(reduction), ignore_index)


@with_kernel(_nll_loss_kernel)
def nll_loss_forward(
    a: TensorProxy, target: TensorProxy, weight: TensorProxy | None, ignore_index: int, reduction: str
) -> tuple[TensorProxy, TensorProxy]:
    """Of log-probabilities [C], [B, C] or [B, C, H, W]: -w x at each target, zero where that is ignored, and the sum of all w.

    Where labels are out of range the entries that they pick are, an error; Thunder's loss takes others.
    """
    dim = min(a.ndim - 1, 1)
    counts = ltorch.ne(target, ignore_index)
    chosen = ltorch.where(counts, target, 0)
    each = ltorch.neg(ltorch.squeeze(ltorch.gather(a, dim, ltorch.unsqueeze(chosen, dim)), dim))
    w = None if weight is None else weights_of(chosen, weight)
    each = ltorch.where(counts, each if w is None else ltorch.mul(each, w), 0.0)
    total = ltorch.to(ltorch.sum(counts if w is None else ltorch.where(counts, w, 0.0)), a.dtype)
    if reduction == "none":
        return each, total
    summed = ltorch.sum(each)
    return (summed if reduction == "sum" else ltorch.true_divide(summed, total)), total


def _nll_loss(
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[TensorProxy, tuple]:
    ignored = -1 if ignore_index is None else ignore_index
    found, total = nll_loss_forward(a, target, weight, ignored, reduction)
    return found, (found, a, target, weight, reduction, ignored, total if reduction == "mean" else None)


def _pulled_nll_loss(saved: tuple, g: TensorProxy) -> tuple:
    found, *given = saved
    to_weight = None if saved[3] is None else _to_weight(g, found, *given)
    return ltorch.nll_loss_backward(g, *given), None, to_weight, None, None


def _to_weight(
    g: TensorProxy,
    found: TensorProxy,
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy,
    reduction: str,
    ignore_index: int,
    total: TensorProxy | None,
) -> TensorProxy:
    """The cotangent of the weights [C]: for each class the sum of -g x over its targets, of a mean (-x - mean) g / sum of all w."""
    dim = min(a.ndim - 1, 1)
    counts = ltorch.ne(target, ignore_index)
    chosen = ltorch.where(counts, target, 0)
    each = ltorch.neg(ltorch.squeeze(ltorch.gather(a, dim, ltorch.unsqueeze(chosen, dim)), dim))
    if total is not None:
        each, g = ltorch.sub(each, found), ltorch.true_divide(g, total)
    rows = (int(target.numel),)
    values = ltorch.reshape(ltorch.where(counts, ltorch.mul(each, g), 0.0), rows)
    return ltorch.index_add(ltorch.zeros_like(weight), 0, ltorch.reshape(chosen, rows), ltorch.to(values, weight.dtype))


register_vjp(ltorch.nll_loss)(_nll_loss, _pulled_nll_loss)
decompositions.add(ltorch.nll_loss, lambda *args, **kwargs: _nll_loss(*args, **kwargs)[0])


def _nll_loss_backward(
    g: TensorProxy,
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    reduction: str,
    ignore_index: int,
    total_weight: TensorProxy | None,
) -> TensorProxy:
    """The cotangent of log-probabilities [C], [B, C] or [B, C, ...]: at each target -w g, zero elsewhere.

    g has the shape of the targets for ``reduction="none"``, otherwise no dimension; a mean also divides by the sum of all w.
    """
    dim = min(a.ndim - 1, 1)
    counts = ltorch.ne(target, ignore_index)
    chosen = ltorch.where(counts, target, 0)
    if reduction == "mean" and total_weight is not None:
        g = ltorch.true_divide(g, ltorch.to(total_weight, g.dtype))
    value = ltorch.where(counts, ltorch.neg(g), 0.0)
    if weight is not None:
        value = ltorch.mul(value, weights_of(chosen, weight))
    zeros = ltorch.zeros_like(a, dtype=g.dtype)
    return ltorch.scatter_add(zeros, dim, ltorch.unsqueeze(chosen, dim), ltorch.unsqueeze(value, dim))


decompositions.add(ltorch.nll_loss_backward, _nll_loss_backward)


def nll_loss_backward(
    axis_size: int,
    in_dims: tuple,
    g: TensorProxy,
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    reduction: str,
    ignore_index: int,
    total_weight: TensorProxy | None,
) -> Any:
    """The samples' rows of log-probabilities are rows of one matrix, each with a cotangent of its own."""
    target_ndim = sample_ndim(target, in_dims[2])
    if in_dims[3] is not None or target_ndim > 1 or a.numel == 0:
        return NotImplemented
    if reduction == "mean" and total_weight is not None:
        total_ndim = sample_ndim(g, in_dims[0])
        total = ltorch.to(with_sample_ndim(total_weight, in_dims[6], total_ndim), g.dtype)
        g, in_dims = ltorch.true_divide(g, total), (0 if total.ndim > total_ndim else in_dims[0], *in_dims[1:])
    a, target = with_batch(axis_size, a, in_dims[1]), with_batch(axis_size, target, in_dims[2])
    g = to_sample_shape(axis_size, g, in_dims[0], tuple(target.shape[1:]))
    rows = (int(target.numel),)
    matrix = ltorch.reshape(a, (*rows, a.shape[-1]))
    found = ltorch.nll_loss_backward(
        ltorch.reshape(g, rows), matrix, ltorch.reshape(target, rows), weight, "none", ignore_index, None
    )
    return ltorch.reshape(found, tuple(a.shape)), 0


batching_rules.add(ltorch.nll_loss_backward, nll_loss_backward)
