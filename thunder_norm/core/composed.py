"""Perturbations as ellipsoids, inside ``norm_sensitivity("composed")`` and "within": a matrix where there is a number otherwise.

The entries of a tensor over its last dimensions (its *features*) are a row, and every row moves within one ellipsoid, the same for all as
they share elem_dims.  What moves is said by *roots*: a leaf with a perturbation_size, or a result of which only a norm rule knows how
far it moves.  The movement of a tensor is a sum of one vector for each root, and each is a vertex of a graph (`vertices`), of which ellipsoids are found.  Then

    perturbation_size = sum over roots of (length of the ellipsoid, in the tensor's norm, for a root of size 1) * (size of the root).

It is the bound for one root moved after the other; that of each holds for movements of any size, the tensors it meets held fixed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import COMPOSED, current_mode, current_sensitivity
from thunder_norm.core.ellipsoids import Ellipsoid, LinearMap
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.lengths import length
from thunder_norm.core.nonfinite import settled
from thunder_norm.core.perturbations import Rest, lesser
from thunder_norm.core.slopes import Slopes
from thunder_norm.core.tensors import NormedTensor, is_complex, unwatched
from thunder_norm.core.vertices import LARGEST, Root, Vertex, all_reasons
from thunder_norm.errors import NormMismatchError
from thunder_norm.trees import flat_tensors, map_tensors

# Slopes and movements beyond it are of no use to anyone, and products of a few are no numbers.
_HUGE = 1e100
# Ellipsoids that are so many times as long as what a norm rule says are given up for a ball; otherwise what is kept together counts more.
_FAR = 1.5
# Roots a tensor's movement is made of.
_MOST_ROOTS = 12
# The same of those that do not move, beside others that do.
_MOST_AT_REST = 2


@dataclass(frozen=True, eq=False)
class Spread:
    """How a tensor moves: its features are the last dimensions, `ndim` of them, each part due to another root; norm rules may say less."""

    ndim: int
    parts: tuple[Vertex, ...]
    is_limited: bool = False


@dataclass(frozen=True, eq=False)
class Term:
    """What a result's rows move by when those of one argument do.

    Attributes:
        x: the argument.
        how: a linear map of its rows, the bounds of slopes by which each entry is multiplied, or None: as they do.
        keeps_rows: row i of the result is made of row i of x.  Otherwise it is made of another one, or is a weighted sum of some.
        factor: what the absolute weights of such a sum add up to.
    """

    x: NormedTensor
    how: LinearMap | Slopes | None = None
    keeps_rows: bool = True
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Made:
    """A result's movement: the sum of some terms, for features of its last `ndim` dimensions.

    Attributes:
        ndim: how many.
        terms: the terms.
        besides: what each row moves by beside them: in an ellipsoid, times a number.
        parts: vertices that it moves by, beside them, one for each root.
        of: arguments that are functions of the terms' tensors, and move the result as these say.
    """

    ndim: int
    terms: tuple[Term, ...]
    besides: tuple[tuple[Ellipsoid, torch.Tensor], ...] = ()
    parts: tuple[Vertex, ...] = ()
    of: tuple[NormedTensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation, for its movement rule.

    Attributes:
        args: the arguments.
        kwargs: those by name.
        given: all of them, by the names of the norm rule that runs.
        results: the normed results.
        body: what the operation does to plain tensors.
    """

    args: tuple
    kwargs: dict
    given: dict[str, Any]
    results: Sequence[NormedTensor]
    body: Callable

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Do the operation on other tensors, plain ones, unseen by those who watch the program's."""
        with unwatched():
            return self.body(*args, **kwargs)

    def with_parameters_fixed(self) -> Call:
        """The same where what is made of parameters is as it is, if anything else moves: of their own movements the norm rule says the rest."""
        if all(x._is_of_parameters for x in self.moving) or not any(x._is_of_parameters for x in self.moving):
            return self
        args, kwargs, given = map_tensors(_as_it_is, (self.args, self.kwargs, self.given))
        return Call(args, kwargs, given, self.results, self.body)

    @functools.cached_property
    def moving(self) -> list[NormedTensor]:
        """The arguments that move, each once."""
        return list({id(x): x for x in flat_tensors((self.args, self.kwargs)) if moves(x)}.values())


# What each result's movement is made of, or None where a norm rule says more.
MovementRule = Callable[[Call], "Sequence[Made | None] | None"]


def is_composed() -> bool:
    """Whether perturbations are ellipsoids.

    Raises:
        NormMismatchError: in another mode than "bound".
    """
    if current_sensitivity() not in COMPOSED:
        return False
    if current_mode() != "bound":
        raise NormMismatchError(f'sensitivity "{current_sensitivity()}" is a bound; in mode {current_mode()!r} use "global"')
    return True


def moves(x: Any) -> TypeGuard[NormedTensor]:
    """Whether a value is a normed tensor that carries a perturbation."""
    return isinstance(x, NormedTensor) and x.perturbation_size is not None


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.backing.detach() if isinstance(x, NormedTensor) and x._is_of_parameters else x


