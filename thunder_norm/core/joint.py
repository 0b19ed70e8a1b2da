"""What a few operations in a row make of an ellipsoid, with all that they compute kept together.

Vectors in an ellipsoid pass linear maps and *bends*: functions of each entry whose slopes are between two numbers, ``y = D x`` with
a diagonal D, of which nothing else is known and which is the same in no two entries.  In terms of the middle m and half the width h of
the slopes ``y = m x + h e`` with ``|e_i| <= |x_i|``.  So for every diagonal T > 0

    sum_i T_i (x_i^2 - e_i^2) >= 0,

and with ``x = C z``, z in the ellipsoid of P, ``(z, e)`` is in that of the block diagonal of

    X = (P^-1 - C^T T C)^-1 = P + P C^T T^1/2 (I - H)^-1 T^1/2 C P    and    T^-1,        H = T^1/2 C P C^T T^1/2 < I.

Everything made of z and e is a linear map of both, so that what belongs together (a residual and its branch) is added as it is.  Any T
with H < I is sound; which is best depends on what the vectors are wanted for, and `smallest` looks for it.

Source: Xu and Sivaranjani, "ECLipsE: Efficient Compositional Lipschitz Constant Estimation for Deep Neural Networks", NeurIPS 2024
(without C's pairs: ``(L - L P L / 4)^-1`` with ``L = 4 T``, m = h = 1/2; ECLipsE-Fast takes ``T = I / (2 lambda_max(P))``); Fazlyab et al.,
"Efficient and Accurate Estimation of Lipschitz Constants for Deep Neural Networks", NeurIPS 2019, for the inequality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from thunder_norm.core import columns as columns_of
from thunder_norm.core.columns import Columns
from thunder_norm.core.ellipsoids import EPSILON, Ellipsoid, LinearMap, above

# H stays below it, so that I - H can be inverted.
_TOP = 1 - 1e-4
# Of the magnitudes of the terms of x: T_i is at most 1 / that, and what rounding does to x counts no more.
_GUARD = 1e-6
# Steps of the search for T, how far one goes, and the power of the eigenvalues whose sum it makes small: near the largest, and smooth.
_STEPS, _RATE, _POWER = 4, 0.15, 4


@dataclass(frozen=True, eq=False)
class Sum:
    """A vector that is the sum of linear maps of earlier ones, given by their numbers."""

    terms: tuple[tuple[int, LinearMap], ...]


@dataclass(frozen=True, eq=False)
class Bend:
    """A vector that is ``D x`` of an earlier one, by its number, with diagonal D between `low` and `high`, [n] each."""

    of: int
    low: torch.Tensor
    high: torch.Tensor

    @cached_property
    def scale(self) -> float:
        """The steepest slope, which may be too steep for its square to be a number."""
        steepest = max(self.low.detach().abs().max().item(), self.high.detach().abs().max().item())
        return max(steepest, 1e-300)

    @cached_property
    def middle(self) -> torch.Tensor:
        """Of the slopes divided by `scale`."""
        return self.low / self.scale / 2 + self.high / self.scale / 2

    @cached_property
    def half(self) -> torch.Tensor:
        """Half the width of the slopes divided by `scale`, rounded up."""
        return self.high / self.scale / 2 - self.low / self.scale / 2 + 4 * EPSILON


Step = Sum | Bend


def smallest(base: Ellipsoid, steps: Sequence[Step]) -> Ellipsoid:
    """An ellipsoid that holds the last vector of some steps, made as small as four steps of a search make it.

    It begins with the multipliers of ECLipsE-Fast, bend after bend, and makes ``tr Q^4`` smaller, Q the covariance of the last vector:
    each T_i goes some way to where the two terms of the gradient would balance.  Of the first and the best the one with the shorter
    longest vector is taken.  Differentiable in what the linear maps and `base` are made of, T held fixed.

    Args:
        base: holds vector number 0.
        steps: vectors number 1, 2 and so on.
    """
    if base.scale == 0:
        size = _size(steps[-1])
        return Ellipsoid(base.cov.new_zeros(size, size), 0.0)
    with torch.no_grad():
        begun = _begin(base, steps)
        found = [r for r in (_run(begun, steps, start) for start in _starts(steps)) if r is not None]
        if not found:  # no number is as large as what these steps make
            return Ellipsoid.ball(_size(steps[-1]), math.inf)
        first = min(found, key=_Run.value)
        best = min({id(r): r for r in (found[0], _searched(begun, steps, first) or first)}.values(), key=lambda r: r.length)
    if not any(t.requires_grad for t in (base.cov, *_tensors(steps))):
        return best.ellipsoid(base)
    again = _run(_begin(base, steps), steps, best.multipliers)
    assert again is not None, "they have fitted before"
    return again.ellipsoid(base)


def _size(step: Step) -> int:
    return len(step.low) if isinstance(step, Bend) else step.terms[0][1].size


def _tensors(steps: Sequence[Step]) -> list[torch.Tensor]:
    bends = [t for s in steps if isinstance(s, Bend) for t in (s.low, s.high)]
    return bends + [t for s in steps if isinstance(s, Sum) for _, c in s.terms for t in c.tensors]


@dataclass(frozen=True, eq=False)
class _Vector:
    """``scale * K z`` of the vector z of all that is kept, K by columns for the parts that there were."""

    columns: tuple[Columns, ...]
    magnitudes: torch.Tensor
    scale: float
    growth: float  # of the state, when the magnitudes were taken

    @property
    def size(self) -> int:
        """How many entries it has."""
        return len(self.magnitudes)


@dataclass(frozen=True, eq=False)
class _Bent:
    """What one bend did: its multipliers, its x, and X from then on."""

    multipliers: torch.Tensor
    x: _Vector
    after: torch.Tensor


@dataclass(eq=False)
class _Run:
    """One pass over the steps: the covariance of what is kept, and the last vector's.

    Attributes:
        cov: of all parts but the last bend's e.
        sizes: of the parts; the first is z's.
        variances: of the entries of the last bend's e, ``1 / T``; None before the first bend.
    """

    cov: torch.Tensor
    sizes: list[int]
    variances: torch.Tensor | None = None
    growth: float = 1.0  # of standard deviations, at most, since the beginning
    bent: list[_Bent] = field(default_factory=list)
    last: _Vector | None = None
    result: torch.Tensor | None = None

    @property
    def multipliers(self) -> list[torch.Tensor]:
        return [b.multipliers for b in self.bent]

    @property
    def length(self) -> float:
        """Of the longest vector that the last one may be."""
        assert self.result is not None and self.last is not None
        return self.last.scale * math.sqrt(max(torch.linalg.eigvalsh(self.result)[-1].item(), 0.0))

    def ellipsoid(self, base: Ellipsoid) -> Ellipsoid:
        assert self.result is not None and self.last is not None
        return Ellipsoid.of(self.result, base.scale * self.last.scale)

    @cached_property
    def powers(self) -> tuple[float, torch.Tensor, torch.Tensor]:
        """The largest diagonal entry of the result, the result divided by it, and that squared."""
        assert self.result is not None
        size = self.result.diagonal().max().item()
        q = self.result / size if size else self.result
        return size, q, q @ q

    def value(self) -> float:
        """``tr Q^4``, its logarithm."""
        assert self.last is not None
        size, _, square = self.powers
        if size == 0:
            return -math.inf
        return math.log(square.square().sum().item()) + _POWER * (math.log(size) + 2 * math.log(max(self.last.scale, 1e-300)))

    def covariance(self, v: _Vector) -> torch.Tensor:
        """Of a vector, above the exact one."""
        of_full, of_last = self._split(v)
        out = columns_of.conjugated(of_full, self.cov, self.sizes)
        if of_last is not None:
            assert self.variances is not None
            out = out + (
                torch.diag(of_last.square() * self.variances) if of_last.ndim == 1 else (of_last * self.variances) @ of_last.T
            )
        terms = sum(self.sizes[: len(v.columns)])
        return above((out + out.T) / 2, self._magnitudes(v), terms)

    def _split(self, v: _Vector) -> tuple[tuple[Columns, ...], Columns]:
        """A vector's columns for the parts in `cov`, and those for the last e."""
        full = len(self.sizes) - (self.variances is not None)
        return v.columns[:full], v.columns[full] if len(v.columns) > full else None

    def _magnitudes(self, v: _Vector) -> torch.Tensor:
        return v.magnitudes * (self.growth / v.growth)

    def add(self, vectors: Sequence[_Vector], step: Sum) -> _Vector:
        scale = max(vectors[i].scale * c.scale for i, c in step.terms)
        columns: list[Columns] = [None] * max(len(vectors[i].columns) for i, _ in step.terms)
        magnitudes = 0.0
        for i, c in step.terms:
            v, ratio = vectors[i], vectors[i].scale * c.scale / scale if scale else 0.0
            for j, k in enumerate(v.columns):
                columns[j] = columns_of.total(
                    columns[j], None if k is None else (c.times(k) if k.ndim == 2 else c.columns(k)) * ratio
                )
            magnitudes = magnitudes + c.magnitudes(self._magnitudes(v)) * ratio
        assert isinstance(magnitudes, torch.Tensor)
        return _Vector(tuple(columns), magnitudes, max(scale, 1e-300) if scale else 0.0, self.growth)

    def bent_of(self, x: _Vector) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a vector that is to be bent: its covariance, with what rounding may be, and that of it and what is kept."""
        q = self.covariance(x) + torch.diag(_GUARD * self._magnitudes(x).square())
        of_full, of_last = self._split(x)
        with_kept = columns_of.times(of_full, self.cov, self.sizes)
        if self.variances is not None:
            with_last = torch.zeros(x.size, len(self.variances), dtype=q.dtype) if of_last is None else of_last * self.variances
            with_kept = torch.cat([with_kept, torch.diag(with_last) if with_last.ndim == 1 else with_last], 1)
        return q, with_kept

    def bend(
        self, x: _Vector, step: Bend, given: torch.Tensor | _Start, known: tuple[torch.Tensor, torch.Tensor] | None
    ) -> _Vector | None:
        q, with_kept = known or self.bent_of(x)
        t = _first_multipliers(q.detach(), step, given) if isinstance(given, _Start) else given
        root = t.sqrt()
        h = root[:, None] * q * root
        gap = _gap(h.detach())
        if gap is None:
            return None
        factor, _ = torch.linalg.cholesky_ex(torch.eye(len(h), dtype=h.dtype) - h)
        y = torch.linalg.solve_triangular(factor, root[:, None] * with_kept, upper=False)
        kept = self.cov if self.variances is None else torch.block_diag(self.cov, torch.diag(self.variances))
        grown = kept + y.T @ y
        m = len(grown)
        # rounding: of with_kept at most sqrt(m / _GUARD) eps of its size, m^2 of which add up, over the gap
        margin = 8 * EPSILON * m**2.5 / math.sqrt(_GUARD) / gap
        before = kept.diagonal().detach()
        grown = (grown + grown.T) / 2 + torch.diag(margin * grown.detach().diagonal())
        self.growth *= math.sqrt((grown.diagonal().detach() / before.clamp(min=1e-290)).max().item()) if before.any() else 1.0
        self.bent.append(_Bent(t, x, grown))
        self.cov, self.variances = grown, 1 / t
        bent = [None if k is None else step.middle * k if k.ndim == 1 else step.middle[:, None] * k for k in x.columns]
        none: list[Columns] = [None] * (len(self.sizes) - len(bent))
        self.sizes.append(len(t))
        sizes = step.middle.detach().abs() * self._magnitudes(x) + step.half.detach() / root.detach()
        return _Vector((*bent, *none, step.half), sizes, max(x.scale * step.scale, 1e-300) if x.scale else 0.0, self.growth)


def _gap(h: torch.Tensor) -> float | None:
    """A number that 1 is above the largest eigenvalue of a symmetric matrix by, one of a few; None if it is not below `_TOP`."""
    eye = torch.eye(len(h), dtype=h.dtype)
    for gap in (0.25, 0.02, 0.002, 1 - _TOP):
        if not torch.linalg.cholesky_ex((1 - gap) * eye - h)[1].item():
            return gap
    return None


@dataclass(frozen=True, eq=False)
class _Begun:
    """What the steps before the first bend make, the same whatever the multipliers: the vectors, and `_Run.bent_of` the one that it bends."""

    base: Ellipsoid
    vectors: tuple[_Vector, ...]
    first: tuple[torch.Tensor, torch.Tensor] | None


def _begin(base: Ellipsoid, steps: Sequence[Step]) -> _Begun:
    run = _Run(base.cov, [len(base.cov)])
    vectors = [_Vector((torch.ones(len(base.cov), dtype=base.cov.dtype),), base.cov.detach().diagonal().sqrt(), 1.0, 1.0)]
    for step in steps:
        if isinstance(step, Bend):
            return _Begun(base, tuple(vectors), run.bent_of(vectors[step.of]))
        vectors.append(run.add(vectors, step))
    return _Begun(base, tuple(vectors), None)


def _run(begun: _Begun, steps: Sequence[Step], multipliers: Sequence[torch.Tensor] | _Start) -> _Run | None:
    """All steps with these multipliers, or with first ones; None where some H is not below 1."""
    run, vectors = _Run(begun.base.cov, [len(begun.base.cov)]), list(begun.vectors)
    for step in steps[len(vectors) - 1 :]:
        if isinstance(step, Sum):
            made: _Vector | None = run.add(vectors, step)
        else:
            given = multipliers if isinstance(multipliers, _Start) else multipliers[len(run.bent)]
            made = run.bend(vectors[step.of], step, given, None if run.bent else begun.first)
        if made is None or not math.isfinite(made.scale):
            return None
        vectors.append(made)
    run.last = vectors[-1]
    run.result = run.covariance(run.last)
    return run


class _Start(NamedTuple):
    """How the first multipliers are chosen: H at most `most`, for entries as they are or scaled to equal sizes."""

    most: float
    is_scaled: bool


def _starts(steps: Sequence[Step]) -> list[_Start]:
    """As the bends alone want it; and where that leaves nothing of z, which other vectors may be made of, half of it as well."""
    top = _TOP * (1 - 1e-9)
    is_steep = any((s.half > 1.01 * s.middle.abs()).any() for s in steps if isinstance(s, Bend))
    has_bends = any(isinstance(s, Bend) for s in steps)
    return [_Start(top, False), *[_Start(top, True)] * has_bends, *[_Start(0.5, False)] * is_steep]


def _first_multipliers(q: torch.Tensor, step: Bend, start: _Start) -> torch.Tensor:
    """``T = tau / lambda_max(q)``: with ``tau = h / (|m| + h)`` the longest vector becomes as long as the steepest slope says.

    Of entries with one slope tau is next to nothing, and q is that of the others.
    """
    middle, half = step.middle.abs(), step.half
    tau = torch.where(half > 0, half / (middle + half).clamp(min=1e-300), 1.0).clamp(min=1e-6, max=start.most)
    sizes = q.diagonal().clamp(min=q.diagonal().max() * 1e-24).clamp(min=1e-250)
    weights = sizes if start.is_scaled else torch.full_like(sizes, sizes.max().item())
    root = (tau / (tau.max() * weights)).sqrt()
    largest = torch.linalg.eigvalsh(root[:, None] * q * root)[-1].clamp(min=1e-12)
    return tau / (weights * largest * (1 + 1e-10))


def _searched(begun: _Begun, steps: Sequence[Step], first: _Run) -> _Run | None:
    """The best of the multipliers that the search comes by; None if it finds none better or there are none."""
    if not first.bent or first.result is None or not first.result.any():
        return None
    best, value, rate = first, first.value(), _RATE
    directions = _directions(best)
    for left in reversed(range(_STEPS)):
        tried = [t * (rate * d).exp() for t, d in zip(best.multipliers, directions, strict=True)]
        run = _run(begun, steps, tried)
        if run is None or (found := run.value()) >= value:
            rate /= 3
        else:
            best, value, directions = run, found, _directions(run) if left else []
    return None if best is first else best


def _directions(run: _Run) -> list[torch.Tensor]:
    """For the logarithm of each bend's multipliers: the logarithm of the ratio of the two terms of the gradient.

    ``d tr(A P) / d log T_i = T_i (C X A X C^T)_ii - A_ee / T_i`` with A the weight of what is kept; before the bend it is that of z, times
    ``I + X C^T T C`` from both sides.
    """
    assert run.last is not None
    _, q, square = run.powers
    cube, columns = square @ q, run.last.columns
    *full, last = run.sizes
    own = torch.zeros(last, dtype=q.dtype)
    if len(columns) > len(full) and (k := columns[len(full)]) is not None:
        own = k.square() * cube.diagonal() if k.ndim == 1 else ((cube @ k) * k).sum(0)
    a = columns_of.weights(columns[: len(full)], cube, full)
    found = []
    for i, bent in reversed(list(enumerate(run.bent))):
        t, sizes = bent.multipliers, run.sizes[: i + 1]
        y = columns_of.times(bent.x.columns, bent.after, sizes)
        shrinking, growing = own / t, ((y @ a) * y).sum(1) * t
        tiny = 1e-30 * (shrinking.max() + growing.max()) + 1e-300
        found.append(((shrinking + tiny) / (growing + tiny)).log().clamp(-8, 8))
        if i:
            e = torch.eye(sum(sizes), dtype=q.dtype)
            x = columns_of.dense(bent.x.columns, sizes)
            e[:, : x.shape[1]] += y.T @ (t[:, None] * x)
            a = e.T @ a @ e
            own, a = a.diagonal()[-sizes[-1] :], a[: -sizes[-1], : -sizes[-1]]
    return found[::-1]
