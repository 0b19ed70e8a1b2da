"""The norm of ``sum_k a[.., k] b[k, ..]``, whatever the layout: the mathematics behind all matrix products.

A product is described by labels, one for each dimension, as in einsum: ``x @ W`` is ``"mk,kn->mn"``.  A label in both inputs but
not in the output is *contracted* (K of them in total), one in both inputs and the output is a *batch*.  Every bound here is
``c |a| |b|`` with a number c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core import conversions
from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import as_kind, spread, with_bias
from thunder_norm.scalars import times

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Bound:
    """``|output| <= factor |a| |b|`` in the norm `kind` over `elem_dims` of the output."""

    kind: type[NormedTensor]
    elem_dims: ed.Dims
    factor: float


@dataclass(frozen=True)
class _Operand:
    """A normed input with its dimensions named."""

    tensor: NormedTensor
    labels: Labels

    def size(self, labels: set[str]) -> int:
        return math.prod(self.tensor.shape[i] for i, name in enumerate(self.labels) if name in labels)

    @property
    def normed(self) -> set[str]:
        """Labels the norm runs over; a dimension of size 1 makes no difference and is left out."""
        return {self.labels[d] for d in ed.nontrivial(self.tensor.shape, self.tensor.elem_dims)}

    def dims(self, labels: set[str]) -> ed.Dims:
        return tuple(i - len(self.labels) for i, name in enumerate(self.labels) if name in labels)

    def dim(self, label: str) -> int:
        return self.labels.index(label) - len(self.labels)


def contract(a: NormedTensor, b: NormedTensor, a_labels: Sequence[str], b_labels: Sequence[str], out: Sequence[str]) -> Bound:
    """The best bound for the product of `a` and `b`, by their kinds.

    Raises:
        NormMismatchError: a label is summed over in one input alone, or an operator meets the product on the wrong side.
    """
    left, right, out = _Operand(a, tuple(a_labels)), _Operand(b, tuple(b_labels)), tuple(out)
    if len(left.labels) != a.ndim or len(right.labels) != b.ndim:
        raise NormMismatchError(f"{a.ndim} and {b.ndim} dimensions do not fit {a_labels} and {b_labels}")
    for mine, other in ((left, right), (right, left)):
        lonely = [n for n in mine.labels if n not in other.labels and n not in out]
        if lonely or len(set(mine.labels)) != len(mine.labels):
            raise NormMismatchError(f"a diagonal, or a sum over {lonely} in one input of a product alone: take it beforehand")
    if any(isinstance(x, RMSToRMSConvTensor) for x in (a, b)):
        raise NormMismatchError("a convolution kernel's norm says nothing about a matrix product: flatten and measure it anew")
    if isinstance(a, RMSToRMSTensor) and isinstance(b, RMSToRMSTensor):
        return _compose(left, right, out)
    if isinstance(a, RMSToRMSTensor):
        return _apply(left, right, out)
    if isinstance(b, RMSToRMSTensor):
        return _apply(right, left, out)
    for weights, x in ((left, right), (right, left)):
        contracted = {n for n in weights.labels if n not in out}
        if isinstance(weights.tensor, L1Tensor) and contracted & weights.normed:
            return _average(weights, x, out)
    return _inner(left, right, out)


def _inner(a: _Operand, b: _Operand, out: Labels) -> Bound:
    """``|a b| <= K |a| |b|`` for RMS norms, by Cauchy-Schwarz over the contracted labels.

    The norm of the output runs over what a's and b's norms ran over and survives.  A mean over a batch label can be kept for one
    input only: the other is converted to a maximum there.  Attained by constants; with means over batches, by spikes.
    Mode "typical": ``sqrt(K) |a| |b|``, of independent entries ``E (sum_k a_k b_k)^2 = K |a|^2 |b|^2``.
    """
    batch = {n for n in a.labels if n in b.labels and n in out}
    contracted = {n for n in a.labels if n not in out}
    cheapest = None
    for keeps, gives_up in ((a, b), (b, a)):
        converted = gives_up.normed - batch
        c = _rms_factor(gives_up, converted) * _rms_factor(keeps, keeps.normed)
        if cheapest is None or c < cheapest[0]:
            cheapest = c, (keeps.normed | converted) - contracted
    c, normed = cheapest
    count = a.size(contracted)
    c *= math.sqrt(count) if current_mode() == "typical" else count
    return Bound(RMSTensor if normed else LinfTensor, _out_dims(normed, out), c)


def _average(weights: _Operand, x: _Operand, out: Labels) -> Bound:
    """``|sum_k p_k x_k| <= |p|_1 max_k |x_k|``: rows of attention probabilities or one-hot rows times values.

    If x's norm also averages over a batch label of S entries, each of them may look at a position of its own:
    ``mean_s max_k |x_sk|^2 <= min(S, K) |x|^2``.
    """
    contracted = {n for n in weights.labels if n not in out}
    c = conversion_factor(weights.tensor, L1Tensor, weights.dims(contracted))
    if isinstance(x.tensor, L1Tensor):
        kept = x.normed & set(out) - set(weights.labels)
        c *= conversion_factor(x.tensor, L1Tensor, x.dims(kept))
        return Bound(L1Tensor if kept else LinfTensor, _out_dims(kept, out), c)
    averaged = x.normed & contracted
    batch = x.normed & set(weights.labels) - contracted
    positions = x.size(contracted) // x.size(averaged)
    kept = x.normed - contracted
    c *= _rms_factor(x, x.normed) * spread(math.sqrt(x.size(averaged) * min(x.size(batch), positions)))
    return Bound(RMSTensor if kept else LinfTensor, _out_dims(kept, out), c)


def _apply(w: _Operand, x: _Operand, out: Labels) -> Bound:
    """``|W x| <= |W| |x|``: the definition of the operator norm, averaged over the other labels of x's norm."""
    contracted = {n for n in w.labels if n not in out}
    ends = {w.labels[d] for d in w.tensor.elem_dims}
    if len(contracted) != 1 or not contracted < ends or ends - contracted <= set(x.labels):
        raise NormMismatchError(f"an operator between dims {w.tensor.elem_dims} cannot be applied over {sorted(contracted)}")
    (inner,), (output,) = contracted, ends - contracted
    c = conversion_factor(w.tensor, RMSToRMSTensor, (w.dim(output), w.dim(inner)))
    normed = x.normed | contracted
    c *= _rms_factor(x, normed)
    return Bound(RMSTensor, _out_dims(normed - contracted | {output}, out), c)


