"""Products of matrices and linear layers."""

from __future__ import annotations

import math

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.complex_numbers import holomorphic
from thunder_norm.functions.elementwise.slopes import summed_to
from thunder_norm.functions.registry import register_vjp


def _linear(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None) -> tuple[TensorProxy, tuple]:
    return prims.linear(a, weight, bias), (a, weight, bias)


@holomorphic
def _linear_backward(saved: tuple, g: TensorProxy) -> tuple:
    """g W, g^T x and g, the latter two summed over all but the last dimension; of one vector the outer product."""
    a, weight, bias = saved
    to_weight = _outer(g, a) if a.ndim == 1 else ltorch.matmul(_transposed(_rows(g)), _rows(a))
    to_bias = None if bias is None else ltorch.sum(g, tuple(range(g.ndim - 1))) if g.ndim > 1 else g
    return _product(g, weight), to_weight, to_bias


register_vjp(prims.linear)(_linear, _linear_backward)


def _matmul(a: TensorProxy, b: TensorProxy) -> tuple[TensorProxy, tuple]:
    return prims.matmul(a, b), (a, b)


@holomorphic
def _matmul_backward(saved: tuple, g: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """g b^T and a^T g, with a vector on the left as a row, one on the right as a column, and dimensions that were repeated summed."""
    a, b = saved
    if a.ndim == 1 and b.ndim == 1:
        return ltorch.mul(b, g), ltorch.mul(a, g)
    if a.ndim == 1:
        to_a = ltorch.squeeze(ltorch.matmul(b, ltorch.unsqueeze(g, -1)), -1)
        return summed_to(to_a, a), summed_to(_outer(a, g), b)
    if b.ndim == 1:
        to_b = ltorch.squeeze(ltorch.matmul(_transposed(a), ltorch.unsqueeze(g, -1)), -1)
        return summed_to(_outer(g, b), a), summed_to(to_b, b)
    to_a = _product(g, _transposed(b))
    if b.ndim == 2 and a.ndim > 2:
        return to_a, ltorch.matmul(_transposed(_rows(a)), _rows(g))
    return summed_to(to_a, a), summed_to(ltorch.matmul(_transposed(a), g), b)


register_vjp(prims.matmul)(_matmul, _matmul_backward)


def _product(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """a b; Thunder's own leaves a length to be inferred, which that of an empty product cannot be."""
    if a.ndim == 2 or b.ndim > 2:
        return ltorch.matmul(a, b)
    return ltorch.reshape(ltorch.matmul(_rows(a), b), (*a.shape[:-1], b.shape[-1]))


def _rows(a: TensorProxy) -> TensorProxy:
    """[..., n] as a matrix."""
    return a if a.ndim == 2 else ltorch.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))


def _transposed(a: TensorProxy) -> TensorProxy:
    return ltorch.transpose(a, -2, -1)


def _outer(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """[..., m] and [..., n] to [..., m, n]."""
    return ltorch.mul(ltorch.unsqueeze(a, -1), ltorch.unsqueeze(b, -2))
