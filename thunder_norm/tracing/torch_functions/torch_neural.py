"""Functions of ``torch.nn.functional`` whose operation in Thunder silently does something else: entries of the table of `torch_semantics`."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.padded_sequences import pad_sequence
from thunder_norm.tracing.tags import LETS_SEE
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, _interpret_call
from thunder.core.proxies import TensorProxy

ENTRIES: dict[Callable, Callable] = {}


def _instead_of(function: Callable) -> Callable[[Callable], Callable]:
    def enter(own: Callable) -> Callable:
        ENTRIES[function] = own
        return own

    return enter


# -- statistics -------------------------------------------------------------------------------------------------------


@_instead_of(F.batch_norm)
def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Thunder's has the mean of nothing, NaN, go into the running statistics of an empty batch; torch leaves them."""
    if training and 0 in input.shape:
        running_mean = running_var = None
    return ltorch.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@_instead_of(F.instance_norm)
def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Thunder's leaves the running statistics as they are in a program that is differentiated.

    They move towards the mean over the batch of the means, and of the unbiased variances, of each instance; aten.instance_norm.
    """
    if not use_input_stats or (running_mean is None and running_var is None):
        return ltorch.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    result = ltorch.instance_norm(input, None, None, weight, bias, True, momentum, eps)
    over, still = tuple(range(2, input.ndim)), ltorch.detach(input)
    for running, measure in ((running_mean, ltorch.mean), (running_var, ltorch.var)):
        if running is not None:
            found = ltorch.to(ltorch.mean(measure(still, over), 0), running.dtype)
            ltorch.copy_(running, ltorch.add(ltorch.mul(running, 1 - momentum), ltorch.mul(found, momentum)))
    return result


# -- pooling ----------------------------------------------------------------------------------------------------------


def max_pool3d(input: Any, kernel_size: Any, stride: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Thunder's hands a stride of None on to an operator that does not take it, in programs that are differentiated."""
    return ltorch.max_pool3d(input, kernel_size, kernel_size if stride is None else stride, *args, **kwargs)


for _function in (F.max_pool3d, torch.max_pool3d):
    _instead_of(_function)(max_pool3d)


# -- sequences --------------------------------------------------------------------------------------------------------


@_instead_of(torch._C._nn.pad_sequence)
def _pad_sequence(*args: Any, **kwargs: Any) -> TensorProxy:
    """Thunder hands its proxies to torch's own."""
    return pad_sequence(ltorch.pad, ltorch.stack, *args, **kwargs)


# -- attention --------------------------------------------------------------------------------------------------------


@_instead_of(F.scaled_dot_product_attention)
def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's is 0 for a query that may see no key, and so are gradients; Thunder's are NaN, and it knows no groups of queries."""
    if enable_gqa:
        key, value = (_for_each_query(query, t) for t in (key, value))
    if attn_mask is None:
        return ltorch.scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, scale=scale)
    is_choice = dtypes.is_boolean_dtype(attn_mask.dtype)
    sees = ltorch.any_tensor(attn_mask if is_choice else ltorch.gt(attn_mask, -math.inf), -1, keepdim=True)
    sees.tags.add(LETS_SEE)
    # such a query sees all keys on the way, so that nothing is NaN
    mask = ltorch.where(sees, attn_mask, True if is_choice else 0.0)
    result = ltorch.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale=scale)
    return ltorch.where(sees, result, 0.0)


def _for_each_query(query: Any, shared: Any) -> Any:
    """Keys or values [..., G, S, D] of G groups of heads as [..., H, S, D], for queries of H heads."""
    groups, heads = shared.shape[-3], query.shape[-3]
    shape = (*shared.shape[:-2], heads // groups, *shared.shape[-2:])
    return ltorch.reshape(ltorch.expand(ltorch.unsqueeze(shared, -3), shape), (*shared.shape[:-3], heads, *shared.shape[-2:]))


_attention = F.multi_head_attention_forward
_attention_arguments = inspect.signature(_attention)
# the same code under another identity: interpreting it does not lead here again
_written_attention = types.FunctionType(_attention.__code__, _attention.__globals__, "attention", _attention.__defaults__)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of a function where its arguments decide; None for most."""
    written = _WRITTEN.get(fn) if isinstance(fn, types.FunctionType) else None
    return None if written is None else written(*args, **kwargs)


