"""Norm rules for reductions: mean, sum, extrema, variance, vector norms, products.

D is the set of reduced dimensions, E that of elem_dims; the output's norm runs over E - D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._gaussian import expected_maximum
from thunder_norm.rules._shared import as_kind, dims_tuple, like, negative, rms, root, scaled, spread
from thunder_norm.scalars import times

Dim = int | Sequence[int] | None


def _left(x: NormedTensor, reduced: ed.Dims, keepdim: bool) -> ed.Dims:
    """elem_dims of the output."""
    return ed.reduce(x.elem_dims, reduced, x.ndim, keepdim)


def reduction(x: RMSTensor, dim: Dim, keepdim: bool, c: float) -> RMSTensor:
    """The result of a reduction that is linear, or a seminorm, at factor c."""
    dims = _left(x, dims_tuple(dim, x.ndim), keepdim)
    return rms(times(x.norm_size, c), dims, sensitivity={"input": c})


# -- averages -----------------------------------------------------------------------------------------------------------------


@normed_op(torch.mean).register_norm
@normed_op(torch.nanmean).register_norm
def mean(input: RMSTensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> RMSTensor:
    """Mean over D.

    Value:       n      (attained: constants)
    Sensitivity: 1
    Source:      Jensen over D and E, convexity over the rest of D
    """
    return reduction(input, dim, keepdim, 1.0)


@normed_op(torch.sum).register_norm
@normed_op(torch.nansum).register_norm
def sum(input: RMSTensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> RMSTensor:
    """Sum over D.  Value |D| n, attained by constants; sensitivity |D|."""
    return reduction(input, dim, keepdim, ed.numel(input.shape, dims_tuple(dim, input.ndim)))


@normed_op(torch.sum).register_norm
@normed_op(torch.nansum).register_norm
def sum_l1(input: L1Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> NormedTensor:
    """Sum over D in the L1 norm: value |D - E| n, the entries of E are in the norm already; the same sensitivity."""
    reduced = dims_tuple(dim, input.ndim)
    return _reduced_l1(input, reduced, keepdim, ed.numel(input.shape, [d for d in reduced if d not in input.elem_dims]))


@normed_op(torch.mean).register_norm
@normed_op(torch.nanmean).register_norm
def mean_l1(input: L1Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> NormedTensor:
    """Mean over D in the L1 norm: value n / |D and E|; the same sensitivity."""
    reduced = dims_tuple(dim, input.ndim)
    return _reduced_l1(input, reduced, keepdim, 1 / max(ed.numel(input.shape, [d for d in reduced if d in input.elem_dims]), 1))


def _reduced_l1(x: L1Tensor, reduced: ed.Dims, keepdim: bool, c: float) -> NormedTensor:
    dims = _left(x, reduced, keepdim)
    return like(x, times(x.norm_size, c), dims, sensitivity={"input": c}) if dims else _largest(x, c)


def _largest(x: NormedTensor, c: float) -> LinfTensor:
    return LinfTensor(times(x.norm_size, c), elem_dims=(), sensitivity={"input": c})


@normed_op(torch.cumsum).register_norm
def cumsum(input: RMSTensor, dim: int, dtype: torch.dtype | None = None) -> RMSTensor:
    """Running sum along a dimension of T.

    Value:       T n where the norm does not run over it (attained: constants); else n / (2 sin(pi / (4 T + 2))), the spectral
                 norm of the triangle of ones (attained: its singular vector)
    Sensitivity: the same factor
    """
    along = negative(dim, input.ndim) if input.ndim else 0
    length = input.shape[along] if input.ndim else 1
    if along in input.elem_dims:
        return scaled(input, 1 / (2 * math.sin(math.pi / (4 * length + 2))))
    return scaled(input, length)


@normed_op(torch.cumsum).register_norm
def cumsum_l1(input: L1Tensor, dim: int, dtype: torch.dtype | None = None) -> NormedTensor:
    """The same of an l1 norm, that of a softmax: no running sum along it is larger.

    Value:       n for the largest entry, where the norm runs over the dimension of T; else T n    (attained: one sign)
    Sensitivity: the same factor
    """
    along = negative(dim, input.ndim) if input.ndim else 0
    if along in input.elem_dims or not input.ndim:
        return _largest(input, 1.0)
    return like(input, times(input.norm_size, input.shape[along]), sensitivity={"input": input.shape[along]})


# -- extrema ------------------------------------------------------------------------------------------------------------------


def _extremum_factor(x: RMSTensor, reduced: ed.Dims) -> float:
    """What it costs to pick one of the positions over D, for each element that is left a position of its own."""
    inside = ed.numel(x.shape, [d for d in reduced if d in x.elem_dims])
    outside = ed.numel(x.shape, [d for d in reduced if d not in x.elem_dims])
    elements = ed.numel(x.shape, [d for d in x.elem_dims if d not in reduced])
    return root(inside * min(outside, elements))


def picked(x: RMSTensor, dim: Dim, keepdim: bool) -> RMSTensor:
    """One entry over D, whichever."""
    return reduction(x, dim, keepdim, spread(_extremum_factor(x, dims_tuple(dim, x.ndim))))


def _extremum(x: RMSTensor, dim: Dim, keepdim: bool) -> RMSTensor:
    if current_mode() != "typical":
        return picked(x, dim, keepdim)
    reduced = dims_tuple(dim, x.ndim)
    c = expected_maximum(ed.numel(x.shape, reduced))
    return rms(times(x.norm_size, c), _left(x, reduced, keepdim), sensitivity={"input": 1})


@normed_op(torch.amax).register_norm
@normed_op(torch.amin).register_norm
def amax(input: RMSTensor, dim: Dim = None, keepdim: bool = False) -> RMSTensor:
    """Largest (smallest) entry over D.

    Value:       n from the largest entry; sqrt(|D|) n if D is in E; sqrt(min(|D|, |E|)) n if they share nothing: then each
                 element of E picks a position of its own (attained: the identity matrix)
    Sensitivity: the same factor
    Typical:     sqrt(E max^2) of |D| independent Gaussians, and 1
    """
    return _extremum(input, dim, keepdim)


@normed_op(torch.max).register_norm
@normed_op(torch.min).register_norm
def max_along(input: RMSTensor, dim: int, keepdim: bool = False) -> tuple:
    """Largest (smallest) entry along a dimension, as `amax`, and its index, which has no norm."""
    return _extremum(input, dim, keepdim), None


@normed_op(torch.max).register_norm
@normed_op(torch.min).register_norm
def max_of_all(input: RMSTensor) -> RMSTensor:
    """Largest (smallest) of all entries, as `amax`."""
    return _extremum(input, None, False)


@normed_op(torch.aminmax).register_norm
def aminmax(input: RMSTensor, *, dim: int | None = None, keepdim: bool = False) -> tuple:
    """Smallest and largest entry, each as `amax`.

    Gap:         none but the search's, which has no derivative of torch's to climb by; amax and amin are attained
    """
    return _extremum(input, dim, keepdim), _extremum(input, dim, keepdim)


@normed_op(torch.argmax).register_norm
@normed_op(torch.argmin).register_norm
@normed_op(torch.argsort).register_norm
@normed_op(torch.any).register_norm
@normed_op(torch.all).register_norm
@normed_op(torch.count_nonzero).register_norm
def index_of(input: NormedTensor, *args: Any, **kwargs: Any) -> None:
    """The plain tensor of indices, counts or bools: it has no norm."""


@normed_op(torch.searchsorted).register_norm(allow_plain_tensors="constant")
def searchsorted(
    sorted_sequence: NormedTensor | torch.Tensor, input: NormedTensor | torch.Tensor | int | float, **options: Any
) -> None:
    """The plain tensor of indices: it has no norm."""


@normed_op(torch.bucketize).register_norm(allow_plain_tensors="constant")
def bucketize(input: NormedTensor | torch.Tensor, boundaries: NormedTensor | torch.Tensor, **options: Any) -> None:
    """The plain tensor of indices: it has no norm."""


# -- variance -------------------------------------------------------------------------------------------------------------------


def _count(x: RMSTensor, reduced: ed.Dims, correction: float) -> int:
    """The number of elements whose variance is taken.

    Raises:
        NormMismatchError: the correction leaves none.
    """
    count = ed.numel(x.shape, reduced)
    if count <= correction:
        raise NormMismatchError(
            f"a variance of {count} element{'s' * (count != 1)} with correction {correction:g} (unbiased: 1) divides by zero, or by a "
            "negative number: use a smaller correction (unbiased=False), or more elements"
        )
    return count


def _variance(x: RMSTensor, dim: Dim, correction: float, keepdim: bool) -> RMSTensor:
    reduced = dims_tuple(dim, x.ndim)
    count = _count(x, reduced, correction)
    # RMS over D too is at most RMS over E; then only elements outside of D can take a spike each
    left = [d for d in x.elem_dims if d not in reduced]
    c = count / (count - correction)
    c *= spread(root(ed.numel(x.shape, left)))
    dims = _left(x, reduced, keepdim)
    return rms(times(x.norm_size.square(), c), dims, sensitivity={"input": x.norm_size * (2 * c)})


def _deviation(x: RMSTensor, dim: Dim, correction: float, keepdim: bool) -> RMSTensor:
    count = _count(x, dims_tuple(dim, x.ndim), correction)
    return reduction(x, dim, keepdim, math.sqrt(count / (count - correction)))


def _register_variance(ops: tuple[Callable, ...], compute: Callable, doc: str, is_pair: bool = False) -> None:
    """torch has three signatures: of a dimension and unbiased, of a dimension and correction, of unbiased alone."""

    def result(x: RMSTensor, dim: Dim, correction: float, keepdim: bool) -> Any:
        out = compute(x, dim, correction, keepdim)
        return (out, reduction(x, dim, keepdim, 1.0)) if is_pair else out

    def by_correction(input: RMSTensor, dim: Dim = None, *, correction: float | None = 1, keepdim: bool = False) -> Any:
        return result(input, dim, 1 if correction is None else correction, keepdim)

    def by_unbiased(input: RMSTensor, dim: Dim, unbiased: bool = True, keepdim: bool = False) -> Any:
        if isinstance(dim, bool):  # var(x, unbiased)
            return result(input, None, float(dim), False)
        return result(input, dim, float(unbiased), keepdim)

    def of_all(input: RMSTensor, unbiased: bool = True) -> Any:
        return result(input, None, float(unbiased), False)

    # in this order: by_correction would take the flag of var(x, unbiased) for a dimension
    for fn in (by_unbiased, of_all, by_correction):
        fn.__doc__ = doc
        fn.__name__ = fn.__qualname__ = ops[0].__name__
        for op in ops:
            normed_op(op).register_norm(fn)


_register_variance(
    (torch.var,),
    _variance,
    """Variance over D, with N / (N - correction).

    Value:       n^2 N / (N - correction) once the norm runs over D; sqrt(|E - D|) times that if it runs over more
    Sensitivity: 2 n N / (N - correction), likewise
    Source:      |2 (x - mu) u| <= 2 |x| |u|
    Raises NormMismatchError where the correction leaves nothing to divide by (one element, unbiased).
    """,
)
_register_variance(
    (torch.std,),
    _deviation,
    """Standard deviation over D.  Value n sqrt(N / (N - correction)), sensitivity sqrt(N / (N - correction)): a seminorm.

    Raises as `var`.
    """,
)
_register_variance((torch.var_mean,), _variance, "`var` and `mean`.", is_pair=True)
_register_variance((torch.std_mean,), _deviation, "`std` and `mean`.", is_pair=True)


# -- norms and products ---------------------------------------------------------------------------------------------------


def vector_norm(x: RMSTensor, p: float, dim: Dim, keepdim: bool) -> RMSTensor:
    """As `linalg_vector_norm` says."""
    reduced = dims_tuple(dim, x.ndim)
    if math.isinf(p) and p > 0:
        return _extremum(x, dim, keepdim)
    if p < 1:
        raise NormMismatchError(f"the {p}-norm is not a norm and has no Lipschitz constant")
    count = ed.numel(x.shape, reduced)
    if p == 2 and current_mode() == "typical":
        return rms(times(x.norm_size, root(count)), _left(x, reduced, keepdim), sensitivity={"input": 1})
    # a mean of order p <= 2 is at most the RMS; a p-norm of order >= 2 at most the Euclidean norm
    return reduction(x, dim, keepdim, root(count) if p >= 2 else float(count) ** (1 / p))


@normed_op(torch.linalg.vector_norm).register_norm
def linalg_vector_norm(
    input: RMSTensor, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> RMSTensor:
    """p-norm over D.

    Value:       sqrt(|D|) n for p >= 2, |D|^(1/p) n for 1 <= p <= 2, the largest entry for p = inf   (attained)
    Sensitivity: the same factor: a norm is Lipschitz in itself
    Typical:     sensitivity 1 for p = 2: one direction of |D| counts
    """
    return vector_norm(input, ord, dim, keepdim)


@normed_op(torch.prod).register_norm
def prod(input: RMSTensor, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> LinfTensor:
    """Product of the K entries over D.

    Value:       n^K if E is in D, or n is the largest entry; else through the largest over E - D    (attained: constants)
    Sensitivity: K n^(K-1)
    Source:      Maclaurin: the mean product of K - 1 of the squares is at most their mean to that power
    """
    reduced = dims_tuple(dim, input.ndim)
    x, c = as_kind(input, RMSTensor, tuple(d for d in input.elem_dims if d in reduced))
    count = ed.numel(input.shape, reduced)
    return LinfTensor(
        x.norm_size.pow(count), elem_dims=(), sensitivity={"input": x.norm_size.pow(max(count - 1, 0)) * (count * c)}
    )
