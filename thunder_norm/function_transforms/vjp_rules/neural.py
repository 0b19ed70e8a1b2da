"""Operations of neural networks: what their ways back need is computed from their arguments and results, by few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.function_transforms.complex_numbers import holomorphic
from thunder_norm.function_transforms.kernels import gelu_backward, softmax_backward, standardize_backward
from thunder_norm.function_transforms.registry import register_vjp


def _linear(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None) -> tuple[TensorProxy, tuple]:
    return prims.linear(a, weight, bias), (a, weight, bias)


@holomorphic
def _linear_backward(saved: tuple, g: TensorProxy) -> tuple:
    """g W, g^T x and g, the latter two summed over all but the last dimension; of one vector the outer product."""
    a, weight, bias = saved
    to_a = ltorch.matmul(g, weight)
    if a.ndim == 1:
        to_weight = ltorch.mul(ltorch.unsqueeze(g, 1), ltorch.unsqueeze(a, 0))
    else:
        columns = ltorch.transpose(ltorch.reshape(g, (-1, g.shape[-1])), 0, 1)
        to_weight = ltorch.matmul(columns, ltorch.reshape(a, (-1, a.shape[-1])))
    if bias is None:
        return to_a, to_weight, None
    return to_a, to_weight, ltorch.sum(g, tuple(range(g.ndim - 1))) if g.ndim > 1 else g


register_vjp(prims.linear)(_linear, _linear_backward)


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
