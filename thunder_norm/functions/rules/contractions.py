"""Products of matrices, linear layers and convolutions; determinants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.functions.batching import sample_ndim, with_batch, with_sample_ndim
from thunder_norm.functions.derivatives import holomorphic, plus, register_multilinear, summed_to
from thunder_norm.functions.registry import batching_rules, decompositions, register_jvp, register_vjp
from thunder_norm.functions.rules.neural import with_kernel
from thunder_norm.functions.thunder_rules import one_gradient
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

# -- tangents: one term for each factor that moves --------------------------------------------------------------------


register_multilinear(prims.matmul, 0, 1)
register_multilinear(prims._grouped_mm, 0, 1)


@register_jvp(prims.linear)
def pushed_linear(primals, tangents):
    """dy = dx W^T + x dW^T + db."""
    (x, weight, bias), (dx, d_weight, d_bias) = primals, tangents
    out = prims.linear(x, weight, bias)
    return out, _with_bias(prims.linear, x, weight, dx, d_weight, d_bias, out, out.ndim - 1)


@register_jvp(prims.convolution)
def pushed_convolution(primals, tangents):
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


# -- cotangents -------------------------------------------------------------------------------------------------------


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


def _added_product(
    input: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1, **others: Any
) -> tuple[TensorProxy, tuple]:
    return ltorch.addmm(input, a, b, beta=beta, alpha=alpha, **others), (input, a, b, beta, alpha)


@holomorphic
def added_product_backward(saved: tuple, g: TensorProxy) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Of ``beta input + alpha a b``: beta g, summed where the input was repeated, alpha g b^T and alpha a^T g, rounded as torch does."""
    input, a, b, beta, alpha = saved
    to_a, to_b = ltorch.matmul(g, _transposed(b)), ltorch.matmul(_transposed(a), g)
    return summed_to(_times(beta, g), input), _times(alpha, to_a), _times(alpha, to_b)


def _times(factor: float, t: TensorProxy) -> TensorProxy:
    return t if factor == 1 else ltorch.mul(t, factor)


register_vjp(ltorch.addmm)(_added_product, added_product_backward)


def _convolution_kernel(which: int) -> Callable[..., torch.Tensor]:
    mask = [which == 0, which == 1, False]

    def run(g: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
        if g.numel() == 0:
            return torch.zeros_like((a, weight)[which])
        return torch.ops.aten.convolution_backward(g, a, weight, None, *settings, mask)[which]

    return run


@with_kernel(_convolution_kernel(0))
def convolution_input_gradient(g: TensorProxy, a: TensorProxy, weight: TensorProxy, *settings: Any) -> TensorProxy:
    """The convolution of g, with zeros around and between its entries, with the flipped weight."""
    return one_gradient(prims.PrimIDs.CONVOLUTION, 0, None, a, weight, None, *settings, g)


@with_kernel(_convolution_kernel(1))
def convolution_weight_gradient(g: TensorProxy, a: TensorProxy, weight: TensorProxy, *settings: Any) -> TensorProxy:
    """The convolution of the input with g, samples and channels exchanged."""
    return one_gradient(prims.PrimIDs.CONVOLUTION, 1, None, a, weight, None, *settings, g)


def _convolution(a: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *settings: Any) -> tuple[TensorProxy, tuple]:
    return prims.convolution(a, weight, bias, *settings), (a, weight, bias, settings)


def _convolution_backward(saved: tuple, g: TensorProxy) -> tuple:
    a, weight, bias, (stride, padding, dilation, transposed, output_padding, groups) = saved
    spatial = weight.ndim - 2

    def each(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) if len(values) == spatial else tuple(values) * spatial

    settings = each(stride), each(padding), each(dilation), bool(transposed), each(output_padding), groups
    to_bias = None if bias is None else ltorch.sum(g, (0, *range(2, g.ndim)))
    gradients = (of(g, a, weight, *settings) for of in (convolution_input_gradient, convolution_weight_gradient))
    return *gradients, to_bias, *(None,) * 6


register_vjp(prims.convolution)(_convolution, _convolution_backward)


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


# -- batches of products ----------------------------------------------------------------------------------------------


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


# -- batches of convolutions ------------------------------------------------------------------------------------------


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


# -- determinants -----------------------------------------------------------------------------------------------------


def _determinant(A: TensorProxy) -> TensorProxy:
    """By its definition for up to 3 rows: of a singular matrix torch's formulas have no third derivative."""
    size = A.shape[-1]
    if not 1 <= size <= 3:
        return NotImplemented

    def entry(i: int, j: int) -> TensorProxy:
        return ltorch.getitem(A, (..., i, j))

    if size == 1:
        return entry(0, 0)
    if size == 2:
        return _minor(entry, (0, 1), (0, 1))
    found = ltorch.mul(entry(0, 0), _minor(entry, (1, 2), (1, 2)))
    found = ltorch.sub(found, ltorch.mul(entry(0, 1), _minor(entry, (1, 2), (0, 2))))
    return ltorch.add(found, ltorch.mul(entry(0, 2), _minor(entry, (1, 2), (0, 1))))


def _minor(entry: Callable[[int, int], TensorProxy], rows: tuple[int, int], columns: tuple[int, int]) -> TensorProxy:
    (i, k), (j, m) = rows, columns
    return ltorch.sub(ltorch.mul(entry(i, j), entry(k, m)), ltorch.mul(entry(i, m), entry(k, j)))


for _operation in (torch.det, torch.linalg.det):
    decompositions.add(_operation, _determinant)