def is_fixed(x: Any) -> bool:
    """Whether an argument is what it is: a plain tensor or a number.  A normed tensor that does not move still stands for others."""
    return not isinstance(x, NormedTensor)


def values(t: torch.Tensor) -> torch.Tensor:
    """What is in a tensor that is fixed (or is looked at as the data at hand), in double precision.

    Raises:
        NormMismatchError: there is nothing in it.
    """
    if t.is_meta:
        raise NormMismatchError('sensitivity "composed" is for matrices as they are, and this one is on meta: use "global"')
    return t.to(device="cpu", dtype=torch.float64)


def spread_of(x: NormedTensor) -> Spread | None:
    """How x moves: known from the operation that made it, or within its norm; None if its features are not its last dimensions."""
    if x._spread is None:
        size = x.perturbation_size
        is_leaf = size is not None and size.is_leaf and size.requires_grad
        x._spread = within_norm(x, frozenset({size}) if size is not None and is_leaf else None)
    return x._spread


def reasons_of(tensors: Iterable[NormedTensor]) -> frozenset[torch.Tensor] | None:
    """The sizes of the leaves that these move with, in proportion; None where they are not known."""
    spreads = [spread_of(x) for x in tensors]
    return None if None in spreads else all_reasons(v.root for s in spreads if s is not None for v in s.parts)


def within_norm(x: NormedTensor, reasons: frozenset[torch.Tensor] | None) -> Spread | None:
    """How x moves if no more is known than how far; None if its features are not its last dimensions."""
    dims = x.elem_dims or tuple(range(-x.ndim, 0))[-1:]
    size = math.prod(x.shape[d] for d in dims)
    is_last = set(dims) == set(range(-len(dims), 0))
    if not isinstance(x, RMSTensor | L2Tensor) or is_complex(x) or not is_last or not 0 < size <= LARGEST:
        return None
    assert x.perturbation_size is not None
    radius = 1.0 if isinstance(x, L2Tensor) else math.sqrt(size)
    # the ball around a cube is larger than it: norm rules may say less
    is_limited = isinstance(x, LinfTensor)
    return Spread(len(dims), (Vertex(Root(x.perturbation_size, reasons), size, given=Ellipsoid.ball(size, radius)),), is_limited)


def compose(rule: MovementRule | None, call: Call, rest: Rest) -> None:
    """Give the results of an operation the ellipsoids they move in, and perturbation sizes by these; by the norm rule where it knows more.

    Args:
        rule: the operation's movement rule, if it has one.
        call: the call, with the results as the norm rule has them.
        rest: how far they move by the arguments that the movement rule says nothing of.
    """
    if rule is None or not call.moving or not call.results or not all(_has_rows(y) for y in call.results):
        return
    with _disable_current_modes():  # they are about the program, and this is thousands of operations on matrices of ours
        call = call.with_parameters_fixed()
        made = rule(call)
        if made is None:
            return
        known = {id(x) for m in made if m is not None for x in (*(t.x for t in m.terms), *m.of)}
        # a matrix that moves with the inputs is another one for others: of parameters alone a rule says the rest
        left = rest.of(call.given, known) if known >= {id(x) for x in call.moving} else None
        if left is None:
            return
        for y, m, by_others in zip(call.results, made, left, strict=True):
            if m is not None and not any(_is_too_steep(t) for t in m.terms):
                _attach(y, m, by_others, reasons_of(call.moving))


def _has_rows(y: NormedTensor) -> bool:
    """Whether a result moves, and as vectors of numbers: of a complex one, the parts of each entry move together, and norm rules say how."""
    return moves(y) and y.numel() > 0 and not is_complex(y)


def _is_too_steep(term: Term) -> bool:
    return isinstance(term.how, Slopes) and not term.how.most <= _HUGE


def _attach(y: NormedTensor, made: Made, left: torch.Tensor | None, reasons: frozenset[torch.Tensor] | None) -> None:
    size = math.prod(y.shape[y.ndim - made.ndim :])
    parts = [*parts_of(made.terms, size), *made.parts] + [Vertex(Root(n, reasons), size, given=e) for e, n in made.besides]
    if left is not None:
        parts.append(Vertex(Root(left), size, given=Ellipsoid.ball(size, _row_of(y, made.ndim, size))))
    moved = _size(y, made.ndim, parts)
    if not moved.item() <= _HUGE:
        return
    by_rule = y.perturbation_size
    # of products, say, a norm rule may say less; what is made of this may still move less by what is known of entries
    least = lesser(moved, by_rule) if by_rule is not None and _may_be_less(y, made) else moved
    if by_rule is not None and least is not moved and (made.besides or made.parts) and isinstance(y, RMSTensor | L2Tensor):
        if moved.item() > _FAR * by_rule.item():
            return  # the norm rule has one constant for all points, which is less this far from the data
    y.perturbation_size = least
    y._spread = Spread(made.ndim, tuple(_few(parts)), least is not moved)


