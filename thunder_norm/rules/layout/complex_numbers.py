"""Complex tensors: rules that make them and take them apart, and which of the rules for real tensors hold for them too.

The norm of a complex tensor is that of the moduli of its entries.  Whatever rests on the triangle inequality, on Cauchy-Schwarz or on
singular values holds for it as it stands: linear maps, products, everything that moves entries.  What rests on the order of real
numbers does not: tanh is not bounded, a square may be negative.  So a rule meets complex tensors only where it is said here, or
registered with ``takes_complex=True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import are_local
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import NormedOp, normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import (
    SAME_DIMS,
    Number,
    align,
    broadcast,
    over_dims_of,
    refined,
    refuse,
    rms,
    root_sum_squares,
    scaled,
)
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.layout.writing import copied, with_entries
from thunder_norm.scalars import times


def _property(name: str) -> Callable:
    return getattr(torch.Tensor, name).__get__


# -- parts ----------------------------------------------------------------------------------------------------------------


@normed_op(torch.real).register_norm(takes_complex=True)
@normed_op(torch.imag).register_norm(takes_complex=True)
def real(input: NormedTensor) -> NormedTensor:
    """The real or the imaginary part.

    Value:       n      (attained: real numbers, imaginary numbers)
    Sensitivity: 1
    """
    return scaled(input, 1)


@normed_op(torch.conj).register_norm(takes_complex=True)
@normed_op(torch.conj_physical).register_norm(takes_complex=True)
def conj(input: NormedTensor) -> NormedTensor:
    """The conjugate.  Value n, sensitivity 1, in every kind."""
    return scaled(input, 1)


@normed_op(torch.view_as_real).register_norm(takes_complex=True)
def view_as_real(input: RMSTensor) -> RMSTensor:
    """Real and imaginary parts along a new last dimension.

    Value:       n / sqrt(2), RMS over this dimension too      (an equality)
    Sensitivity: 1 / sqrt(2)
    """
    c = 1 / math.sqrt(2)
    return rms(times(input.norm_size, c), (*(d - 1 for d in input.elem_dims), -1), sensitivity={"input": c})


@normed_op(torch.view_as_complex).register_norm
def view_as_complex(input: RMSTensor) -> RMSTensor:
    """Numbers of which the last dimension has real and imaginary parts.

    Value:       sqrt(2) n      (an equality where the norm runs over that dimension; else attained by equal parts)
    Sensitivity: sqrt(2)
    """
    c = math.sqrt(2)
    dims = tuple(d + 1 for d in input.elem_dims if d != -1)
    return rms(times(input.norm_size, c), dims, sensitivity={"input": c})


@normed_op(torch.complex).register_norm(lift_dims={"real": over_dims_of("imag"), "imag": over_dims_of("real")})
def complex(real: RMSTensor, imag: RMSTensor) -> RMSTensor:
    """a + i b.

    Value:       sqrt(|a|^2 + |b|^2)      (attained: an equality for constants)
    Sensitivity: 1 and 1
    """
    dims, (ca, cb) = align(broadcast(real.shape, imag.shape), real, imag)
    value = root_sum_squares(times(real.norm_size, ca), times(imag.norm_size, cb))
    return rms(value, dims, sensitivity={"real": ca, "imag": cb})


@normed_op(torch.polar).register_norm
def polar(abs: RMSTensor, angle: RMSTensor) -> RMSTensor:
    """r e^(i t).

    Value:       |r|      (an equality)
    Sensitivity: 1 to r;  c |r| to t, with the constant of a product
    Source:      |e^(i s) - e^(i t)| <= |s - t|
    """
    dims, c = product_dims(abs, angle)
    to_value = refined(abs, dims)
    value = times(abs.norm_size, to_value)
    return rms(value, dims, sensitivity={"abs": to_value, "angle": times(abs.norm_size, c)})


refuse(
    normed_op(torch.angle),
    "an angle jumps where a number passes the negative axis, and moves as much as one likes near 0; take real and imaginary parts",
)


# -- quotients, at the data -----------------------------------------------------------------------------------------------------


def _is_complex_at_data(name: str, *or_these: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an argument has a norm and is at the data, and it or one of these is complex."""

    def condition(args: dict[str, Any]) -> bool:
        some = (args[n] for n in (name, *or_these))
        return (
            isinstance(args[name], NormedTensor)
            and any(isinstance(t, torch.Tensor) and is_complex(t) for t in some)
            and are_local(args)
        )

    return condition


def _largest_inverse(x: NormedTensor) -> torch.Tensor:
    """The largest modulus of 1 / x at the data."""
    return 1 / data(x).abs().min().to(x.norm_size.dtype)


