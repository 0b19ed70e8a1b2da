"""Operations that move elements, and that write them by index."""

from __future__ import annotations

from collections.abc import Sequence

import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.complex_numbers import complex_of, is_complex
from thunder_norm.functions.registry import register_vjp

register_vjp(prims.flip)(lambda a, dims: (prims.flip(a, dims), dims), lambda dims, g: (prims.flip(g, dims), None))

register_vjp(prims.view)(
    lambda a, shape: (prims.view(a, shape), tuple(a.shape)), lambda shape, g: (clang.reshape(g, shape), None)
)


def _slice(
    a: TensorProxy, starts: Sequence[int], ends: Sequence[int], strides: Sequence[int] | None = None
) -> tuple[TensorProxy, tuple]:
    out = prims.slice_prim(a, starts, ends, strides)
    return out, (tuple(a.shape), tuple(out.shape), starts, [1] * a.ndim if strides is None else strides)


def _slice_backward(saved: tuple, g: TensorProxy) -> tuple:
    """Zeros around it, and between where there is a stride; torch pads real numbers only."""
    shape, out_shape, starts, strides = saved
    config = []
    for size, kept, start, stride in zip(shape, out_shape, map(int, starts), map(int, strides), strict=True):
        covered = start + (kept - 1) * stride + 1 if kept else start
        config.append((start, size - covered, stride - 1))
    if is_complex(g):
        return complex_of(*(prims.pad(part, 0.0, config) for part in (prims.real(g), prims.imag(g)))), None, None, None
    return prims.pad(g, 0.0, config), None, None, None


register_vjp(prims.slice_prim)(_slice, _slice_backward)


def _index_add(a: TensorProxy, index: TensorProxy, value: TensorProxy, dim: int) -> tuple[TensorProxy, tuple]:
    return prims.index_add(a, index, value, dim), (index, dim)


def _index_add_backward(saved: tuple, g: TensorProxy) -> tuple:
    index, dim = saved
    return g, None, prims.take(g, index, dim), None


register_vjp(prims.index_add)(_index_add, _index_add_backward)


def _index_put(
    a: TensorProxy, indices: Sequence[TensorProxy], values: TensorProxy, accumulate: bool
) -> tuple[TensorProxy, tuple]:
    return prims.index_put(a, indices, values, accumulate), (indices, values, accumulate)


def _index_put_backward(saved: tuple, g: TensorProxy) -> tuple:
    """What is overwritten gets nothing."""
    indices, values, accumulate = saved
    to_a = g if accumulate else prims.index_put(g, indices, clang.full_like(values, 0), False)
    return to_a, None, ltorch.getitem(g, tuple(indices)), None


register_vjp(prims.index_put)(_index_put, _index_put_backward)


def _embedding(
    indices: TensorProxy,
    weight: TensorProxy,
    *,
    padding_idx: int = -1,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[TensorProxy, tuple]:
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    out = prims.embedding(indices, weight, max_norm=max_norm, norm_type=norm_type, **options)
    return out, (indices, weight.shape[0], *options.values())


def _pulled_embedding(saved: tuple, g: TensorProxy) -> tuple[None, TensorProxy]:
    """Rows of g, added where the indices name them; Thunder's rule gives that to the indices."""
    indices, num_weights, padding_idx, scale_grad_by_freq, sparse = saved
    return None, prims.embedding_backward(g, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)


register_vjp(prims.embedding)(_embedding, _pulled_embedding)


def _embedding_backward(
    grad: TensorProxy, indices: TensorProxy, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> tuple[TensorProxy, tuple]:
    out = prims.embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)
    return out, (indices, padding_idx, scale_grad_by_freq)


def _embedding_backward_backward(saved: tuple, g: TensorProxy) -> tuple:
    """The rows that the indices name, nothing for the padding."""
    indices, padding_idx, scale_grad_by_freq = saved
    if scale_grad_by_freq:
        raise NotImplementedError("embedding with scale_grad_by_freq cannot be differentiated twice")
    rows = prims.embedding(indices, g)
    if padding_idx is not None and padding_idx >= 0:
        rows = clang.where(clang.unsqueeze(clang.eq(indices, padding_idx), -1), 0.0, rows)
    return rows, *(None,) * 5


register_vjp(prims.embedding_backward)(_embedding_backward, _embedding_backward_backward)
