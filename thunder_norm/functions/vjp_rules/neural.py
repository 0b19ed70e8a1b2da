"""Operations of neural networks: what their backwards need is computed from their arguments and results, by few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.kernels import gelu_backward, softmax_backward, standardize_backward
from thunder_norm.functions.registry import register_vjp


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