@normed_op(torch.div).register_norm(when=_is_complex_at_data("other", "input"), lift_dims=SAME_DIMS, takes_complex=True)
def complex_quotient(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b at the data, of which one or both are complex, and whose entries of b are of modulus at least c.

    Value:       |a| / c
    Sensitivity: 1 / c to a;  k |a| / c^2 to b, k = sqrt(N) where both are RMS over the same dimensions, as in a product
    Source:      d(1 / b) = -db / b^2
    Untried:     it holds at the data alone, and the search moves norms
    """
    gain = _largest_inverse(other)
    dims, k = product_dims(input, other)
    ca = refined(input, dims)
    value = times(input.norm_size, ca * gain)
    return rms(value, dims, sensitivity={"input": ca * gain, "other": input.norm_size * gain.square() * k})


@normed_op(torch.div).register_norm(when=_is_complex_at_data("other"), takes_complex=True)
def number_over_complex(input: Number, other: RMSTensor, *, rounding_mode: str | None = None) -> RMSTensor:
    """a / b at the data for a number a: |a| times the `reciprocal`.

    Untried:     it holds at the data alone, and the search moves norms
    """
    gain, size = _largest_inverse(other), math.fabs(input)
    return rms(bounded(times(gain, size), other.norm_size), other.elem_dims, sensitivity={"other": gain.square() * size})


@normed_op(torch.reciprocal).register_norm(when=_is_complex_at_data("input"), takes_complex=True)
def complex_reciprocal(input: RMSTensor) -> RMSTensor:
    """1 / x at the data, whose entries are of modulus at least c.

    Value:       1 / c
    Sensitivity: 1 / c^2
    Untried:     it holds at the data alone, and the search moves norms
    """
    gain = _largest_inverse(input)
    return rms(bounded(gain, input.norm_size), input.elem_dims, sensitivity={"input": gain.square()})


# -- rules for real tensors that hold for complex ones -----------------------------------------------------------------------

_ALL: tuple[Callable | NormedOp, ...] = (
    # sums and products
    torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.lerp, torch.addcmul, torch.neg, torch.positive, torch.abs,
    torch.sum, torch.mean, torch.cumsum, torch.square, torch.linalg.vector_norm, torch.norm, torch.linalg.norm,
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, torch.dot, torch.vdot, torch.inner, torch.outer, torch.addmm,
    torch.addmv, torch.baddbmm, torch.addbmm, torch.addr, torch.einsum, torch.Tensor.__rmatmul__, F.dropout,
    # entries in other places
    torch.Tensor.view, torch.reshape, torch.Tensor.view_as, torch.Tensor.reshape_as, torch.flatten, torch.ravel, torch.unflatten,
    torch.permute, torch.transpose, torch.adjoint, _property("mT"), _property("mH"), torch.t, _property("T"), _property("H"),
    torch.movedim, torch.flip, torch.fliplr, torch.flipud, torch.rot90, torch.roll, torch.unsqueeze, torch.squeeze,
    torch.Tensor.expand, torch.broadcast_to, torch.Tensor.expand_as, torch.Tensor.repeat, torch.tile, torch.repeat_interleave,
    torch.ops.aten.slice.Tensor, torch.narrow, torch.select, torch.unbind, torch.split, torch.chunk, torch.tensor_split,
    torch.Tensor.__getitem__, torch.index_select, torch.gather, torch.diagonal, torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.index.Tensor, torch.cat, torch.stack, torch.tril, torch.triu, torch.diag_embed, torch.where, F.pad,
    torch.constant_pad_nd, torch.masked_fill,
    torch.slice_scatter, torch.select_scatter, torch.index_copy, torch.index_add, torch.scatter, torch.scatter_add,
    with_entries, copied,
    # copies and constants
    torch.Tensor.to, torch.ops.aten._to_copy.default, torch.Tensor.type_as, torch.Tensor.type, torch.clone, torch.detach,
    torch.Tensor.contiguous, torch.ops.aten.alias.default, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.resolve_conj,
    torch.Tensor.resolve_neg, torch.ops.prims.convert_element_type.default, torch.zeros_like, torch.ones_like, torch.full_like,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.ops.aten.zero.default,
)  # fmt: skip
for _op in _ALL:
    normed_op(_op).extend_to_complex()

# conditions that say only how a plain tensor is taken
for _op in (torch.matmul, torch.mm, torch.bmm, torch.mv):
    normed_op(_op).extend_to_complex("matmul_weight", "weight_matmul")
normed_op(torch.einsum).extend_to_complex("einsum", "einsum_weight_first")
