"""One pass over linear maps and bends: the covariance of all that is kept, and the vectors that are made of it (`joint` has the theorem)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from thunder_norm.core import columns as columns_of
from thunder_norm.core.columns import Columns
from thunder_norm.core.ellipsoids import EPSILON, Ellipsoid, LinearMap, above
from thunder_norm.core.one_bend import Start, first_multipliers, gap
from thunder_norm.core.slopes import Slopes

# Of the magnitudes of the terms of x: T_i is at most 1 / that, and what rounding does to x counts no more.
GUARD = 1e-6
# Of the eigenvalues whose sum is made small: near the largest, and smooth.
_POWER = 4


@dataclass(frozen=True, eq=False)
class Sum:
    """A vector that is the sum of linear maps of earlier ones, given by their numbers."""

    terms: tuple[tuple[int, LinearMap], ...]


@dataclass(frozen=True, eq=False)
class Bend:
    """A vector that is ``D x`` of an earlier one, by its number, with diagonal D between the slopes."""

    of: int
    slopes: Slopes


Step = Sum | Bend


@dataclass(frozen=True, eq=False)
class Vector:
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
class Bent:
    """What one bend did: its multipliers, its x, and X from then on."""

    multipliers: torch.Tensor
    x: Vector
    after: torch.Tensor


@dataclass(eq=False)
class Run:
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
    bent: list[Bent] = field(default_factory=list)
    last: Vector | None = None
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

    def covariance(self, v: Vector) -> torch.Tensor:
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

    def _split(self, v: Vector) -> tuple[tuple[Columns, ...], Columns]:
        """A vector's columns for the parts in `cov`, and those for the last e."""
        full = len(self.sizes) - (self.variances is not None)
        return v.columns[:full], v.columns[full] if len(v.columns) > full else None

    def _magnitudes(self, v: Vector) -> torch.Tensor:
        return columns_of.scaled(v.magnitudes, self.growth / v.growth)

    def add(self, vectors: Sequence[Vector], step: Sum) -> Vector:
        scale = max(vectors[i].scale * c.scale for i, c in step.terms)
        columns: list[Columns] = [None] * max(len(vectors[i].columns) for i, _ in step.terms)
        magnitudes = 0.0
        for i, c in step.terms:
            v, ratio = vectors[i], vectors[i].scale * c.scale / scale if scale else 0.0
            for j, k in enumerate(v.columns):
                mapped = None if k is None else columns_of.scaled(c.times(k) if k.ndim == 2 else c.columns(k), ratio)
                columns[j] = columns_of.total(columns[j], mapped)
            magnitudes = magnitudes + columns_of.scaled(c.magnitudes(self._magnitudes(v)), ratio)
        assert isinstance(magnitudes, torch.Tensor)
        return Vector(tuple(columns), magnitudes, max(scale, 1e-300) if scale else 0.0, self.growth)

    def to_bend(self, x: Vector) -> torch.Tensor:
        """The covariance of a vector that is to be bent, with what rounding may be."""
        q = self.covariance(x)
        q.diagonal().add_(GUARD * self._magnitudes(x).square())
        return q

    def with_kept(self, x: Vector) -> torch.Tensor:
        """The covariance of a vector and what is kept."""
        of_full, of_last = self._split(x)
        with_kept = columns_of.times(of_full, self.cov, self.sizes)
        if self.variances is not None:
            with_last = self.cov.new_zeros(x.size, len(self.variances)) if of_last is None else of_last * self.variances
            with_kept = torch.cat([with_kept, torch.diag(with_last) if with_last.ndim == 1 else with_last], 1)
        return with_kept

    def bend(
        self, x: Vector, step: Bend, given: torch.Tensor | Start, known: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Vector | None:
        q, with_kept = known or (self.to_bend(x), self.with_kept(x))
        t = first_multipliers(q.detach(), step.slopes, given) if isinstance(given, Start) else given
        root = t.sqrt()
        h = root[:, None] * q * root
        free = gap(h.detach())
        if free is None:
            return None
        factor, _ = torch.linalg.cholesky_ex(torch.eye(len(h), dtype=h.dtype) - h)
        y = torch.linalg.solve_triangular(factor, root[:, None] * with_kept, upper=False)
        kept = self.cov if self.variances is None else torch.block_diag(self.cov, torch.diag(self.variances))
        grown = kept + y.T @ y
        m = len(grown)
        # rounding: of with_kept at most sqrt(m / GUARD) eps of its size, m^2 of which add up, over the gap
        margin = 8 * EPSILON * m**2.5 / math.sqrt(GUARD) / free
        before = kept.diagonal().detach()
        grown = (grown + grown.T) / 2 + torch.diag(margin * grown.detach().diagonal())
        self.growth *= math.sqrt((grown.diagonal().detach() / before.clamp(min=1e-290)).max().item()) if before.any() else 1.0
        self.bent.append(Bent(t, x, grown))
        self.cov, self.variances = grown, 1 / t
        bent = [
            None if k is None else step.slopes.middle * k if k.ndim == 1 else step.slopes.middle[:, None] * k for k in x.columns
        ]
        none: list[Columns] = [None] * (len(self.sizes) - len(bent))
        self.sizes.append(len(t))
        sizes = step.slopes.middle.detach().abs() * self._magnitudes(x) + step.slopes.half.detach() / root.detach()
        return Vector(
            (*bent, *none, step.slopes.half), sizes, max(x.scale * step.slopes.scale, 1e-300) if x.scale else 0.0, self.growth
        )


@dataclass(frozen=True, eq=False)
class Begun:
    """What the steps before the first bend make, the same whatever the multipliers.

    Attributes:
        base: the ellipsoid.
        vectors: those that are made of it.
        bent: which of them is bent, if one is.
    """

    base: Ellipsoid
    vectors: tuple[Vector, ...]
    bent: Vector | None

    @property
    def _run(self) -> Run:
        return Run(self.base.cov, [len(self.base.cov)])

    @cached_property
    def to_bend(self) -> torch.Tensor:
        """`Run.to_bend` of the one that is bent."""
        assert self.bent is not None, "there is a bend"
        if self.bent is not self.vectors[0]:
            return self._run.to_bend(self.bent)
        cov = self.base.cov  # nothing has been computed of it yet
        cov = cov.clone()
        cov.diagonal().add_(GUARD * self.base.cov.detach().diagonal())
        return cov

    @cached_property
    def with_kept(self) -> torch.Tensor:
        """`Run.with_kept` of it."""
        assert self.bent is not None, "there is a bend"
        return self._run.with_kept(self.bent)


def begin(base: Ellipsoid, steps: Sequence[Step]) -> Begun:
    """The steps before the first bend."""
    run = Run(base.cov, [len(base.cov)])
    vectors = [Vector((torch.ones(len(base.cov), dtype=base.cov.dtype),), base.cov.detach().diagonal().sqrt(), 1.0, 1.0)]
    for step in steps:
        if isinstance(step, Bend):
            return Begun(base, tuple(vectors), vectors[step.of])
        vectors.append(run.add(vectors, step))
    return Begun(base, tuple(vectors), None)
