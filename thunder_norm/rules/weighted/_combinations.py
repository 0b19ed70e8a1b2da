"""What is known of tensors as weights and as weighted sums, and what follows for them: facts for `weighted_means`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.known_ranges import known_range, range_of
from thunder_norm.core.ranges import Range
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Source, fact
from thunder_norm.rules._least_moduli import smallest
from thunder_norm.rules._shared import Constant, maximum, own_dims, refined, spread
from thunder_norm.rules.weighted import _weights as terms
from thunder_norm.rules.weighted._movements import Movement, largest, least, movement, total
from thunder_norm.rules.weighted._weights import ZERO, Term
from thunder_norm.rules.written_out.written_out_exponentials import Exponential
from thunder_norm.scalars import times


@dataclass(frozen=True, eq=False)
class Relative:
    """How far weights move, as a share of themselves: that of a tensor, or of a product of some, or of a sum of some; or by each of some."""

    source: Source | None = None
    factor: Constant = 1.0
    product: tuple[Relative, ...] = ()
    sum: tuple[Relative, ...] = ()
    each: tuple[Relative, ...] = ()

    def movement(self, known: dict[int, Movement | None]) -> Movement | None:
        """The largest share; in a product shares add, in a sum the largest counts, and of several that hold the least.  None if they stay."""
        if id(self) not in known:
            known[id(self)] = self._movement(known)
        return known[id(self)]

    def _movement(self, known: dict[int, Movement | None]) -> Movement | None:
        if self.source is not None and self.source.perturbation_size is not None:
            return movement(self.source.perturbation_size, self.factor)
        parts = [r.movement(known) for r in (*self.product, *self.sum, *self.each)]
        moving = [p for p in parts if p is not None]
        if not moving or self.each and len(moving) < len(parts):
            return None
        return least(moving) if self.each else largest(moving) if self.sum else total(moving)


def least_share(shares: Sequence[Relative]) -> torch.Tensor | None:
    """By which share weights move, of which some are known that all hold; None if there is none, or they stay."""
    known: dict[int, Movement | None] = {}
    found = [r.movement(known) for r in shares]
    moving = [m for m in found if m is not None]
    return least(moving).value() if moving and len(moving) == len(shares) else None


STILL = Relative()


@dataclass(frozen=True, eq=False)
class Scaled(Relative):
    """The share by which a kernel moves, and those of what it is multiplied by again and again: numbers for each group over some dimensions.

    Attributes:
        kernel: how far the kernel moves.
        scales: the dimensions of each group, and how many times the kernel's share its number moves at most.
    """

    kernel: Relative = STILL
    scales: tuple[tuple[ed.Dims, float], ...] = ()

    def _movement(self, known: dict[int, Movement | None]) -> Movement | None:
        moved = self.kernel.movement(known)
        return None if moved is None else moved.scaled(1.0 + sum(c for _, c in self.scales))


def over_own_sum(weights: Relative | None, dims: ed.Dims, is_exact: bool) -> Relative | None:
    """How far weights move that are divided by their sum over `dims`, or, if it is not exact, by that and a number, or the larger of both.

    ``K a b`` with a number a for each group over `dims`, and b for each over others, is ``K b / sum K b`` afterwards, where a is gone: what
    a is now moves by as much as ``K b``.  Beside a number, ``a / (a s + c)`` moves by a mean of what a moves, and of what s does.
    Typical: a logarithm less its mean by the new weights, ``d log p = r - sum p r``, an orthogonal projection: no farther than before.
    """
    if weights is None or weights is STILL or current_mode() == "typical":
        return weights
    kernel, scales = (weights.kernel, dict(weights.scales)) if isinstance(weights, Scaled) else (weights, {})
    own = scales.pop(dims, 0.0)
    moved = 1.0 + sum(scales.values())
    return Scaled(kernel=kernel, scales=(*scales.items(), (dims, moved if is_exact else max(moved, own))))


def _together(a: Relative | None, b: Relative | None, in_a_sum: bool) -> Relative | None:
    if a is None or b is None:
        return None
    if STILL in (a, b):
        return b if a is STILL else a
    return a if a is b and in_a_sum else Relative(sum=(a, b)) if in_a_sum else Relative(product=(a, b))


@dataclass(frozen=True, eq=False)
class Weights:
    """A fact: a tensor that is this term, which is not negative; at least it if not `is_exact`.  `relative`: None if it is unknown."""

    term: Term
    relative: Relative | None
    is_exact: bool = True


@dataclass(frozen=True, eq=False)
class Combination:
    """A fact: ``sum_j a_j v_j`` where ``sum_j a_j`` is this term, no a_j is negative, and each v_j is from one of some tensors.

    Attributes:
        term: the sum of the weights.
        parts: the tensors, with the factor by which the RMS of their groups over `elem_dims` may exceed their norm.
        elem_dims: dimensions along which the weights are constant.
        relative: how far the weights move.
    """

    term: Term
    parts: tuple[tuple[Source, float], ...]
    elem_dims: ed.Dims
    relative: Relative | None

    def over(self, dims: ed.Dims, shape: Sequence[int]) -> Combination:
        """In the norm over fewer dimensions."""
        lost = [d for d in self.elem_dims if d not in dims]
        c = spread(math.sqrt(max(ed.numel(shape, lost), 1)))
        parts = self.parts if c == 1 else tuple((source, factor * c) for source, factor in self.parts)
        return replace(self, parts=parts, elem_dims=tuple(d for d in self.elem_dims if d in dims))

    def size(self) -> torch.Tensor:
        """What the norm of each v_j is at most."""
        return maximum([times(source.norm_size, c) for source, c in self.parts])

    def moved(self) -> Constant:
        """How far each v_j moves."""
        moving = [movement(s.perturbation_size, c) for s, c in self.parts if s.perturbation_size is not None]
        return largest(moving).value() if moving else 0.0


@dataclass(frozen=True, eq=False)
class InverseOfWeights:
    """A fact: ``scale / weights``."""

    weights: Weights
    scale: float


Sums = Weights | Combination | InverseOfWeights
KINDS = RMSTensor, L1Tensor  # of tensors that may be weights


def facts(x: Any) -> tuple[Sums, ...]:
    """What is known about a tensor."""
    return x._sums if isinstance(x, KINDS) else ()


def is_zero(x: Any) -> bool:
    """Whether all entries are 0."""
    found = range_of(x) if isinstance(x, RMSTensor) else None
    return found is not None and found.low == found.high == 0


def weights_of(x: Any, exactly: bool = True) -> Iterator[Weights]:
    """A tensor as weights, if its entries are not negative: as what is known of it, and as itself."""
    if not isinstance(x, KINDS) or x.backing.is_complex():
        return
    if is_zero(x):
        yield Weights(ZERO, STILL)
        return
    yield from (w for w in facts(x) if isinstance(w, Weights) and (w.is_exact or not exactly))
    found = range_of(x)
    if found is not None and found.low >= 0 and not any(isinstance(w, Weights) and w.is_exact for w in facts(x)):
        yield Weights(terms.of_tensor(x), _relative(x, found.low))


def _relative(x: NormedTensor, least: float) -> Relative | None:
    """An exponential moves by the share by which its exponent moves; else by what it moves over its least entry."""
    if x.perturbation_size is None:
        return STILL
    found = fact(x, Exponential)
    if found is not None and found.argument.perturbation_size is not None:
        exponent = found.argument.tensor()
        return Relative(found.argument, refined(exponent, ()))
    return Relative(Source.of(x), refined(x, ()) / smallest(x)) if least > 0 and isinstance(x, RMSTensor) else None


def with_number(x: NormedTensor, out: NormedTensor) -> Iterator[Weights]:
    """Weights plus a number that is not negative: they move by no larger a share of themselves than before."""
    for w in weights_of(x, exactly=False):
        yield replace(w, is_exact=False)
    before = next((w.relative for w in weights_of(x) if w.relative is not None), None)
    if before is not None:
        now = None if before is STILL else _relative(out, (range_of(out) or Range()).low)
        yield Weights(terms.of_tensor(out), before if now is None else Relative(each=(before, now)))


def combinations_of(x: Any) -> Iterator[Combination]:
    """A tensor as a weighted sum."""
    yield from (c for c in facts(x) if isinstance(c, Combination))


def as_combinations(x: RMSTensor) -> list[Combination]:
    """A tensor as a weighted sum; if it is not known as one, of itself alone."""
    return list(combinations_of(x)) or [Combination(Term(1.0), ((Source.of(x), 1.0),), own_dims(x), STILL)]


def weighted(w: Weights, x: RMSTensor, shape: Sequence[int]) -> Iterator[Combination]:
    """Weights times a tensor."""
    for c in as_combinations(x):
        left = tuple(d for d in c.elem_dims if d not in w.term.labels)
        yield replace(c.over(left, shape), term=terms.product(w.term, c.term), relative=_together(w.relative, c.relative, False))


def times_factor(c: Combination, by: RMSTensor, shape: Sequence[int]) -> Combination:
    """A weighted sum times a tensor of any sign: one of what is that many times as large, by the same weights."""
    over = refined(by, ())
    largest, moved = times(by.norm_size, over), None if by.perturbation_size is None else times(by.perturbation_size, over)
    if current_mode() == "bound" and (most := known_range(by).largest_modulus) < math.inf:
        largest = largest.clamp(max=most)
    return replace(c.over(c.elem_dims, shape), parts=tuple((_larger(s, largest, moved), factor) for s, factor in c.parts))


def _larger(x: Source, by: torch.Tensor, moved: torch.Tensor | None) -> Source:
    """x times entries of that modulus at most, which move as far as that."""
    parts = [times(p, n) for p, n in ((x.perturbation_size, by), (moved, x.norm_size)) if p is not None]
    n = times(x.norm_size, by)
    return replace(x, norm_size=n, perturbation_size=sum(parts[1:], parts[0]) if parts else None)


def both(a: Weights, b: Weights) -> Weights:
    """A product of weights."""
    return Weights(terms.product(a.term, b.term), _together(a.relative, b.relative, False), a.is_exact and b.is_exact)


def added(a: Weights, b: Weights) -> Weights:
    """A sum of weights."""
    return Weights(terms.total(a.term, b.term), _together(a.relative, b.relative, True), a.is_exact and b.is_exact)


def joined(a: Combination, b: Combination, shape: Sequence[int]) -> Combination:
    """A sum of weighted sums."""
    dims = tuple(d for d in a.elem_dims if d in b.elem_dims)
    a, b = a.over(dims, shape), b.over(dims, shape)
    parts = {(id(s.norm_size), id(s.backing), c): (s, c) for s, c in (*a.parts, *b.parts)}
    return Combination(terms.total(a.term, b.term), tuple(parts.values()), dims, _together(a.relative, b.relative, True))


def own_sum(a: Any, b: Any) -> Iterator[tuple[ed.Dims, Weights, Weights, float]]:
    """Over which dimensions b is the sum of weights a, or more: these, both as weights, and the factor of their quotient."""
    if not (isinstance(a, KINDS) and isinstance(b, KINDS)) or a.ndim < b.ndim:
        return
    dims = tuple(d for d in range(-a.ndim, 0) if a.shape[d] != 1 and (-d > b.ndim or b.shape[d] == 1))
    for w in weights_of(a) if dims else ():
        total = terms.summed(w.term, dims, a.shape, keepdim=True)
        for other in weights_of(b, exactly=False):
            if total.factors == other.term.factors and other.term.scale > 0:
                yield dims, w, other, total.scale / other.term.scale
