"""Operations of neural networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.errors import TransformError, with_details
from thunder_norm.functions.backwards import gelu_backward, softmax_backward, standardize_backward
from thunder_norm.functions.batching import sample_ndim, sample_shape, to_sample_shape, with_batch, with_sample_ndim
from thunder_norm.functions.registry import batching_rules, decompositions, register_jvp, register_vjp
from thunder_norm.functions.rules.elementwise import elementwise
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy

# -- in other operations ----------------------------------------------------------------------------------------------


def _log_softmax_backward(g: TensorProxy, output: TensorProxy, dim: int, dtype: dtypes.dtype) -> TensorProxy:
    """g - softmax(x) sum(g), of the result of log_softmax."""
    return ltorch.to(ltorch.sub(g, ltorch.mul(ltorch.exp(output), ltorch.sum(g, dim, True))), dtype)


decompositions.add(ltorch.log_softmax_backward, _log_softmax_backward)


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
        rows = ltorch.reshape(chosen, (int(chosen.numel),))
        value = ltorch.mul(value, ltorch.reshape(ltorch.index_select(weight, 0, rows), tuple(target.shape)))
    zeros = ltorch.zeros_like(a, dtype=g.dtype)
    return ltorch.scatter_add(zeros, dim, ltorch.unsqueeze(chosen, dim), ltorch.unsqueeze(value, dim))


decompositions.add(ltorch.nll_loss_backward, _nll_loss_backward)

_SELU_AT_MINUS_INFINITY = -1.7580993408473766  # what alpha dropout sets to: minus scale times alpha of selu


def _kept(input: TensorProxy, p: float, shape: Sequence[int]) -> TensorProxy:
    """1 with probability 1 - p, else 0."""
    draws = ltorch.uniform(tuple(shape), 0.0, 1.0, device=input.device, dtype=input.dtype)
    return ltorch.to(ltorch.ge(draws, p), input.dtype)


def _of_channels(input: TensorProxy, unbatched_ndim: int | None = None) -> tuple[int, ...]:
    """[N, C, ...], or [C, ...] if it has `unbatched_ndim` dimensions: one number for each channel of each sample."""
    leading = input.shape[: 1 if input.ndim == unbatched_ndim else 2]
    return (*leading, *[1] * (input.ndim - len(leading)))


def _channel_dropout(operation: Callable, unbatched_ndim: int | None) -> None:
    def dropout(input: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> TensorProxy:
        if not training or p == 0:
            return ltorch.mul(input, 1.0)
        if p == 1:
            return ltorch.mul(input, 0.0)
        return ltorch.mul(input, ltorch.mul(_kept(input, p, _of_channels(input, unbatched_ndim)), 1 / (1 - p)))

    decompositions.add(operation, dropout)


_channel_dropout(torch.nn.functional.dropout1d, 2)
_channel_dropout(torch.nn.functional.dropout2d, None)  # torch takes three dimensions for [N, C, L]
_channel_dropout(torch.nn.functional.dropout3d, 4)


def _alpha_dropout(operation: Callable, drops_channels: bool) -> None:
    """Klambauer et al., Self-Normalizing Neural Networks, 2017: a (x kept + alpha' (1 - kept)) + b keeps mean 0 and variance 1."""

    def dropout(input: TensorProxy, p: float = 0.5, training: bool = False, inplace: bool = False) -> TensorProxy:
        if not training or p == 0:
            return ltorch.mul(input, 1.0)
        if p == 1:
            return ltorch.mul(input, 0.0)
        low = _SELU_AT_MINUS_INFINITY
        scale = ((1 - p) * (1 + p * low**2)) ** -0.5
        kept = _kept(input, p, _of_channels(input) if drops_channels else input.shape)
        shift = ltorch.mul(ltorch.sub(1 - p, kept), scale * low)
        return ltorch.add(ltorch.mul(input, ltorch.mul(kept, scale)), shift)

    decompositions.add(operation, dropout)


_alpha_dropout(torch.nn.functional.alpha_dropout, False)
_alpha_dropout(torch.nn.functional.feature_alpha_dropout, True)


# -- tangents ---------------------------------------------------------------------------------------------------------


@register_jvp("torch.softmax")
def softmax(primals, tangents, *, dtype=None):
    """dy = y (dx - sum y dx)."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch._softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.mul(out, clang.sub(dx, ltorch.sum(clang.mul(out, dx), dim, True)))


@register_jvp("torch.log_softmax")
def log_softmax(primals, tangents, *, dtype=None):
    """dy = dx - sum exp(y) dx."""
    (x, dim), dx = primals, tangents[0]
    out = ltorch.log_softmax(x, dim, dtype=dtype)
    dx = ltorch.to(dx, out.dtype)
    return out, clang.sub(dx, ltorch.sum(clang.mul(clang.exp(out), dx), dim, True))


@register_jvp("torch.polygamma")
def polygamma(primals, tangents):
    """Its derivative is the next one; the parts it consists of are only right for positive arguments."""
    (n, x), dx = primals, tangents[1]
    return ltorch.polygamma(n, x), clang.mul(dx, ltorch.polygamma(n + 1, x))


# -- cotangents -------------------------------------------------------------------------------------------------------


def _gelu(a: TensorProxy, *, approximate: str = "none") -> tuple[TensorProxy, tuple]:
    return ltorch.gelu(a, approximate=approximate), (a, approximate)


register_vjp(ltorch.gelu)(_gelu, lambda saved, g: gelu_backward(g, *saved))


def _softmax(a: TensorProxy, dim: int, dtype: Any = None, **kwargs: Any) -> tuple[TensorProxy, tuple]:
    out = ltorch._softmax(a, dim, dtype=dtype)
    return out, (out, dim % max(a.ndim, 1), a.dtype)


def _softmax_backward(saved: tuple, g: TensorProxy) -> tuple:
    out, dim, dtype = saved
    return ltorch.to(softmax_backward(g, out, dim), dtype), None


register_vjp(ltorch._softmax)(_softmax, _softmax_backward)


def _layer_norm(
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> tuple[TensorProxy, tuple]:
    return ltorch.layer_norm(a, normalized_shape, weight, bias, eps), (a, tuple(normalized_shape), weight, bias, eps)


def _layer_norm_backward(saved: tuple, g: TensorProxy) -> tuple:
    """Of ``y = w z + b`` with the standardized z: w g pulled back through z; the sums of g z and of g."""
    a, shape, weight, bias, eps = saved
    to_standardized = g if weight is None else ltorch.to(ltorch.mul(g, weight), a.dtype)
    to_a, standardized = standardize_backward(to_standardized, a, shape, eps)
    rows = tuple(range(a.ndim - len(shape)))

    def summed(t: TensorProxy) -> TensorProxy:
        return ltorch.sum(t, rows) if rows else t

    to_weight = None if weight is None else summed(ltorch.mul(g, standardized))
    return to_a, None, to_weight, None if bias is None else summed(g), None


register_vjp(ltorch.layer_norm)(_layer_norm, _layer_norm_backward)


# -- batches ----------------------------------------------------------------------------------------------------------


def layer_norm(
    axis_size: int,
    in_dims: tuple,
    a: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Any:
    """The last dimensions are normalised, whatever is before them; scales and shifts of each sample's own come after."""
    a_dim, _, weight_dim, bias_dim, *_ = in_dims
    a = with_batch(axis_size, a, a_dim)
    if weight_dim is None and bias_dim is None:
        return ltorch.layer_norm(a, normalized_shape, weight, bias, eps), 0
    out = ltorch.layer_norm(a, normalized_shape, None, None, eps)
    if weight is not None:
        out = ltorch.mul(out, with_sample_ndim(weight, weight_dim, a.ndim - 1))
    return (out if bias is None else ltorch.add(out, with_sample_ndim(bias, bias_dim, a.ndim - 1))), 0


def standardized(
    axis_size: int, in_dims: tuple, g: TensorProxy, a: TensorProxy, normalized_shape: Sequence[int], eps: float
) -> Any:
    """As `layer_norm`: only the last dimensions mean anything."""
    g, a = with_batch(axis_size, g, in_dims[0]), with_batch(axis_size, a, in_dims[1])
    return standardize_backward(g, a, normalized_shape, eps), 0


def embedding(axis_size: int, in_dims: tuple, indices: TensorProxy, weight: TensorProxy, **kwargs: Any) -> Any:
    """Rows of a table; tables of each sample's own are put one after the other."""
    indices_dim, weight_dim = in_dims
    if weight_dim is None:
        return prims.embedding(indices, weight, **kwargs), 0
    if kwargs.get("padding_idx") not in (None, -1) or kwargs.get("scale_grad_by_freq"):
        return NotImplemented  # these say something about rows of one table
    merged = ltorch.reshape(weight, (axis_size * weight.shape[1], weight.shape[2]))
    return prims.embedding(_offset(axis_size, indices, indices_dim, weight.shape[1]), merged, **kwargs), 0


def embedding_backward(
    axis_size: int,
    in_dims: tuple,
    grad: TensorProxy,
    indices: TensorProxy,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Any:
    """The gradient of each sample's own table, one after the other."""
    grad_dim, indices_dim, *_ = in_dims
    if padding_idx not in (None, -1) or scale_grad_by_freq or sparse:
        return NotImplemented
    merged = prims.embedding_backward(
        with_batch(axis_size, grad, grad_dim),
        _offset(axis_size, indices, indices_dim, num_weights),
        axis_size * num_weights,
        padding_idx,
        scale_grad_by_freq,
        sparse,
    )
    return ltorch.reshape(merged, (axis_size, num_weights, merged.shape[-1])), 0


def _offset(axis_size: int, indices: TensorProxy, dim: int | None, num_rows: int) -> TensorProxy:
    """Indices into tables of `num_rows` rows, as indices into all of them one after the other."""
    begin = ltorch.arange(axis_size, device=indices.device) * num_rows
    shape = (axis_size, *(1,) * len(sample_shape(indices, dim)))
    return ltorch.add(with_batch(axis_size, indices, dim), ltorch.reshape(begin, shape))


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


def native_batch_norm(
    axis_size: int,
    in_dims: tuple,
    a: TensorProxy,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    training: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Torch's own batching; running statistics that all samples share could not hold what each of them adds."""
    statistics = zip((running_mean, running_var), in_dims[3:5], strict=True)
    if training and in_dims[0] is not None and any(t is not None and d is None for t, d in statistics):
        raise TransformError(
            with_details(
                "batch norm in training updates running statistics that all samples of vmap share",
                instead="running statistics with a batch dimension, track_running_stats=False, or model.eval()",
            )
        )
    return NotImplemented


batching_rules.add(torch.native_batch_norm, native_batch_norm)
batching_rules.add(ltorch.layer_norm, layer_norm)
batching_rules.add(ltorch.nll_loss_backward, nll_loss_backward)
batching_rules.add(standardize_backward, standardized)
batching_rules.add(gelu_backward, elementwise(gelu_backward))
batching_rules.add(prims.embedding, embedding)
batching_rules.add(prims.embedding_backward, embedding_backward)
