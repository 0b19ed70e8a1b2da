"""Norm rules for writing one tensor into a part of another: scatters, index_copy, index_add, index_fill.

Which positions are written is plain data, of which only the number is known.  Where the norm runs over them, the energies of what
stays and of what comes add; where it does not, the result has the larger of the two norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import align, maximum, negative, over_dims_of, refuse, rms, root, root_sum_squares, scalar
from thunder_norm.scalars import times

_SRC = {"src": over_dims_of("input"), "input": over_dims_of("src")}
_SOURCE = {"source": over_dims_of("input"), "input": over_dims_of("source")}


@dataclass(frozen=True)
class _Row:
    """A normed tensor as a slice of 1 along a new dimension."""

    norm_size: torch.Tensor
    shape: tuple[int, ...]
    elem_dims: ed.Dims


def replaced(x: RMSTensor, part: RMSTensor | _Row, along: int, name: str) -> RMSTensor:
    """x with `part`, m of K positions along `along` (negative), in the place of as many of its own.

    Value:       sqrt(n^2 + (m / K) p^2) where the norm runs over `along` (approached: x elsewhere), else max(n, p), attained
    Sensitivity: 1 to x; sqrt(m / K) or 1 to the part
    """
    dims, (c, c_part) = align(x.shape, x, cast(RMSTensor, part))
    if along in dims:
        c_part *= math.sqrt(part.shape[along] / max(x.shape[along], 1))
    return _beside(x, part, (c, c_part), dims, along in dims, name)


def _beside(
    x: RMSTensor, part: RMSTensor | _Row, factors: tuple[float, float], dims: ed.Dims, is_sum: bool, name: str
) -> RMSTensor:
    """Entries of x and of `part` in one tensor: root of the sum of squares in a norm over both, else the maximum."""
    sizes = [times(y.norm_size, c) for y, c in zip((x, part), factors, strict=True)]
    value = root_sum_squares(*sizes) if is_sum else maximum(sizes)
    return rms(value, dims, sensitivity={"input": factors[0], name: factors[1]})


@normed_op(torch.slice_scatter).register_norm(lift_dims=_SRC)
def slice_scatter(
    input: RMSTensor, src: RMSTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RMSTensor:
    """x with `src` written into a slice along `dim`: `replaced`."""
    return replaced(input, src, negative(dim, input.ndim), "src")


@normed_op(torch.select_scatter).register_norm(lift_dims=_SRC)
def select_scatter(input: RMSTensor, src: RMSTensor, dim: int, index: int) -> RMSTensor:
    """x with `src` written into one position along `dim`: `slice_scatter` of a slice of 1."""
    along = negative(dim, input.ndim)
    at = along + input.ndim
    shape = (*src.shape[:at], 1, *src.shape[at:])
    return replaced(input, _Row(src.norm_size, shape, ed.insert(src.elem_dims, at, src.ndim)), along, "src")


@normed_op(torch.index_copy).register_norm(allow_plain_tensors="constant", lift_dims=_SOURCE)
def index_copy(input: RMSTensor, dim: int, index: torch.Tensor, source: RMSTensor) -> RMSTensor:
    """x with the rows of `source` in the place of those that a plain index names: `replaced`."""
    if input.ndim == 0:
        return _beside(input, source, (1.0, 1.0), (), False, "source")
    return replaced(input, source, negative(dim, input.ndim), "source")


@normed_op(torch.index_fill).register_norm(allow_plain_tensors="constant")
def index_fill(input: RMSTensor, dim: int, index: torch.Tensor, value: float) -> RMSTensor:
    """x with v in the rows, m of K, that a plain index names.

    Value:       sqrt(n^2 + (m / K) v^2) where the norm runs over `dim` (approached: x elsewhere), else max(n, |v|), attained
    Sensitivity: 1
    """
    along = negative(dim, input.ndim) if input.ndim else 0
    is_sum = along in input.elem_dims
    share = math.sqrt(min(1.0, index.numel() / max(input.shape[along], 1))) if is_sum else 1.0
    return _filled(input, math.fabs(value) * share, is_sum)


def _filled(x: RMSTensor, v: float, is_sum: bool) -> RMSTensor:
    n, filling = x.norm_size, scalar(v, x.norm_size)
    return rms(root_sum_squares(n, filling) if is_sum else maximum([n, filling]), x.elem_dims, sensitivity={"input": 1})


@normed_op(torch.index_add).register_norm(allow_plain_tensors="constant", lift_dims=_SOURCE)
def index_add(input: RMSTensor, dim: int, index: torch.Tensor, source: RMSTensor, *, alpha: float = 1) -> RMSTensor:
    """x plus alpha times the rows of `source`, m of them, each added to the row of x (of K) that a plain index names.

    Value:       n + |alpha| c s with c = m / sqrt K where the norm runs over `dim`, else c = m   (attained: all onto one row)
    Sensitivity: 1 to x, |alpha| c to the source
    Source:      Cauchy-Schwarz: (sum of m terms)^2 <= m times their squares
    Typical:     sqrt(n^2 + alpha^2 (m / K) s^2), and |alpha| sqrt(m / K): energies of independent terms add, wherever they go
    """
    share = source.numel() / max(input.numel(), 1)
    if input.ndim == 0:
        return _added(input, source, (1.0, math.fabs(alpha) * max(source.numel(), 1)), (), "source", math.fabs(alpha), share)
    along = negative(dim, input.ndim)
    dims, (c, c_source) = align(input.shape, input, source)
    m = source.shape[along]
    c_source *= math.fabs(alpha) * m / (root(input.shape[along]) if along in dims else 1.0)
    return _added(input, source, (c, c_source), dims, "source", math.fabs(alpha), share)


def _added(
    x: RMSTensor, part: RMSTensor, factors: tuple[float, float], dims: ed.Dims, name: str, scale: float, share: float
) -> RMSTensor:
    """x plus `scale` times entries of `part`, `share` of them for each of x: by these factors, or typically by root of `share`."""
    if current_mode() == "typical":
        c = scale * math.sqrt(share)
        return rms(root_sum_squares(x.norm_size, times(part.norm_size, c)), dims, sensitivity={"input": 1, name: c})
    value = times(x.norm_size, factors[0]) + times(part.norm_size, factors[1])
    return rms(value, dims, sensitivity={"input": factors[0], name: factors[1]})


# -- an index for each entry ------------------------------------------------------------------------------------------------


def _share(x: RMSTensor, src: RMSTensor, dims: ed.Dims) -> float:
    """``sqrt(prod src_d / x_d)`` over `dims`: what all energy of src weighs in a mean over x's."""
    return math.sqrt(ed.numel(src.shape, dims) / max(ed.numel(x.shape, dims), 1))


