"""Operations of which Thunder has no decomposition, written in others.

Some are what Thunder's own gradient rules are made of: a second transform meets them in the program that a first one made.  Others
torch would transform wrong.  And torch's formulas for the gradients of those that draw numbers would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

from thunder_norm.functions.derivatives import complex_of
from thunder_norm.functions.registry import decompositions
from thunder_norm.tracing.recording import scope


def decomposed(bsym: BoundSymbol) -> list[BoundSymbol] | None:
    """What an operation consists of, by its own arguments and results; None if it has no decomposition, or none of these arguments."""
    decomposition = decompositions.find(bsym.sym)
    if decomposition is None:
        return None
    with scope(get_tracectx()) as written:
        result = decomposition(*bsym.args, **bsym.kwargs)
    if result is NotImplemented:
        return None
    pairs = zip(tree_flatten(result)[0], tree_flatten(bsym.output)[0], strict=True)
    renamed = {variableify(made): out for made, out in pairs if isinstance(made, TensorProxy)}
    return [b.from_bsym_swap_proxies(renamed) for b in written]


def _decomposition(operation: object) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        decompositions.add(operation, function)
        return function

    return register


@_decomposition(ltorch.nll_loss_backward)
def nll_loss_backward(
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


@_decomposition(ltorch.log_softmax_backward)
def log_softmax_backward(g: TensorProxy, output: TensorProxy, dim: int, dtype: dtypes.dtype) -> TensorProxy:
    """g - softmax(x) sum(g), of the result of log_softmax."""
    return ltorch.to(ltorch.sub(g, ltorch.mul(ltorch.exp(output), ltorch.sum(g, dim, True))), dtype)


@_decomposition(torch.index_fill)
def index_fill(input: TensorProxy, dim: int, index: TensorProxy, value: TensorProxy | float) -> TensorProxy:
    """`value` at the positions of `index` along `dim`, `input` elsewhere.

    Torch 2.11 batches it wrong where only a 0-dim value has a batch dimension.
    """
    size = input.shape[dim] if input.ndim else 1
    positions = ltorch.reshape(ltorch.where(ltorch.lt(index, 0), ltorch.add(index, size), index), (1, int(index.numel)))
    is_filled = ltorch.any_tensor(ltorch.eq(ltorch.reshape(ltorch.arange(size, device=input.device), (size, 1)), positions), 1)
    shape = [1] * input.ndim
    if input.ndim:
        shape[dim] = size
    filling = ltorch.to(value, input.dtype) if isinstance(value, TensorProxy) else value
    return ltorch.where(ltorch.reshape(is_filled, tuple(shape)), filling, input)


@_decomposition(torch.polar)
def polar(abs: TensorProxy, angle: TensorProxy) -> TensorProxy:
    """r (cos t + i sin t).  Torch 2.11's tangent of it has a wrong sign."""
    return complex_of(ltorch.mul(abs, ltorch.cos(angle)), ltorch.mul(abs, ltorch.sin(angle)))


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
