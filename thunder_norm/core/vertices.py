"""How tensors move, as a graph: vertices are vectors, edges linear maps and bends, and each vertex has an ellipsoid that it stays in.

The ellipsoid of a vertex is found from the nearest one that all its paths pass (`joint.smallest`), so that what is added again, a residual, is
kept together with its branch.  What is linear, or nearly, all the way from the first vertex of a root is one matrix and what it leaves out (`Matrix`),
however long the ways are: the steps of a recurrent network, each with an input of its own, have no vertex between that all paths pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
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
# Of what a matrix leaves out, relative to the vectors that it makes: no search is asked for less, and more is left to it.
_NEAR, _FAR = 1e-3, 1.0
_LEAST, _MOST = 1e-250, 1e250

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Root:
    """Something that moves.

    Attributes:
        size: how far, in the norm that the first ellipsoid is the unit ball of.
        reasons: the sizes of the leaves that it moves with, in proportion; None where these are not known.
    """

    size: torch.Tensor
    reasons: frozenset[torch.Tensor] | None = None


def all_reasons(roots: Iterable[Root]) -> frozenset[torch.Tensor] | None:
    """The leaves that any of these moves with."""
    found = [root.reasons for root in roots]
    return None if any(r is None for r in found) else frozenset().union(*(r for r in found if r is not None))


@dataclass(eq=False)
class Vertex:
    """A part of a tensor's movement.

    Attributes:
        root: what makes it move.
        size: the number of features.
        terms: the sum of which linear maps of which vertices it is; none for the first of a root.
        slopes: the bounds of the slopes, [n] each, if it is a function of each entry of its one parent.
        given: the ellipsoid of the first of a root.
        is_kept_whole: a join of parts that are known together: what is known of each alone says no more.
        number: later ones have larger numbers.
        matrix: what it is of `first`, where that was asked for.
        columns: of the first of a root: how many such matrices have so far.
        moves: how far its entries move down and up, where that was asked for (`linear_bounds`).
    """

    root: Root
    size: int
    terms: tuple[tuple[Vertex, LinearMap | None], ...] = ()
    slopes: Slopes | None = None
    given: Ellipsoid | None = None
    is_kept_whole: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    matrix: Matrix | None = field(init=False, default=None)
    columns: int = field(init=False, default=0)
    moves: tuple[torch.Tensor, torch.Tensor] | None = field(init=False, default=None)
    _first: Vertex | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        firsts = {p.first for p, _ in self.terms}
        first = firsts.pop() if len(firsts) == 1 else None
        self._first = first if first is None or self.slopes is None or self.slopes.is_narrow else None

    @property
    def first(self) -> Vertex | None:
        """The first of its root, if it is nearly a linear map of that, whichever way one goes there."""
        return self._first if self.given is None else self

    @functools.cached_property
    def ellipsoid(self) -> Ellipsoid:
        """One that holds it, for a root of size 1: the smaller of what the graph and the parents alone say."""
        if self.given is not None:
            return self.given
        if (turned := self._turned()) is not None:
            return turned
        by_matrix = _by_matrix(self)
        if by_matrix is not None and by_matrix[1] <= _NEAR:
            return by_matrix[0]
        found = [] if by_matrix is None else [by_matrix[0]]
        block = _block(self)
        if block is not None:
            base, steps = block
            found.append(smallest(base.ellipsoid, steps))
        if block is None or not (self.is_kept_whole or self._is_all_of(block[0])):
            by_parents = self._of_parents(min((e.length.item() for e in found), default=math.inf))
            found += [] if by_parents is None else [by_parents]
        return found[0] if len(found) == 1 else min(found, key=lambda e: e.length.item())

    @property
    def _is_at_hand(self) -> bool:
        """Whether its ellipsoid needs no search: that of some linear maps of what has one."""
        has_one = (v.given is not None or "ellipsoid" in v.__dict__ for v in (self, *(p for p, _ in self.terms)))
        return next(has_one) or (self.slopes is None and all(has_one))

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

    def _of_parents(self, known: float) -> Ellipsoid | None:
        """From the ellipsoids of the parents, as if they had nothing to do with each other; None if it is longer than what is known.

        A sum is longer than what it begins with, so that a search for the others is often none for it.
        """
        if self.slopes is not None:
            return smallest(self.terms[0][0].ellipsoid, [Bend(0, self.slopes)])
        total = None
        for v, c in sorted(self.terms, key=lambda term: not term[0]._is_at_hand):
            e = v.ellipsoid if c is None else v.ellipsoid.image(c)
            total = e if total is None else sum_of(total, e)
            if len(self.terms) > 1 and total.length.item() > known:
                return None
        return total


def linear_map_of_fewer(vertex: Vertex) -> tuple[Vertex, torch.Tensor] | None:
    """The nearest vertex of fewer entries that all paths to this one pass, and the matrix that this one is of it; None if there is none, or a bend between."""
    frontier, passed = {vertex}, []
    while len(passed) < _LONGEST:
        if len(frontier) == 1 and (base := next(iter(frontier))).size < vertex.size:
            matrices = {base: torch.eye(base.size, dtype=torch.float64)}
            for v in reversed(passed):
                terms = (matrices[p] if c is None else c.times(matrices[p]).detach() * c.scale for p, c in v.terms)
                matrices[v] = functools.reduce(torch.add, terms)
            return base, matrices[vertex]
        latest = max(frontier, key=lambda v: v.number)
        if not latest.terms or latest.slopes is not None:
            return None
        frontier.remove(latest)
        frontier.update(v for v, _ in latest.terms)
        passed.append(latest)
    return None


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
    """A vertex as ``scale * (M x + N e)`` of the first one x of its root and numbers e between -1 and 1.

    What a bend leaves of ``D x_i``, D within half a width of the middle of its slopes, is at most that times how far x_i moves: a number e for
    each entry, which linear maps take on as they do x, so that what cancels does (affine arithmetic).

    Source: de Figueiredo and Stolfi, "Affine Arithmetic: Concepts and Applications", Numerical Algorithms 2004.

    Attributes:
        matrix: M beside N, [n, m + k], its largest entry 1, or 0.
        scale: a number > 0.
        off: how far each entry may be from the exact one besides, for ``|x_j| <= P_jj^(1/2)``, [n]; not finite where that is not known.
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
        width = max(m.matrix.shape[1] for m, _ in terms)
        matrix, off = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for m, c in terms:
            ratio = m.scale * c.scale / max(scale, 1e-300)
            matrix = matrix + _padded(c.times(m.matrix), width) * ratio
            unit = 8 * EPSILON * (len(m.matrix) + len(terms) + 2)
            off = off + c.magnitudes(m.off + unit * m._largest(sizes)) * ratio
        largest = matrix.detach().abs().max().item()
        if not largest or not _LEAST < scale * largest < _MOST:
            return cls(matrix, 1.0, off if not largest and not off.any() else off * math.nan)
        return cls(matrix / largest, scale * largest, off / largest)

    def times(self, slopes: Slopes, left_out: torch.Tensor) -> Matrix:
        """Each entry times the middle of its slopes, off by so much more."""
        middle = (slopes.low.detach() + slopes.high.detach()) / 2
        return Matrix(middle[:, None] * self.matrix, self.scale, middle.abs() * self.off + left_out.detach())

    def left_out(self, slopes: Slopes, of: Ellipsoid) -> torch.Tensor:
        """What `times` leaves out of each entry, for x in that ellipsoid, of scale 1."""
        half = (slopes.high.detach() - slopes.low.detach()) / 2 + 8 * EPSILON * slopes.moduli.detach()
        return half * (self._moved(of) + self.off) * (1 + 1e-9)

    def with_own(self, entries: torch.Tensor, start: int) -> Matrix:
        """With entries of e of its own, of columns from `start` on."""
        matrix = torch.cat([_padded(self.matrix, start), torch.diag(entries)], 1)
        return Matrix(matrix, self.scale, self.off)

    def _largest(self, sizes: torch.Tensor) -> torch.Tensor:
        """How large the terms of each entry are together."""
        matrix, m = self.matrix.detach().abs(), len(sizes)
        return matrix[:, :m] @ sizes + matrix[:, m:].sum(1)

    def _moved(self, of: Ellipsoid) -> torch.Tensor:
        """How large each entry may be for x in that ellipsoid, of scale 1."""
        m = len(of.cov)
        x, errors = self.matrix[:, :m], self.matrix[:, m:]
        rounded = 32 * EPSILON * (m + 4) * (x.detach().abs() @ of.cov.detach().diagonal().sqrt()).square() + 1e-300
        return (((x @ of.cov) * x).sum(1).clamp(min=0) + rounded).sqrt() + errors.abs().sum(1)

    def of(self, e: Ellipsoid) -> tuple[Ellipsoid, float] | None:
        """What it makes of the first one's ellipsoid, and what is left out of M relative to that; None if it is more.

        The exact vectors are off by less than a ball of radius ``|N| 1 + off``: an ellipsoid that holds a sum, as `ellipsoids.sum_of`.
        """
        m = len(e.cov)
        made = e.image(Dense(self.matrix[:, :m]))
        off = (self.off + self.matrix[:, m:].abs().sum(1)).norm() * (e.scale * (1 + 1e-9))
        if not made.scale:
            return (made, 0.0) if off.item() == 0 else None
        t = off / made.scale
        if not t.item() <= _FAR:
            return None
        cov = (1 + t) * made.cov + (t + t * t) * torch.eye(len(made.cov), dtype=torch.float64)
        return Ellipsoid.of(cov, made.scale * self.scale), t.item()


def _padded(matrix: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))


def _by_matrix(vertex: Vertex) -> tuple[Ellipsoid, float] | None:
    """The ellipsoid of a vertex that is nearly linear in the first one of its root, by its matrix; None if that is too large or too far off."""
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
    if v.slopes is not None:
        before = v.terms[0][0].matrix
        assert before is not None, "it is made first"
        start = first.columns or first.size
        left_out = before.left_out(v.slopes, first.ellipsoid)
        if v.slopes.is_linear:  # by rounding alone
            return before.times(v.slopes, left_out)
        if v.size * (start + v.size) > _LARGEST_MATRIX or not math.isfinite(left_out.sum().item()):
            return before.times(v.slopes, left_out * math.nan)
        first.columns = start + v.size
        return before.times(v.slopes, left_out * 8 * EPSILON).with_own(left_out, start)
    sizes = first.ellipsoid.cov.detach().diagonal().sqrt()
    terms = [(p.matrix, identity(p.size) if c is None else c) for p, c in v.terms]
    return Matrix.of_terms([(m, c) for m, c in terms if m is not None], sizes)
