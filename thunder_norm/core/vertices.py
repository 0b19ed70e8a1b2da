"""How tensors move, as a graph: vertices are vectors, edges linear maps and bends, and each vertex has an ellipsoid that it stays in.

The ellipsoid of a vertex is found from the nearest one that all its paths pass (`joint.smallest`), so that what is added again, a residual, is
kept together with its branch.  What is linear all the way from the first vertex of a root is one matrix, however long the ways are: the
steps of a recurrent network, each with an input of its own, have no vertex between that all paths pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thunder_norm.core.ellipsoids import EPSILON, Dense, Ellipsoid, LinearMap, identity, sum_of
from thunder_norm.core.joint import smallest
from thunder_norm.core.kept import Bend, Step, Sum
from thunder_norm.core.slopes import Slopes

# Features of a row, and the entries of all vectors that are kept together: the price is their cube.
LARGEST, LARGEST_TOGETHER = 1024, 2048
# Steps that one search goes back.
_LONGEST = 64
# Entries of a matrix from the first vertex of a root to another: each vertex on the way keeps one.
_LARGEST_MATRIX = 2**18
# Of what rounding may have done to a matrix, relative to the vectors that it makes.
_EXACT = 1e-6
_LEAST, _MOST = 1e-250, 1e250

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Root:
    """Something that moves.  `size` is how far, in the norm that the first ellipsoid is the unit ball of."""

    size: torch.Tensor


@dataclass(eq=False)
class Vertex:
    """A part of a tensor's movement.

    Attributes:
        root: what makes it move.
        size: the number of features.
        terms: the sum of which linear maps of which vertices it is; none for the first of a root.
        slopes: the bounds of the slopes, [n] each, if it is a function of each entry of its one parent.
        given: the ellipsoid of the first of a root.
        number: later ones have larger numbers.
        matrix: what it is of `first`, where that was asked for.
    """

    root: Root
    size: int
    terms: tuple[tuple[Vertex, LinearMap | None], ...] = ()
    slopes: Slopes | None = None
    given: Ellipsoid | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    matrix: Matrix | None = field(init=False, default=None)
    _first: Vertex | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        firsts = {p.first for p, _ in self.terms}
        first = firsts.pop() if len(firsts) == 1 else None
        self._first = first if first is None or self.slopes is None or self.slopes.is_linear else None

    @property
    def first(self) -> Vertex | None:
        """The first of its root, if it is a linear map of that but for rounding, whichever way one goes there."""
        return self._first if self.given is None else self

    @functools.cached_property
    def ellipsoid(self) -> Ellipsoid:
        """One that holds it, for a root of size 1: the smaller of what the graph and the parents alone say."""
        if self.given is not None:
            return self.given
        if (turned := self._turned()) is not None:
            return turned
        if (exact := _by_matrix(self)) is not None:
            return exact
        found = []
        block = _block(self)
        if block is not None:
            base, steps = block
            found.append(smallest(base.ellipsoid, steps))
        if block is None or not self._is_all_of(block[0]):
            found.append(self._of_parents())
        return found[0] if len(found) == 1 else min(found, key=lambda e: e.length.item())

    def _turned(self) -> Ellipsoid | None:
        """That of its parent, if it is the same vector times a number or with its entries in another order."""
        if self.slopes is not None or len(self.terms) != 1:
            return None
        ((parent, c),) = self.terms
        if c is None:
            return parent.ellipsoid
        return c.turned(parent.ellipsoid) if parent.size == self.size and c.is_turn else None

    def _is_all_of(self, base: Vertex) -> bool:
        """Whether what is known from `base` on is all there is: nothing is made of it but this, directly or after one bend."""
        parents = [v for v, _ in self.terms]
        if self.slopes is not None or parents == [base]:
            return True
        return len(parents) == 1 and parents[0].slopes is not None and parents[0].terms[0][0] is base

    @property
    def steepest(self) -> torch.Tensor | None:
        """The steepest slope, if it is a function of each entry and that is the same of all."""
        return None if self.slopes is None else self.slopes.steepest

    def _of_parents(self) -> Ellipsoid:
        """From the ellipsoids of the parents, as if they had nothing to do with each other."""
        if self.slopes is not None:
            return smallest(self.terms[0][0].ellipsoid, [Bend(0, self.slopes)])
        parts = [v.ellipsoid if c is None else v.ellipsoid.image(c) for v, c in self.terms]
        return functools.reduce(sum_of, parts)


def _block(vertex: Vertex) -> tuple[Vertex, list[Step]] | None:
    """The nearest vertex that all paths to this one pass, behind a bend if there is one, and the steps from it; None if it is too far."""
    frontier, passed = {vertex}, []
    bends = 0
    nearest: tuple[Vertex, int] | None = None
    while len(passed) < _LONGEST and bends <= LARGEST_TOGETHER:
        if len(frontier) == 1 and passed:
            (only,) = frontier
            if bends + only.size <= LARGEST_TOGETHER and (nearest is None or bends):
                nearest = only, len(passed)
            if bends or not only.terms:
                break
        latest = max(frontier, key=lambda v: v.number)
        if not latest.terms:
            break
        frontier.remove(latest)
        frontier.update(v for v, _ in latest.terms)
        passed.append(latest)
        bends += latest.size if latest.slopes is not None else 0
    if nearest is None:
        return None
    base, count = nearest
    return base, _steps(base, passed[:count][::-1])


def _steps(base: Vertex, passed: Sequence[Vertex]) -> list[Step]:
    numbers = {base: 0, **{v: i for i, v in enumerate(passed, 1)}}
    steps: list[Step] = []
    for v in passed:
        if v.slopes is not None:
            steps.append(Bend(numbers[v.terms[0][0]], v.slopes))
        else:
            steps.append(Sum(tuple((numbers[p], identity(p.size) if c is None else c) for p, c in v.terms)))
    return steps


@dataclass(frozen=True, eq=False)
class Matrix:
    """A vertex as ``scale * M x`` of the first one of its root.

    Attributes:
        matrix: M, [n, m], its largest entry 1, or 0.
        scale: a number > 0.
        off: how far each entry of M x may be from the exact one, for ``|x_j| <= P_jj^(1/2)``, [n]; not finite where that is not known.
    """

    matrix: torch.Tensor
    scale: float
    off: torch.Tensor

    @classmethod
    def of_terms(cls, terms: Sequence[tuple[Matrix, LinearMap]], sizes: torch.Tensor) -> Matrix:
        """The sum of linear maps of some, for x of entries of these sizes.

        A sum of k terms is off by at most ``2 k eps`` times what their absolute values add up to.
        """
        scale = max(m.scale * c.scale for m, c in terms)
        matrix, off = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for m, c in terms:
            ratio = m.scale * c.scale / max(scale, 1e-300)
            matrix = matrix + c.times(m.matrix) * ratio
            unit = 8 * EPSILON * (len(m.matrix) + len(terms) + 2)
            off = off + c.magnitudes(m.off + unit * (m.matrix.detach().abs() @ sizes)) * ratio
        largest = matrix.detach().abs().max().item()
        if not largest or not _LEAST < scale * largest < _MOST:
            return cls(matrix, 1.0, off if not largest and not off.any() else off * math.nan)
        return cls(matrix / largest, scale * largest, off / largest)

    def bent(self, slopes: Slopes, sizes: torch.Tensor) -> Matrix:
        """Each entry times a number between two: the middle, and half the width counts as rounding."""
        low, high = slopes.low, slopes.high
        middle, half = ((low + high) / 2).detach(), ((high - low) / 2).detach() + 8 * EPSILON * high.detach().abs()
        moved = self.matrix.detach().abs() @ sizes + self.off
        return Matrix(middle[:, None] * self.matrix, self.scale, middle.abs() * self.off + half * moved)

    def of(self, e: Ellipsoid) -> Ellipsoid | None:
        """What it makes of the first one's ellipsoid; None if rounding counts.

        The exact vectors are off by less than a ball of radius ``|off|``: an ellipsoid that holds a sum, as `ellipsoids.sum_of`.
        """
        made, off = e.image(Dense(self.matrix)), self.off.norm().item() * e.scale
        if not made.scale:
            return made if off == 0 else None
        t = off / made.scale
        if not t <= _EXACT:
            return None
        cov = (1 + t) * made.cov + (t + t * t) * torch.eye(len(made.cov), dtype=torch.float64)
        return Ellipsoid.of(cov, made.scale * self.scale)


def _by_matrix(vertex: Vertex) -> Ellipsoid | None:
    """The ellipsoid of a vertex that is linear in the first one of its root, by its matrix; None if that is too large or not exact enough."""
    first = vertex.first
    if first is None or vertex.size * first.size > _LARGEST_MATRIX:
        return None
    pending = [vertex]  # no recursion: ways are as long as programs
    while pending:
        v = pending[-1]
        missing = [p for p, _ in v.terms if p.matrix is None]
        if missing:
            pending += missing
            continue
        pending.pop()
        if v.matrix is None:
            v.matrix = _matrix(v, first)
    assert vertex.matrix is not None, "it is made last"
    return vertex.matrix.of(first.ellipsoid)


def _matrix(v: Vertex, first: Vertex) -> Matrix:
    if v is first:
        return Matrix(torch.eye(v.size, dtype=torch.float64), 1.0, torch.zeros(v.size, dtype=torch.float64))
    sizes = first.ellipsoid.cov.detach().diagonal().sqrt()
    if v.slopes is not None:
        before = v.terms[0][0].matrix
        assert before is not None, "it is made first"
        return before.bent(v.slopes, sizes)
    terms = [(p.matrix, identity(p.size) if c is None else c) for p, c in v.terms]
    return Matrix.of_terms([(m, c) for m, c in terms if m is not None], sizes)
