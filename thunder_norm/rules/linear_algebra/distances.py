"""Norm rules for distances and angles between vectors, covariances, and for vectors cut to a length.

A distance is a norm of a difference: Lipschitz in both, and at most the sum of both norms.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.nonfinite import spoiled
from thunder_norm.core.programs import computed_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._lengths import inverse_length, least_length
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import (
    Constant,
    as_kind,
    broadcast,
    like,
    negative,
    refuse,
    refuse_perturbation,
    root_sum_squares,
    scalar,
    spread,
)
from thunder_norm.scalars import times


def _length(count: int, p: float) -> float:
    """Largest p-norm of a vector of `count` entries of RMS 1.

    Raises:
        NormMismatchError: p < 1, which is not a norm.
    """
    if p < 1:
        raise NormMismatchError(f"the {p}-norm of a difference is not a norm and has no Lipschitz constant")
    return math.sqrt(count) if p >= 2 else float(count) ** (1 / p)


def _entries(value: torch.Tensor, **sensitivity: Constant) -> LinfTensor:
    return LinfTensor(value, elem_dims=(), sensitivity=sensitivity)


def _apart(a: NormedTensor, b: NormedTensor, dims: tuple[ed.Dims, ed.Dims], count: int, p: float, names: tuple) -> LinfTensor:
    """The p-norm of the difference of vectors of `count` entries that are over `dims` of a and of b."""
    kind = LinfTensor if math.isinf(p) and p > 0 else RMSTensor
    (x, c), (y, c_other) = (as_kind(t, kind, () if kind is LinfTensor else d) for t, d in zip((a, b), dims, strict=True))
    length = 1.0 if kind is LinfTensor else _length(count, p)
    if p == 2 and current_mode() == "typical":
        value = times(root_sum_squares(x.norm_size, y.norm_size), length)
        return _entries(value, **{names[0]: c, names[1]: c_other})
    return _entries(times(x.norm_size + y.norm_size, length), **{names[0]: c * length, names[1]: c_other * length})


@normed_op(torch.dist).register_norm
def dist(input: RMSTensor, other: RMSTensor, p: float = 2) -> LinfTensor:
    """p-norm of all N entries of a - b.

    Value:       sqrt(N) (n + m) for p >= 2, N^(1/p) (n + m) for 1 <= p <= 2, the largest entries' n + m for p = inf
                 (attained: constants of opposite sign; 2 < p < inf by one entry of each that holds all the energy)
    Sensitivity: the same factor to both
    Typical:     sqrt(N) sqrt(n^2 + m^2) and 1 for p = 2: what is independent is at right angles, and one direction of N counts
    Raises NormMismatchError for p < 1.
    """
    everything = tuple(range(-input.ndim, 0)), tuple(range(-other.ndim, 0))
    return _apart(input, other, everything, math.prod(broadcast(input.shape, other.shape)), p, ("input", "other"))


@normed_op(torch.cdist).register_norm
@normed_op(torch.ops.aten._cdist_forward.default).register_norm
def cdist(x1: RMSTensor, x2: RMSTensor, p: float = 2.0, compute_mode: Any = None) -> LinfTensor:
    """p-norms of the differences of all rows of x1 and x2, of M entries each: `dist`, RMS over rows (converted to that)."""
    return _apart(x1, x2, ((-1,), (-1,)), x1.shape[-1], p, ("x1", "x2"))


@normed_op(torch.ops.aten._euclidean_dist.default).register_norm
def euclidean_dist(x1: RMSTensor, x2: RMSTensor) -> LinfTensor:
    """`cdist` for p = 2."""
    return cdist(x1, x2)


@normed_op(F.pdist).register_norm
@normed_op(torch.ops.aten._pdist_forward.default).register_norm
def pdist(input: RMSTensor, p: float = 2.0) -> LinfTensor:
    """p-norms of the differences of all pairs of rows, of M entries each.

    Value:       2 sqrt(M) n for p >= 2, 2 M^(1/p) n for 1 <= p <= 2 (attained: opposite rows); 2 n for p = inf; from RMS over R
                 rows as well, sqrt(2 R M) n for p >= 2: |x - y| <= sqrt 2 |(x, y)|
    Sensitivity: the same factor
    """
    rows, columns = input.shape
    if p >= 2 and not math.isinf(p) and set(ed.nontrivial(input.shape, (-2, -1))) <= set(input.elem_dims) and rows > 1:
        c = math.sqrt(2) * spread(math.sqrt(rows)) * math.sqrt(columns)
        return _entries(times(input.norm_size, c), input=c)
    kind = LinfTensor if math.isinf(p) and p > 0 else RMSTensor
    x, c = as_kind(input, kind, () if kind is LinfTensor else (-1,))
    length = 2.0 if kind is LinfTensor else 2 * _length(columns, p)
    return _entries(times(x.norm_size, length), input=c * length)


def _along(t: torch.Tensor, arguments: dict[str, Any]) -> ed.Dims:
    ndim = max(arguments["x1"].ndim, arguments["x2"].ndim)
    along = negative(arguments["dim"], ndim) if ndim else 0
    return (along,) if -t.ndim <= along < 0 else ()


@normed_op(torch.cosine_similarity).register_norm(lift_dims={"x1": _along, "x2": _along})
def cosine_similarity(x1: RMSTensor, x2: RMSTensor, dim: int = 1, eps: float = 1e-8) -> LinfTensor:
    """<x, y> / (max(|x|, eps) max(|y|, eps)) over `dim` of K, Euclidean norms.

    Value:       v w with v = min(1, sqrt(K) n / eps), w = min(1, sqrt(K) m / eps)     (attained: parallel vectors)
    Sensitivity: sqrt(K) / eps w, v sqrt(K) / eps        (attained next to 0: nothing bounds a norm from below);  for the least length l
                 that is not 0 (`least_length`) in place of a smaller eps
    Local:       the shortest vector in place of eps
    Modes:       "typical" and "modula" have the slopes of `inverse_length`
    Raises NormMismatchError for eps < 0.
    """
    if eps < 0:
        raise NormMismatchError(f"a cosine with eps = {eps} < 0 may divide by zero: use eps > 0")
    ndim = max(x1.ndim, x2.ndim)
    along = negative(dim, ndim) if ndim else 0
    parts, constants = [], []
    count = broadcast(x1.shape, x2.shape)[along] if ndim else 1
    for x in (x1, x2):
        dims = (along,) if -x.ndim <= along < 0 else ()
        y, c = as_kind(x, RMSTensor, dims)
        one = scalar(1.0, y.norm_size)
        longest = torch.minimum(y.norm_size * (math.sqrt(count) / eps), one) if eps else (y.norm_size > 0) * one
        parts.append(spoiled(longest, y.norm_size))
        root = math.sqrt(count)
        if is_local(x):
            shortest = data(x).square().sum(dims).sqrt() if dims else data(x).abs() * root
            constants.append(c * root / shortest.amin().to(one.dtype).clamp(min=max(eps, least_length(x, dims) * root)))
        else:
            constants.append(c * root * inverse_length(y.norm_size * root, least_length(x, dims) * root, count, eps))
    v, w = parts
    return _entries(v * w, x1=w * constants[0], x2=v * constants[1])


# -- covariances --------------------------------------------------------------------------------------------------------------


@normed_op(torch.cov).register_norm(allow_plain_tensors="constant")
def cov(
    input: RMSTensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: torch.Tensor | None = None
) -> LinfTensor:
    """Covariances of variables, the rows, over N observations: sum_k w_k (x_ik - mu_i) (x_jk - mu_j) / (sum w - correction).

    Value:       n^2 N / (N - correction) from RMS over rows (attained: a centred row with itself); weighted, by the largest weight
                 (then not attained: the weights have to be known, the observation with the largest does not)
    Sensitivity: 2 n N / (N - correction), likewise
    Source:      centring is a projection; Cauchy-Schwarz
    """
    x, c = as_kind(input, RMSTensor, (-1,) if input.ndim else ())
    count = input.shape[-1] if input.ndim else 1
    weights = [w.double() for w in (fweights, aweights) if w is not None]
    if not weights:
        if count <= correction:
            raise NormMismatchError(f"a covariance of {count} observations with correction {correction} divides by zero")
        gain: Constant = count / (count - correction)
    else:
        w = math.prod(weights[1:], start=weights[0])
        lost = correction * ((w * aweights.double()).sum() / w.sum() if aweights is not None else 1)
        gain = w.amax() * count / (w.sum() - lost)
    return _entries(x.norm_size.square() * gain, input=x.norm_size * gain * (2 * c))


@computed_as(torch.cov)
def covariance(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: torch.Tensor | None = None
) -> torch.Tensor:
    """As `torch.cov`, which asks whether the number that it divides by is positive."""
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    weights = [w for w in (fweights, aweights) if w is not None]
    w = functools.reduce(torch.mul, weights) if weights else torch.ones_like(rows[0].real)
    total = w.sum()
    lost = correction if aweights is None else correction * (w * aweights).sum() / total
    centred = rows - (rows * w).sum(1, keepdim=True) / total
    return ((centred * w) @ centred.mH / (total - lost).clamp(min=0)).squeeze()


refuse(
    normed_op(torch.corrcoef),
    "a correlation divides by standard deviations, which may be 0, so it has no Lipschitz constant: use cov, or "
    "cosine_similarity of centred rows, which has an eps",
)


# -- cut to a length -----------------------------------------------------------------------------------------------------------


@normed_op(torch.renorm).register_norm
def renorm(input: RMSTensor, p: float, dim: int, maxnorm: float) -> RMSTensor:
    """Each slice along `dim`, of N entries, multiplied by what its p-norm exceeds `maxnorm` by.

    Value:       min(n, m / N^(1 / max(p, 2))), m = maxnorm, where the norm runs over slices (attained: constants, or for p < 2 a
                 spike up to a constant one); else min(n, m)
    Sensitivity: none: torch adds 1e-7 to the norm it divides by, so that a slice jumps as it becomes longer than maxnorm
    """
    refuse_perturbation(torch.renorm, input)
    along = negative(dim, input.ndim)
    slices = tuple(d for d in range(-input.ndim, 0) if d != along)
    inside = [d for d in slices if d in input.elem_dims]
    # the RMS of those entries of a slice that the norm runs over; a power mean of order p >= 2 is no smaller
    largest = maxnorm / float(max(ed.numel(input.shape, inside), 1)) ** (1 / max(p, 2))
    return like(input, spoiled(input.norm_size.clamp(max=largest), input.norm_size))


@normed_op(F.local_response_norm).register_norm
def local_response_norm(input: RMSTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> RMSTensor:
    """x / (k + alpha mean x^2)^beta, the mean over a window of `size` channels.

    Value:       n / k^beta                                                           (approached: alpha n^2 far below k)
    Sensitivity: (1 + 2 beta min(sqrt(size), alpha r^2 / k)) / k^beta, r the largest entry    (attained next to 0)
    Source:      with a = alpha / size, D = k + a S and S the sum of squares over the window, the slope's second term is
                 2 beta a x_c <x, u> / D^(beta + 1): a |x_c| |x| is at most D, and at most a sqrt(size) r^2; each channel is in
                 `size` windows
    Raises NormMismatchError unless k > 0 and alpha, beta >= 0.
    """
    if not k > 0 or alpha < 0 or beta < 0:
        raise NormMismatchError(f"local_response_norm needs k > 0 and alpha, beta >= 0 to be bounded, got {k}, {alpha}, {beta}")
    reach = input.norm_size * math.sqrt(input.numel_normed)
    second = (reach.square() * (alpha / k)).clamp(max=math.sqrt(size)) * (2 * beta)
    scale = float(k) ** -beta
    return like(input, times(input.norm_size, scale), sensitivity={"input": (1 + second) * scale})