def _attention_with_dropout(*args: WrappedValue, **kwargs: WrappedValue) -> Callable | None:
    """Attention with dropout is followed: Thunder has torch run it as a whole, and again for its gradients, dropping other scores."""
    given = _attention_arguments.bind(*args, **kwargs).arguments
    drops = given["dropout_p"].value != 0 and ("training" not in given or given["training"].value)
    return functools.partial(_interpret_call, _written_attention) if drops and type(given["query"].value) is TensorProxy else None


_ctc_loss = types.FunctionType(F.ctc_loss.__code__, F.ctc_loss.__globals__, "ctc_loss", F.ctc_loss.__defaults__)


def _ctc_loss_of_tensors(log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    lengths = [n if isinstance(n, torch.Tensor) else torch.tensor(n) for n in (input_lengths, target_lengths)]
    return _ctc_loss(log_probs, targets, *lengths, *args, **kwargs)


def _ctc_loss_with_lists(log_probs: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Callable | None:
    """torch makes a tensor of lengths, where they are a list, which it cannot while it works out shapes; the program makes it instead."""
    given = [*args[1:3], *(kwargs[n] for n in ("input_lengths", "target_lengths") if n in kwargs)]
    is_plain = type(log_probs.value) is TensorProxy and any(isinstance(n.value, list | tuple) for n in given)
    return functools.partial(_interpret_call, _ctc_loss_of_tensors) if is_plain else None


_WRITTEN: dict[Callable, Callable] = {_attention: _attention_with_dropout, F.ctc_loss: _ctc_loss_with_lists}


# -- tables -----------------------------------------------------------------------------------------------------------


@_instead_of(F.embedding)
def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Thunder's takes the last row, -1, for no row, and scales no gradient by frequencies where no row is padding."""
    if padding_idx is not None:
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise AssertionError("Padding_idx must be within num_embeddings")
        padding_idx = padding_idx % weight.shape[0]
    elif scale_grad_by_freq:
        padding_idx = -1
    return ltorch.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


# -- images of other sizes --------------------------------------------------------------------------------------------


@_instead_of(F.interpolate)
def _interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Thunder's takes other entries where it makes images smaller by more than a half, and where sizes are no multiples."""
    is_plain = align_corners is None and not recompute_scale_factor and not antialias and input.ndim > 2 and 0 not in input.shape
    if is_plain and mode in ("nearest", "nearest-exact") and (size is None) is not (scale_factor is None):
        given = size if scale_factor is None else scale_factor
        given = tuple(given) if isinstance(given, Sequence) else given
        sources = _sources(tuple(map(int, input.shape[2:])), given, scale_factor is not None, mode)
        result = input
        for dim, (n, indices) in enumerate(zip(input.shape[2:], sources, strict=True), 2):
            result = _taken(result, dim, n, indices)
        is_view = all(n in (1, len(indices)) for n, indices in zip(input.shape[2:], sources, strict=True))
        return ltorch.clone(result) if is_view else result
    if is_plain and mode == "bilinear" and scale_factor is not None:
        align_corners = False  # which says the same, and has torch do it: Thunder's has the scale of the sizes
    return ltorch.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


@functools.cache
def _sources(sizes: tuple[int, ...], given: Any, is_factor: bool, mode: str) -> list[tuple[int, ...]]:
    """For each dimension, which of its entries torch takes for each entry of the result; that depends on how many dimensions there are."""
    found = []
    with _disable_current_modes():
        for dim, n in enumerate(sizes):
            shape = [n if d == dim else 1 for d in range(len(sizes))]
            places = torch.arange(n, dtype=torch.float32, device="cpu").reshape(1, 1, *shape).expand(1, 1, *sizes).contiguous()
            made = F.interpolate(places, **{"scale_factor" if is_factor else "size": given}, mode=mode)
            line = made[(0, 0, *(slice(None) if d == dim else 0 for d in range(len(sizes))))]
            found.append(tuple(map(int, line.tolist())))
    return found


def _taken(a: Any, dim: int, n: int, indices: tuple[int, ...]) -> Any:
    """The entries at some indices of a dimension of length n, which do not decrease."""
    count = len(indices)
    if indices == tuple(range(n)):
        return a
    if count % n == 0 and indices == tuple(i // (count // n) for i in range(count)):
        shape = (*a.shape[: dim + 1], count // n, *a.shape[dim + 1 :])
        return ltorch.reshape(ltorch.expand(ltorch.unsqueeze(a, dim + 1), shape), (*a.shape[:dim], count, *a.shape[dim + 1 :]))
    return ltorch.index_select(a, dim, ltorch.tensor(list(indices), device=a.device, dtype=torch.int64))


@_instead_of(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Thunder's has no bias of one entry for all outputs."""
    if bias is not None and tuple(bias.shape) in ((), (1,)) and weight.ndim == 2:
        bias = ltorch.expand(bias, (weight.shape[0],))
    return ltorch.linear(input, weight, bias)


# -- activations and dropouts -------------------------------------------------------------------------------------------


def _written(function: Callable) -> Callable:
    """A function with ``inplace=True``: Thunder writes down what the operation consists of, and loses the operation, or the writing."""
    signature, symbol = inspect.signature(function), ltorch._torch_to_thunder_function_map[function]

    def own(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        input, is_in_place = given.pop("input"), given.pop("inplace", False)
        result = symbol(input, **given)
        return ltorch.copy_(input, result) if is_in_place else result

    return own


@_instead_of(F.dropout)
def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Of everything it is a product with 0 in torch, which has a gradient."""
    result = ltorch.mul(input, 0.0) if training and p == 1 else ltorch.dropout(input, p, training)
    return ltorch.copy_(input, result) if inplace and result is not input else result


for _function in (F.rrelu, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d):
    _instead_of(_function)(_written(_function))
for _function in (F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.threshold):
    _instead_of(_function)(_written(_function))


@_instead_of(F.hardtanh)
def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    """Thunder's of integers has floating numbers."""
    if inplace or not dtypes.is_exact_dtype(input.dtype):
        return ltorch.hardtanh(input, min_val, max_val, inplace)
    return ltorch.clamp(input, int(min_val), int(max_val))


def _in_place(own: Callable) -> Callable:
    """``F.elu_(x, alpha)``: Thunder has no such functions."""
    return lambda *args, **kwargs: own(*args, **kwargs, inplace=True)


for _function, _own in (
    (F.elu_, _written(F.elu)),
    (F.leaky_relu_, _written(F.leaky_relu)),
    (F.celu_, _written(F.celu)),
    (F.selu_, _written(F.selu)),
    (F.threshold_, _written(F.threshold)),
    (F.hardtanh_, _hardtanh),
    (torch.rrelu_, _written(F.rrelu)),
    (torch.dropout_, _dropout),
    (torch.alpha_dropout_, _written(F.alpha_dropout)),
    (torch.feature_alpha_dropout_, _written(F.feature_alpha_dropout)),
    (torch.feature_dropout_, _written(F.dropout2d)),
):
    _instead_of(_function)(_in_place(_own))


@_instead_of(torch._weight_norm)
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Thunder does not know it: ``g v / |v|``, the norm over all dimensions but one, or over all for -1."""
    over = tuple(d for d in range(v.ndim) if d != dim)
    length = ltorch.sqrt(ltorch.sum(ltorch.mul(v, v), over, keepdim=dim != -1))
    return ltorch.mul(v, ltorch.true_divide(g, length))
