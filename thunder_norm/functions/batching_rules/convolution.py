"""Convolutions: samples become part of the batch that a convolution has anyway, or groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.batch_dims import with_batch
from thunder_norm.functions.registry import batching_rules


def convolution(axis_size: int, in_dims: tuple, a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *rest: Any) -> Any:
    """A convolution of (B, C, ...) with (O, C / groups, ...) for each sample.

    With shared weights the samples are more of the batch.  With weights of their own they are groups: (B, N C, ...) with
    (N O, C / groups, ...) in N groups of groups.
    """
    a_dim, weight_dim, bias_dim, *_ = in_dims
    *settings, groups = rest
    if weight_dim is None and bias_dim is None:
        out = prims.convolution(_merged(a), weight, bias, *settings, groups)
        return _split(out, axis_size), 0
    if weight_dim is None:
        out, out_dim = prims.convolution(a if a_dim is None else _merged(a), weight, None, *settings, groups), a_dim
        out = out if out_dim is None else _split(out, axis_size)
    else:
        out = _with_own_weights(axis_size, with_batch(axis_size, a, a_dim), weight, settings, groups)
        out_dim = 0
    if bias is None:
        return out, out_dim
    spatial = (1,) * (weight.ndim - 2 - (weight_dim is not None))
    shape = (*bias.shape[:-1], *(1,) * (bias_dim is not None), bias.shape[-1], *spatial)
    if out_dim is None:
        out = with_batch(axis_size, out, None)
    return ltorch.add(out, ltorch.reshape(bias, shape)), 0


def _merged(a: TensorProxy) -> TensorProxy:
    """(N, B, ...) as (N B, ...)."""
    return ltorch.reshape(a, (a.shape[0] * a.shape[1], *a.shape[2:]))


def _split(a: TensorProxy, axis_size: int) -> TensorProxy:
    """(N B, ...) as (N, B, ...)."""
    return ltorch.reshape(a, (axis_size, a.shape[0] // axis_size, *a.shape[1:]))


def _with_own_weights(axis_size: int, a: TensorProxy, weight: TensorProxy, settings: Sequence[Any], groups: int) -> TensorProxy:
    by_channel = ltorch.movedim(a, 0, 1)  # (B, N, C, ...)
    given = ltorch.reshape(by_channel, (a.shape[1], axis_size * a.shape[2], *a.shape[3:]))
    out = prims.convolution(given, _merged(weight), None, *settings, axis_size * groups)  # (B, N O, ...)
    apart = ltorch.reshape(out, (out.shape[0], axis_size, out.shape[1] // axis_size, *out.shape[2:]))
    return ltorch.movedim(apart, 1, 0)


batching_rules.add(prims.convolution, convolution)
