"""Products of matrices, linear layers and convolutions: one term for each factor that moves."""

from __future__ import annotations

from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.jvp_rules._shared import plus, register_multilinear
from thunder_norm.functions.registry import register_jvp

register_multilinear(prims.matmul, 0, 1)
register_multilinear(prims._grouped_mm, 0, 1)


@register_jvp(prims.linear)
def linear(primals, tangents):
    """dy = dx W^T + x dW^T + db."""
    (x, weight, bias), (dx, d_weight, d_bias) = primals, tangents
    out = prims.linear(x, weight, bias)
    return out, _with_bias(prims.linear, x, weight, dx, d_weight, d_bias, out, out.ndim - 1)


@register_jvp(prims.convolution)
def convolution(primals, tangents):
    """dy = dx * W + x * dW + db."""
    (x, weight, bias, *settings), (dx, d_weight, d_bias, *_) = primals, tangents

    def convolve(a: TensorProxy, w: TensorProxy, b: TensorProxy | None) -> TensorProxy:
        return prims.convolution(a, w, b, *settings)

    out = convolve(x, weight, bias)
    return out, _with_bias(convolve, x, weight, dx, d_weight, d_bias, out, out.ndim - (weight.ndim - 1))


def _with_bias(
    operation: Any,
    x: TensorProxy,
    weight: TensorProxy,
    dx: TensorProxy | None,
    d_weight: TensorProxy | None,
    d_bias: TensorProxy | None,
    out: TensorProxy,
    channel: int,
) -> TensorProxy:
    """The three terms; the tangent of the bias goes along with another one if it can."""
    total = None
    for a, w in ((dx, weight), (x, d_weight)):
        if a is not None and w is not None:
            total = plus(total, operation(a, w, d_bias if total is None else None))
    return prims.broadcast_in_dim(d_bias, tuple(out.shape), (channel,)) if total is None else total