def _may_be_less(y: NormedTensor, made: Made) -> bool:
    """Whether a norm rule may say less than the ellipsoids: not of linear maps of what it has not, nor with a constant of 1 of slopes up to 1."""
    if any((t.x._spread is None or t.x._spread.is_limited) or not t.keeps_rows for t in made.terms):
        return True
    slopes = [t.how for t in made.terms if isinstance(t.how, Slopes)]
    is_one = len(made.terms) == 1 and made.terms[0].x.perturbation_size is y.perturbation_size
    return bool(made.besides or made.parts or slopes) and not (is_one and all(s.most <= 1 for s in slopes))


def moves_as(y: NormedTensor, other: NormedTensor) -> None:
    """Let y be known to move as `other` does, which is the same tensor, computed another way: in its ellipsoid, and no further than both."""
    y._spread = other._spread
    own, others = y.perturbation_size, other.perturbation_size
    y.perturbation_size = lesser(own, others) if own is not None and others is not None else own if others is None else others


def moves_within(y: NormedTensor, ndim: int, parts: Sequence[Vertex]) -> None:
    """Let y, whose norm rule has said how far it moves, be known to move as these parts do, for features of its last `ndim` dimensions."""
    with _disable_current_modes():
        moved = _size(y, ndim, parts)
        if y.perturbation_size is None or not moved.item() <= _HUGE:
            return
        least = lesser(moved, y.perturbation_size)
        if least is not y.perturbation_size:
            y.perturbation_size, y._spread = least, Spread(ndim, tuple(_few(parts)), least is not moved)


def _row_of(y: NormedTensor, ndim: int, size: int) -> float:
    """The length of the longest row of y, its last `ndim` dimensions of `size` features, where the norm of y is 1."""
    count = math.prod(y.shape[d] for d in y.elem_dims if d >= -ndim) if isinstance(y, L1Tensor | L2Tensor) else 1
    return math.sqrt(size / max(count, 1))


def parts_of(terms: Sequence[Term], size: int) -> list[Vertex]:
    """What terms move by together, `size` features: a vertex for each root."""
    by_root: dict[Root, list[tuple[Vertex, Term]]] = {}
    for term in terms:
        spread = spread_of(term.x)
        assert spread is not None, "a movement rule takes arguments that have one"
        for vertex in spread.parts:
            if not term.keeps_rows:  # rows of other numbers: what is the same row of both is not known any more
                vertex = Vertex(replace(vertex.root), vertex.size, given=vertex.ellipsoid.times(term.factor))
            by_root.setdefault(vertex.root, []).append((vertex, term))
    return [_vertex(root, size, found) for root, found in by_root.items()]


def _vertex(root: Root, size: int, found: Sequence[tuple[Vertex, Term]]) -> Vertex:
    bent = [Vertex(root, v.size, terms=((v, None),), slopes=t.how) if isinstance(t.how, Slopes) else v for v, t in found]
    terms = tuple((v, t.how if isinstance(t.how, LinearMap) else None) for v, (_, t) in zip(bent, found, strict=True))
    if len(terms) == 1 and terms[0][1] is None:
        return terms[0][0]
    return Vertex(root, size, terms=terms)


def _size(y: NormedTensor, ndim: int, parts: Iterable[Vertex]) -> torch.Tensor:
    return functools.reduce(torch.add, (_times(_reached(v, ndim, y), v.root.size) for v in parts))


def _reached(v: Vertex, ndim: int, y: NormedTensor) -> torch.Tensor:
    """How far y moves by a part, for a root of size 1: of a function of each entry that is the steepest slope, exactly."""
    if v.steepest is None:
        return length(v.ellipsoid, ndim, y)
    return v.steepest * _reached(v.terms[0][0], ndim, y)


def _times(length: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return settled(length.to(size.device) * size, (length, size), 0.0)


def _few(parts: Sequence[Vertex]) -> Iterator[Vertex]:
    """Not too many parts: the shortest ones become one, which moves as far as they do together, in any direction.

    What does not move but might (parameters of a report) takes no place of what moves.
    """
    moving = [v for v in parts if v.root.size.item() > 0]
    if not moving:
        yield from _first_of(parts, _MOST_ROOTS)
        return
    yield from _first_of(moving, _MOST_ROOTS)
    yield from _first_of([v for v in parts if not v.root.size.item() > 0], _MOST_AT_REST)


def _first_of(parts: Sequence[Vertex], most: int) -> Iterator[Vertex]:
    """As many parts; the shortest ones become one, as far as they are more."""
    if len(parts) <= most:
        yield from parts
        return
    lengths = {v: _times(v.ellipsoid.length, v.root.size) for v in parts}
    # of what does not move but might, by how far it would
    kept = set(sorted(parts, key=lambda v: (-lengths[v].item(), -v.ellipsoid.length.item()))[: most - 1])
    yield from (v for v in parts if v in kept)
    rest = [v for v in parts if v not in kept]
    total = functools.reduce(torch.add, (lengths[v] for v in rest))
    yield Vertex(Root(total, all_reasons(v.root for v in rest)), rest[0].size, given=Ellipsoid.ball(rest[0].size, 1.0))
