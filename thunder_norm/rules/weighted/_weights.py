"""Sums of products of tensors that are not negative, as expressions: two that are equal are the same sum, however they are spelled.

A `Term` is ``scale * sum over bound labels of a product of atoms``; an `Atom` a tensor, a sum of terms, or a linear map of a term along
one dimension (a cumulative sum, a choice of entries).  The dimensions of a term are named by the negative numbers that they have in the
tensor it describes, so that terms of tensors that broadcast go together; bound labels are positive.  Atoms are kept once: equal ones
are identical.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.tensors import NormedTensor

_serials = itertools.count()


class Atom:
    """A factor of terms, with labels of its own: -1, -2, ... in the order of a factor's labels."""

    def __init__(self, key: Hashable, keeps: Any):
        self.serial, self.key = next(_serials), key
        self._keeps = keeps  # alive, so that identities stay their own
        self.ratios: weakref.WeakKeyDictionary[Atom, float] = (
            weakref.WeakKeyDictionary()
        )  # to others, as `least_ratio` finds them


_atoms: weakref.WeakValueDictionary[Hashable, Atom] = weakref.WeakValueDictionary()


def _atom(key: Hashable, keeps: Any) -> Atom:
    found = _atoms.get(key)
    if found is None:
        found = _atoms[key] = Atom(key, keeps)
    return found


Factor = tuple[Atom, tuple[int, ...]]  # with the term's labels of the atom's


@dataclass(frozen=True)
class Term:
    """``scale * sum prod factors``; zero for a scale of 0."""

    scale: float
    factors: tuple[Factor, ...] = ()

    @property
    def labels(self) -> frozenset[int]:
        """The dimensions along which it varies."""
        return frozenset(label for _, labels in self.factors for label in labels if label < 0)

    @property
    def order(self) -> tuple:
        """What terms are sorted by, whatever their labels are."""
        return self.scale, tuple(atom.serial for atom, _ in self.factors)

    def relabelled(self, new: Mapping[int, int]) -> Term:
        """With other labels for some."""
        return _term(self.scale, [(atom, tuple(new.get(label, label) for label in labels)) for atom, labels in self.factors])


ZERO = Term(0.0)


def _term(scale: float, factors: Sequence[Factor]) -> Term:
    """In one order, and bound labels by where they come first."""
    if scale == 0:
        return ZERO
    ordered = sorted(factors, key=lambda f: (f[0].serial, tuple(min(label, 0) for label in f[1])))
    names: dict[int, int] = {}
    for _, labels in ordered:
        for label in labels:
            if label > 0:
                names.setdefault(label, len(names) + 1)
    return Term(scale, tuple((atom, tuple(names.get(label, label) for label in labels)) for atom, labels in ordered))


def _closed(terms: Sequence[Term]) -> tuple[tuple[Term, ...], tuple[int, ...]]:
    """Terms in one order with labels of their own, and those they had, in the order of those."""
    ordered = sorted(terms, key=lambda t: t.order)
    outer: dict[int, int] = {}
    for term in ordered:
        for _, labels in term.factors:
            for label in labels:
                if label < 0:
                    outer.setdefault(label, -len(outer) - 1)
    return tuple(term.relabelled(outer) for term in ordered), tuple(outer)


def of_tensor(x: NormedTensor) -> Term:
    """The tensor itself."""
    labels = tuple(d for d in ed.every(x.ndim) if x.shape[d] != 1)
    key = "tensor", id(x.backing), version_of(x.backing), id(x.norm_size)
    return Term(1.0, ((_atom(key, (x.backing, x.norm_size)), labels),))


def version_of(t: torch.Tensor) -> int | None:
    """How often it was changed in place, where torch counts that."""
    return None if t.is_inference() else t._version


def multiple(a: Term, c: float) -> Term:
    """c a, for c >= 0."""
    return Term(a.scale * c, a.factors) if c > 0 else ZERO


def product(a: Term, b: Term) -> Term:
    """a b, entry by entry."""
    apart = 1 + max((label for _, labels in a.factors for label in labels if label > 0), default=0)
    moved = [(atom, tuple(label + apart if label > 0 else label for label in labels)) for atom, labels in b.factors]
    return _term(a.scale * b.scale, [*a.factors, *moved])


def total(a: Term, b: Term) -> Term:
    """a + b."""
    if ZERO in (a, b):
        return b if a == ZERO else a
    terms, outer = _closed([a, b])
    return Term(1.0, ((_atom(("sum", terms), terms), outer),))


def summed(a: Term, dims: ed.Dims, shape: Sequence[int], keepdim: bool) -> Term:
    """The sum over dimensions."""
    used, bound = (
        a.labels,
        itertools.count(1 + max((label for _, labels in a.factors for label in labels if label > 0), default=0)),
    )
    left = [d for d in range(-len(shape), 0) if d not in dims]
    new = {d: next(bound) for d in dims}
    if not keepdim:
        new |= {d: i - len(left) for i, d in enumerate(left)}
    copies = 1.0
    for d in dims:
        copies *= 1 if d in used else shape[d]
    return a.relabelled(new) if copies == 1 else multiple(a.relabelled(new), copies)


