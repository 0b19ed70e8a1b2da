"""Norm rules for matrices made of diagonals or blocks, and for traces: diag, diag_embed, diagonal_scatter, block_diag, trace.

Zeros around a diagonal change no sum and no maximum; a mean is over more entries, of which all but the diagonal's are 0.
"""

from __future__ import annotations

import math

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import (
    VectorKind,
    align,
    maximum,
    negative,
    over_dims_of,
    refined,
    rms,
    root_sum_squares,
    scaled,
    spread,
)
from thunder_norm.rules.layout.indexing import diagonal as diagonal_of
from thunder_norm.rules.layout.shape import reshaped
from thunder_norm.scalars import times


def _onto_diagonal(x: NormedTensor, length: int, offset: int, rows: int, columns: int) -> NormedTensor:
    """The result of x, K = `length` entries along -1, on a diagonal between two new dimensions (negative, of the output)."""
    others = [d for d in range(-x.ndim - 1, 0) if d not in (rows, columns)]
    dims = [others[d + 1] for d in x.elem_dims if d != -1]
    if -1 not in x.elem_dims:
        return scaled(x, 1, tuple(sorted(dims)))
    side = length + abs(offset)
    c = math.sqrt(length) / max(side, 1) if isinstance(x, RMSTensor) else 1.0
    return scaled(x, spread(c), tuple(sorted((*dims, rows, columns))))


@normed_op(torch.diag_embed).register_norm
def diag_embed(input: VectorKind, offset: int = 0, dim1: int = -2, dim2: int = -1) -> NormedTensor:
    """Matrices with x, K entries along the last dimension, on a diagonal, zeros elsewhere: of side M = K + |offset|.

    Value:       sqrt(K) / M n, RMS over both dimensions, if the norm runs over the last dimension, else n   (attained by every x)
    Sensitivity: the same factor
    """
    ndim = input.ndim + 1
    return _onto_diagonal(input, input.shape[-1], offset, negative(dim1, ndim), negative(dim2, ndim))


@normed_op(torch.diag).register_norm
def diag(input: VectorKind, diagonal: int = 0) -> NormedTensor:
    """`diag_embed` of a vector, `diagonal` of a matrix."""
    return diag_embed(input, diagonal) if input.ndim == 1 else diagonal_of(input, diagonal)


@normed_op(torch.diagflat).register_norm
def diagflat(input: VectorKind, offset: int = 0) -> NormedTensor:
    """`diag_embed` of the flattened tensor."""
    flat = reshaped(input, (input.numel(),))
    vector = type(flat)._wrap(torch.empty(input.numel(), device="meta"), flat.norm_size, None, flat.elem_dims)
    return _onto_diagonal(vector, input.numel(), offset, -2, -1)