@normed_op(torch.scatter).register_norm(allow_plain_tensors="constant", lift_dims=_SRC)
def scatter(input: RMSTensor, dim: int, index: torch.Tensor, src: RMSTensor, *, reduce: str | None = None) -> RMSTensor:
    """out[index[i, e], e] = src[i, e], x where nothing is written; m positions i, K of x, N entries e that the norm runs over.

    Value:       sqrt(n^2 + c^2 s^2) with c^2 = m / K where the norm runs over `dim` (m of src, times its share of the other
                 dimensions), else c^2 = min(m, N); from the largest entries max(n, s)
    Sensitivity: 1 to x, c to src
    """
    if reduce is not None:
        raise NormMismatchError(f"scatter with reduce={reduce!r} has no norm rule: use scatter_add, or multiply")
    if input.ndim == 0:
        return _beside(input, src, (1.0, 1.0), (), False, "src")
    along = negative(dim, input.ndim)
    dims, (c, c_src) = align(input.shape, input, src)
    others = tuple(d for d in dims if d != along)
    c_src *= _share(input, src, dims if along in dims else others)
    if along not in dims:
        c_src *= math.sqrt(max(min(index.shape[along], ed.numel(index.shape, others)), 1))
    return _beside(input, src, (c, c_src), dims, bool(dims), "src")


@normed_op(torch.scatter).register_norm(allow_plain_tensors="constant")
def scatter_value(input: RMSTensor, dim: int, index: torch.Tensor, value: float, *, reduce: str | None = None) -> RMSTensor:
    """x with v at the entries that a plain index names: value sqrt(n^2 + v^2), max(n, |v|) from the largest entry."""
    if reduce is not None:
        raise NormMismatchError(f"scatter with reduce={reduce!r} has no norm rule: use scatter_add, or multiply")
    return _filled(input, math.fabs(value), bool(input.elem_dims))


@normed_op(torch.scatter_add).register_norm(allow_plain_tensors="constant", lift_dims=_SRC)
def scatter_add(input: RMSTensor, dim: int, index: torch.Tensor, src: RMSTensor) -> RMSTensor:
    """out[index[i, e], e] += src[i, e] for m positions i (K of x).

    Value:       n + c s with c = sqrt(m m' / K) where the norm runs over `dim` (m' positions of src), else c = m
                 (attained: all onto one position), times the share of src in the other dimensions of the norm
    Sensitivity: 1 to x, c to src
    Source:      Cauchy-Schwarz, as for `index_add`
    Typical:     as for `index_add`, m / K being the entries of the index for each of x
    """
    share = index.numel() / max(input.numel(), 1)
    if input.ndim == 0:
        return _added(input, src, (1.0, 1.0), (), "src", 1.0, share)
    along = negative(dim, input.ndim)
    dims, (c, c_src) = align(input.shape, input, src)
    m = index.shape[along]
    c_src *= _share(input, src, dims) * (math.sqrt(m) if along in dims else m)
    return _added(input, src, (c, c_src), dims, "src", 1.0, share)


# -- by masks -----------------------------------------------------------------------------------------------------------------


@normed_op(torch.masked_scatter).register_norm(allow_plain_tensors="constant")
def masked_scatter(input: LinfTensor, mask: torch.Tensor, source: LinfTensor) -> LinfTensor:
    """x with the entries of `source`, in order, where a plain mask is set; both by their largest entry (RMS converted to it).

    Value:       max(n, s)   (attained)
    Sensitivity: 1 to both   (attained: each entry is one of x or of the source)
    """
    return LinfTensor(maximum([input.norm_size, source.norm_size]), sensitivity={"input": 1, "source": 1})


@normed_op(torch.ops.aten._unsafe_masked_index.default).register_norm(allow_plain_tensors="constant")
def unsafe_masked_index(input: LinfTensor, mask: torch.Tensor, indices: list[torch.Tensor], fill: float) -> LinfTensor:
    """x[indices] where a plain mask is set, v elsewhere; by the largest entry.

    Value:       max(n, |v|)   (attained)
    Sensitivity: 1             (attained)
    """
    return LinfTensor(maximum([input.norm_size, scalar(math.fabs(fill), input.norm_size)]), sensitivity={"input": 1})


refuse(
    normed_op(torch.ops.aten._unsafe_masked_index_put_accumulate.default),
    "how often an entry is added to depends on data: use index_put or scatter_add, which bound it",
)