def _compose(a: _Operand, b: _Operand, out: Labels) -> Bound:
    """``|A B| <= |A| |B|`` for operators."""
    contracted = {n for n in a.labels if n not in out}
    ends = [{o.labels[d] for d in o.tensor.elem_dims} - contracted for o in (a, b)]
    if len(contracted) != 1 or any(len(e) != 1 for e in ends) or ends[0] == ends[1]:
        raise NormMismatchError(f"two operators cannot be composed over {sorted(contracted)}")
    (inner,), (first,), (last,) = contracted, *ends
    c = 1.0
    # the composition is read in the direction in which `a` is: out of a's end, or into it
    a_is_outer = a.labels[a.tensor.elem_dims[1]] == inner
    for operand, end in ((a, first), (b, last)):
        order = (end, inner) if (operand is a) == a_is_outer else (inner, end)
        c *= conversion_factor(operand.tensor, RMSToRMSTensor, (operand.dim(order[0]), operand.dim(order[1])))
    dims = (first, last) if a_is_outer else (last, first)
    return Bound(RMSToRMSTensor, tuple(out.index(n) - len(out) for n in dims), c)


def _rms_factor(x: _Operand, labels: set[str]) -> float:
    return rms_factor(x.tensor, x.dims(labels))


def rms_factor(x: NormedTensor, elem_dims: ed.Dims) -> float:
    """What it costs to read x's norm as an RMS norm over `elem_dims`."""
    c = conversion_factor(x, RMSTensor, elem_dims)
    return spread(c) if isinstance(x, RMSTensor) else c


def conversion_factor(x: NormedTensor, kind: type[NormedTensor], elem_dims: ed.Dims) -> float:
    """What it costs to read x's norm as a `kind` over `elem_dims`.

    Raises:
        NormMismatchError: there is no sound conversion.
    """
    c = conversions.factor(x, kind, elem_dims)
    if c is None:
        raise NormMismatchError(
            f"no conversion from {type(x).__name__} over dims {x.elem_dims} to {kind.__name__} over dims {elem_dims}"
        )
    return c


def _out_dims(labels: set[str], out: Labels) -> ed.Dims:
    return tuple(i - len(out) for i, name in enumerate(out) if name in labels)


def scaled(bound: Bound, a: NormedTensor, b: NormedTensor, names: tuple[str, str], scale: float = 1.0) -> NormedTensor:
    """The rule's result ``scale a b``: its value and, as it is bilinear, its sensitivities."""
    c = bound.factor * abs(scale)
    return bound.kind(
        times(a.norm_size * b.norm_size, c),
        elem_dims=bound.elem_dims,
        sensitivity={names[0]: times(b.norm_size, c), names[1]: times(a.norm_size, c)},
    )


def plus(product: NormedTensor, addend: NormedTensor, name: str, shape: Sequence[int], scale: float = 1.0) -> NormedTensor:
    """The rule's result for ``product + scale addend``, the addend broadcast to `shape` (that of the product).

    RMS norms meet in the elem_dims that cost least; an addend of another kind is converted to the product's.  One times 0 is not
    read, NaN or not.
    """
    kind, dims = type(product), product.elem_dims
    if scale == 0:
        return kind(product.norm_size, elem_dims=dims, sensitivity={**(product._sensitivity or {}), name: 0})
    c_product = 1.0
    if isinstance(product, RMSTensor) and isinstance(addend, RMSTensor):
        own = tuple(d for d in ed.nontrivial(addend.shape, addend.elem_dims))
        dims, (c_product, c) = ed.align(shape, dims, own)
        c_product, c = spread(c_product), spread(c)
        kind = RMSTensor if dims else LinfTensor
    else:
        stretched = [d for d in dims if d < -addend.ndim or addend.shape[d] != shape[d]]
        if stretched and not issubclass(kind, RMSTensor | L1Tensor):
            raise NormMismatchError(
                f"cannot broadcast an addend of shape {tuple(addend.shape)} over the dims of a {kind.__name__}"
            )
        inside = tuple(d for d in dims if d >= -addend.ndim)
        _, c = as_kind(addend, kind, inside)
        c *= math.prod(shape[d] for d in stretched) if issubclass(kind, L1Tensor) else 1
    sensitivity = {argument: times(constant, c_product) for argument, constant in (product._sensitivity or {}).items()}
    c *= abs(scale)
    value = with_bias(times(product.norm_size, c_product), times(addend.norm_size, c))
    return kind(value, elem_dims=dims, sensitivity={**sensitivity, name: c})


def number(value: float | torch.Tensor) -> float:
    """`value` itself if it is a Python number, as alpha and beta of addmm are."""
    if isinstance(value, torch.Tensor):
        raise NormMismatchError("alpha and beta must be Python numbers")
    return value