@normed_op(torch.diagonal_scatter).register_norm(
    lift_dims={"src": lambda t, arguments: (-1,), "input": lambda t, arguments: (-1,)}
)
def diagonal_scatter(input: RMSTensor, src: RMSTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> RMSTensor:
    """x with `src`, K entries along its last dimension, in the place of a diagonal.

    Value:       sqrt(n^2 + c^2 s^2) if the norm runs over one of the two dimensions (approached: x elsewhere), with c^2 = K or 1
                 entries of src for all those that it runs over; else max(n, s), attained
    Sensitivity: 1 to x, c (1) to src
    """
    rows, columns = negative(dim1, input.ndim), negative(dim2, input.ndim)
    others = [d for d in range(-input.ndim, 0) if d not in (rows, columns)]
    place = {own: d for own, d in zip(range(-src.ndim, -1), others, strict=True)}
    dims = set(input.elem_dims)
    needed = {place[d] for d in src.elem_dims if d != -1} | ({rows, columns} if -1 in src.elem_dims else set())
    # a mean over more is free for x; where it saves a conversion of src, the result's norm is such a mean
    if not needed <= dims:
        dims |= needed
    is_over_both = {rows, columns} <= dims
    share = src.shape[-1] if is_over_both else 1
    c = refined(src, tuple(own for own, d in place.items() if d in dims) + ((-1,) if is_over_both else ()))
    inside = [d for d in (rows, columns) if d in dims]
    c *= math.sqrt(share / max(ed.numel(input.shape, inside), 1))
    n, s = input.norm_size, times(src.norm_size, c)
    value = root_sum_squares(n, s) if inside else torch.maximum(n, s)
    return rms(value, tuple(sorted(dims)), sensitivity={"input": 1, "src": c})


# -- blocks -----------------------------------------------------------------------------------------------------------------


def _as_matrix(x: NormedTensor) -> NormedTensor:
    """A number or a vector as a matrix of one row, for its shape and norm."""
    if x.ndim == 2:
        return x
    shape = (1, x.shape[0] if x.ndim else 1)
    return type(x)._wrap(torch.empty(shape, device="meta"), x.norm_size, None, x.elem_dims)


_SAME_DIMS = {"tensors": over_dims_of("tensors")}


@normed_op(torch.block_diag).register_norm(lift_dims=_SAME_DIMS)
def block_diag(*tensors: RMSTensor) -> RMSTensor:
    """Matrices as blocks on the diagonal of one of R rows and C columns, zeros elsewhere.

    Value:       max_i n_i for the largest entry; max_i sqrt(c_i / C) n_i for rows; sqrt(sum_i r_i c_i n_i^2 / (R C)) for RMS over
                 everything (all attained)
    Sensitivity: 1, sqrt(c_i / C), sqrt(r_i c_i / (R C))    (where the norm is a maximum, bounded by the sum)
    """
    blocks = [_as_matrix(t) for t in tensors]
    sides = (sum(t.shape[-2] for t in blocks), sum(t.shape[-1] for t in blocks))
    dims, factors = align(sides, *blocks)
    total = max(ed.numel(sides, dims), 1)
    factors = [c * spread(math.sqrt(ed.numel(t.shape, dims) / total)) for c, t in zip(factors, blocks, strict=True)]
    sizes = [times(t.norm_size, c) for t, c in zip(blocks, factors, strict=True)]
    value = root_sum_squares(*sizes) if {-2, -1} <= set(dims) else maximum(sizes)
    return rms(value, dims, sensitivity={"tensors": factors})


@normed_op(torch.block_diag).register_norm(lift_dims=_SAME_DIMS)
def block_diag_of_list(tensors: list[RMSTensor]) -> RMSTensor:
    """`block_diag`, as ATen has it."""
    return block_diag(*tensors)


# -- traces -----------------------------------------------------------------------------------------------------------------


@normed_op(torch.trace).register_norm
def trace(input: RMSTensor) -> RMSTensor:
    """Sum of the diagonal's K entries, of a matrix of R rows and C columns.

    Value:       K n for the largest entry, K sqrt(C) n from rows of RMS n, K sqrt(R) n from columns, sqrt(K R C) n from RMS over
                 everything  (attained: n, sqrt(C) n, ... on the diagonal)
    Sensitivity: the same factor
    Source:      Cauchy-Schwarz
    """
    shortest = min(input.shape)
    inside = math.sqrt(ed.numel(input.shape, input.elem_dims))
    c = math.sqrt(shortest) * inside if set(ed.nontrivial(input.shape, (-2, -1))) <= set(input.elem_dims) else shortest * inside
    return rms(times(input.norm_size, c), (), sensitivity={"input": c})


@normed_op(torch.trace).register_norm
def trace_of_operator(input: RMSToRMSTensor) -> RMSTensor:
    """Sum of the diagonal's K entries: |tr W| <= K sigma_max, attained by the identity."""
    rows, columns = (input.shape[d] for d in input.elem_dims)
    c = min(rows, columns) * math.sqrt(rows / columns)
    return rms(times(input.norm_size, c), (), sensitivity={"input": c})
