"""Matrix products."""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.batch_dims import sample_ndim, with_batch, with_sample_ndim
from thunder_norm.functions.registry import batching_rules


def matmul(axis_size: int, in_dims: tuple, a: TensorProxy, b: TensorProxy) -> Any:
    """a b for each sample.

    A product with a matrix that all samples share is one product of matrices; vectors become matrices of one row or column.
    """
    a_dim, b_dim = in_dims
    a_ndim, b_ndim = sample_ndim(a, a_dim), sample_ndim(b, b_dim)
    if a.numel == 0 or b.numel == 0:  # Thunder flattens the dimensions that are not summed over, and cannot if there is nothing
        a, b, a_dim, b_dim = with_batch(axis_size, a, a_dim), with_batch(axis_size, b, b_dim), 0, 0
    if b_dim is None and b_ndim <= 2:
        return ltorch.matmul(a, b), 0  # (N, ..., k) by (k,) or (k, m): the batch dimension is one more of torch's
    if a_dim is None and a_ndim == 1 and b_ndim == 1:
        return ltorch.matmul(b, a), 0
    row, column = a_ndim == 1, b_ndim == 1
    if row:
        a = ltorch.unsqueeze(a, -2)
    if column:
        b = ltorch.unsqueeze(b, -1)
    ndim = max(a_ndim + row, b_ndim + column)
    out = ltorch.matmul(with_sample_ndim(a, a_dim, ndim), with_sample_ndim(b, b_dim, ndim))
    if column:
        out = ltorch.squeeze(out, -1)
    return (ltorch.squeeze(out, -1 if column else -2) if row else out), 0


def linear(axis_size: int, in_dims: tuple, a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None) -> Any:
    """y = a W^T + b, of weights and biases that may be different for each sample."""
    a_dim, weight_dim, bias_dim = in_dims
    if weight_dim is None and bias_dim is None:
        return ltorch.linear(a, weight, bias), 0
    if weight_dim is None:
        out = ltorch.linear(a, weight)
        out_dim = a_dim
    else:
        out, out_dim = matmul(axis_size, (a_dim, 0), a, ltorch.transpose(weight, -2, -1))
    if bias is None:
        return out, out_dim
    ndim = max(sample_ndim(out, out_dim), 1)
    return ltorch.add(with_sample_ndim(out, out_dim, ndim), with_sample_ndim(bias, bias_dim, ndim)), 0


batching_rules.add(prims.matmul, matmul)
batching_rules.add(ltorch.matmul, matmul)
batching_rules.add(prims.linear, linear)
batching_rules.add(ltorch.linear, linear)