def mapped(a: Term, key: Hashable, keeps: Any, dim: int) -> Term:
    """A linear map along one dimension, whose coefficients are not negative: the same for the same `key`, of what `keeps` is kept."""
    if a == ZERO:
        return ZERO
    (term,), outer = _closed([a])
    along = outer.index(dim) if dim in outer else None
    return Term(1.0, ((_atom(("map", key, term, along), (term, keeps)), outer if along is not None else (*outer, dim)),))


def gathered_sum(a: Term, like: Term) -> Term | None:
    """For each entry of `a` the sum of its group, if `like` is that but for its scale: added up at an index, and chosen by the same."""
    chosen = _map_of(like)
    added = None if chosen is None else _map_of(chosen[1])
    if chosen is None or added is None or (chosen[0][0], added[0][0]) != ("entries", "added") or chosen[0][1] != added[0][1]:
        return None
    for dim in {label for _, labels in like.factors for label in labels}:
        total = mapped(mapped(a, added[0], None, dim), chosen[0], None, dim)  # atoms that are there already keep the index
        if total.factors == like.factors:
            return total
    return None


def _map_of(a: Term) -> tuple[tuple, Term] | None:
    """The key of a linear map along one dimension, and the term that it is of, if `a` is that alone."""
    key: Any = a.factors[0][0].key if len(a.factors) == 1 else None
    return (key[1], key[2]) if isinstance(key, tuple) and key[0] == "map" else None


DEEPEST = 50  # sums within sums that are compared: each call of `least_ratio` knows the ratios that those before it found


def least_ratio(a: Term, b: Term, depth: int = 0) -> float:
    """How many times b a is at least, whatever both are made of: by terms of its sums that b has not; 0 if that is not known."""
    if b == ZERO:
        return math.inf
    if a.factors == b.factors:
        return a.scale / b.scale
    of_a, of_b = Counter(a.factors), Counter(b.factors)
    rest_a, rest_b = list((of_a - of_b).elements()), list((of_b - of_a).elements())
    if len(rest_a) != 1 or depth > DEEPEST or any(label > 0 for _, labels in (*rest_a, *rest_b) for label in labels):
        return 0.0
    ratio = _ratio_of_rests(rest_a[0], rest_b, depth + 1)
    return a.scale * ratio / b.scale


def _ratio_of_rests(a: Factor, b: Sequence[Factor], depth: int) -> float:
    if len(b) == 1 and a[1] == b[0][1] and (known := a[0].ratios.get(b[0][0])) is not None:
        return known
    terms = _terms_of(a)
    found = max((least_ratio(t, Term(1.0, tuple(b)), depth) for t in terms), default=0.0)
    if len(b) == 1 and terms:
        found = max(found, _term_by_term(terms, _terms_of(b[0]), depth))
        if a[1] == b[0][1]:
            a[0].ratios[b[0][0]] = found
    return found


def _term_by_term(terms: Sequence[Term], others: Sequence[Term], depth: int) -> float:
    """Each of the others has a term of its own that is so many times as large."""
    left, found = list(terms), math.inf if others else 0.0
    for other in others:
        ratios = [least_ratio(t, other, depth) for t in left]
        best = max(range(len(left)), key=ratios.__getitem__, default=None)
        if best is None or ratios[best] <= 0:
            return 0.0
        found = min(found, ratios[best])
        del left[best]
    return found


def _terms_of(factor: Factor) -> list[Term]:
    """The terms of a sum, with the labels of the factor; none of what is no sum, and of sums within which there are others over labels."""
    atom, labels = factor
    key: Any = atom.key
    if key[0] != "sum" or any(label > 0 for term in key[1] for _, of in term.factors for label in of):
        return []
    outer = {-1 - i: label for i, label in enumerate(labels)}
    return [term.relabelled(outer) for term in key[1]]


_CONTRACTED = -1_000_000  # beyond all dimensions: labels of what is summed over, until it is


def contracted(a: Term, b: Term, of_a: Sequence[int | str], of_b: Sequence[int | str], sizes: Mapping[str, int]) -> Term:
    """The sum of products of two tensors over the labels that have a size.

    Args:
        a: of the first tensor.
        b: of the second.
        of_a: for each dimension of the first the result's, a negative number, or the name of what is summed over.
        of_b: the same for the second.
        sizes: of what is summed over, by name.
    """
    at = {name: _CONTRACTED - i for i, name in enumerate(sizes)}
    placed = []
    for term, labels in ((a, of_a), (b, of_b)):
        new = {i - len(labels): label if isinstance(label, int) else at[label] for i, label in enumerate(labels)}
        placed.append(term.relabelled(new))
    both = product(*placed)
    bound = itertools.count(1 + max((label for _, labels in both.factors for label in labels if label > 0), default=0))
    used, copies = both.labels, 1.0
    for name, n in sizes.items():
        copies *= 1 if at[name] in used else n
    closed = both.relabelled({at[name]: next(bound) for name in sizes})
    return _term(closed.scale * copies, closed.factors)
