"""How attention moves near the data: by its Jacobian there, and by what is left after first order (`movements_nearby` has the plan)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.composed import Call, Term, moves, parts_of, values
from thunder_norm.core.ellipsoids import Ellipsoid, Picked, sum_of
from thunder_norm.core.local import from_data, is_from_data
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.vertices import LARGEST, Vertex, linear_map_of_fewer
from thunder_norm.core.within import moved
from thunder_norm.rules.layers._attention_away import Moving, Remainder, Rows
from thunder_norm.rules.layers._attention_between import Between
from thunder_norm.rules.layers._attention_nearby import Moved, Nearby, weights_of
from thunder_norm.rules.movement.movements_nearby import (
    Found,
    Together,
    as_points,
    by_jacobian,
    groups_of,
    linear,
    made_of,
    near,
    one_sample,
)
from thunder_norm.rules.written_out.attention_written_out import finite, scores_of

Plain = Callable[[Any], Any]


@normed_op(F.scaled_dot_product_attention).register_movement
def attention(call: Call) -> Found:
    """``softmax(s q k^T + mask) v``: what is left after first order by `Nearby.bend`, or by `Rows` and `Between` if that is less."""
    given = call.given
    q, k, v = tokens = given["query"], given["key"], given["value"]
    moving = one_sample(call, tokens)
    if moving is None or given.get("dropout_p") or q.ndim < 2:
        return None
    scale = given.get("scale")
    at = _Attention(
        tokens,
        given.get("attn_mask"),
        bool(given.get("is_causal")),
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        q.shape[-3] // k.shape[-3] if given.get("enable_gqa") else 1,
    )
    return _of(call, moving, at)


def by_weights(call: Call, weights: NormedTensor, value: Any) -> Found:
    """``softmax(z) v`` whatever made the scores z: attention of the queries z to keys that are unit vectors, ``z_i . e_j = z_ij``, which do not move.

    A score that is infinite, by a mask, stays so; it is a key that is not seen.
    """
    scores = scores_of(weights)
    if scores is None or value.ndim < 2:
        return None
    z, seen = finite(scores.moving())
    made = Call((z, value), {}, call.given, call.results, lambda z, v: torch.softmax(z, -1) @ v)
    moving = one_sample(made, (z, value)) if moves(z) else None
    if moving is None or not any(x is z for x in moving):
        return None
    keys = torch.eye(z.shape[-1], dtype=torch.float64)
    movement = _of(made, moving, _Attention((z, keys, value), seen, False, 1.0, 1))
    return None if movement is None else [None if m is None else replace(m, of=(weights,)) for m in movement]


def _of(call: Call, moving: Sequence[NormedTensor], at: _Attention) -> Found:
    q, k, _ = tokens = at.tokens
    of_scores = [x for x in moving if x is q or x is k]
    terms = linear(of_scores, at.scores) if of_scores else ()
    if terms is None:
        return None
    moves_by = points = _Moves.of(tokens, terms, at.weights.numel())
    if not is_from_data():
        with from_data():
            points = _Moves.of([as_points(x) for x in tokens], [replace(t, x=as_points(t.x)) for t in terms], at.weights.numel())
    besides = _between_any_two(at, moves_by, points)
    together = moves_by.together
    left = _left(at, moves_by, points) if moves_by.roots and together is not None and points.together is not None else None
    if (
        left is None
        or together is None
        or left.longest * together.reached.item() > besides.item() * (0.5 if is_from_data() else 1.0)
    ):
        return by_jacobian(call, moving, at.run, besides)
    first, *rest = left.within
    parts = [first, functools.reduce(sum_of, rest, Ellipsoid.ball(call.results[0].numel(), left.length))]
    parts = parts if is_from_data() else [sum_of(*parts)]
    return made_of(call, moving, lambda plain: at.damped(plain, left.damped), [(e, together.reached) for e in parts])


@dataclass(frozen=True, eq=False)
class _Moves:
    """How queries, keys and values move, and scores to first order.

    Attributes:
        tokens: these.
        roots: what scores move by, for each of the roots.
        together: how what moves for several reasons moves at once; None where nothing does.
    """

    tokens: Sequence[Any]
    roots: Sequence[Vertex]
    together: Together | None

    @classmethod
    def of(cls, tokens: Sequence[Any], terms: Sequence[Term], scores: int) -> _Moves:
        """Given the scores' terms, and how many there are."""
        parts = [v for x in tokens if moves(x) for v in near(x).parts]
        return cls(tokens, parts_of(terms, scores), Together.of(parts))

    @functools.cached_property
    def lengths(self) -> Sequence[torch.Tensor]:
        """How far the token moves that moves furthest, of queries, keys and values."""
        return [moved(near(x), groups_of(x, (-1,))) if moves(x) else torch.zeros((), dtype=torch.float64) for x in self.tokens]

    def of_scores(self, shape: torch.Size) -> list[torch.Tensor]:
        """How far each score moves by each root, of size 1."""
        return [r.ellipsoid.entries.reshape(shape) for r in self.roots]


@dataclass(frozen=True, eq=False)
class _Attention:
    """One call: queries, keys and values, what is added to scores or which are seen, s, and how many queries' heads share one of keys."""

    tokens: tuple[Any, Any, Any]
    mask: Any
    is_causal: bool
    scale: float
    repeats: int

    @functools.cached_property
    def own(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as they are."""
        return tuple(values((x.backing if isinstance(x, NormedTensor) else x).detach()) for x in self.tokens)

    @functools.cached_property
    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those, keys and values for each head of queries."""
        query, key, value = self.own
        return query, self._shared(key), self._shared(value)

    @functools.cached_property
    def bias(self) -> Any:
        """The mask, in double precision where it is added."""
        return values(self.mask.detach()) if isinstance(self.mask, torch.Tensor) and self.mask.is_floating_point() else self.mask

    @functools.cached_property
    def weights(self) -> torch.Tensor:
        """p at the data."""
        query, key, _ = self.data
        return weights_of(query, key, self.bias, self.is_causal, self.scale)

    def _shared(self, t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(self.repeats, -3) if self.repeats > 1 else t

    def scores(self, plain: Plain) -> torch.Tensor:
        """Less their mean by the weights at the data."""
        q, k, _ = self.tokens
        found = self.scale * (plain(q) @ self._shared(plain(k)).mT)
        return found - (self.weights * found).sum(-1, keepdim=True)

    def run(self, plain: Plain) -> torch.Tensor:
        """The operation."""
        q, k, v = self.tokens
        return self._of(plain(q), plain(k), plain(v), plain(self.mask))

    def damped(self, plain: Plain, by: torch.Tensor) -> torch.Tensor:
        """The operation, its derivative by scores ``1 - by / 2`` times."""
        q, k, _ = self.tokens
        return self.run(plain) - by / 2 * self._of(plain(q), plain(k), self.own[2], plain(self.mask))

    def _of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        key, value = self._shared(key), self._shared(value)
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.is_causal, scale=self.scale)


def _between_any_two(at: _Attention, moves_by: _Moves, points: _Moves) -> torch.Tensor:
    """How far the derivative's change moves the result, at most, between any two points near the data."""
    of_points = zip(points.of_scores(at.weights.shape), points.roots, strict=True)
    first = sum((a * r.root.size.detach() for a, r in of_points), torch.zeros_like(at.weights))
    by = Moved(*(n.detach().item() for n in points.lengths))
    scores = first + 2 * abs(at.scale) * by.query * by.key
    query, key, value = at.data
    nearby = Nearby.of(query, key, value, at.bias, at.is_causal, at.scale, by, scores)
    causes, *of_tokens = nearby.bend(moves_by.of_scores(at.weights.shape))
    found = [*zip(causes, (r.root.size for r in moves_by.roots), strict=True), *zip(of_tokens, moves_by.lengths, strict=True)]
    return sum((c * n for c, n in found if c), torch.zeros((), dtype=torch.float64))


def _left(at: _Attention, moves_by: _Moves, points: _Moves) -> Remainder | None:
    """What is left after first order; None where values have heads that scores have not."""
    heads = at.weights.shape[:-2]
    if torch.broadcast_shapes(heads, at.data[2].shape[:-2]) != heads:
        return None
    if is_from_data():
        return Rows(*_rows(at, moves_by)).found()
    with from_data():
        of_points = Rows(*_rows(at, points))
    return Between(*_rows(at, moves_by), of_points).found()


def _rows(at: _Attention, by: _Moves) -> tuple[Moving, Moving, Moving, torch.Tensor, Ellipsoid, float]:
    """What `Rows` are made of."""
    together = by.together
    assert together is not None, "something moves"
    factors = _factors(at, together) if is_from_data() and by.tokens is at.tokens else (None, None, None)
    query, key, value = (
        Moving.of(t, together.within(near(x).parts) if moves(x) else None, at.weights.shape[:-2], n, f)
        for x, t, n, f in zip(by.tokens, at.own, (1, at.repeats, at.repeats), factors, strict=True)
    )
    return query, key, value, at.weights, together.within(by.roots), abs(at.scale)


def _factors(at: _Attention, by: Together) -> Sequence[torch.Tensor | None]:
    """What queries, keys and values are of the vector that all of them move by, a matrix each; None where they are too many, or that is no number."""
    sizes = [t.numel() for t in at.own]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if sum(sizes) > LARGEST:
        return (None,) * len(sizes)
    numbers = torch.arange(sum(sizes))
    terms = [
        Term(x, Picked(torch.where((numbers >= start) & (numbers < start + size), numbers - start, -1)))
        for x, size, start in zip(at.tokens, sizes, starts, strict=True)
        if moves(x)
    ]
    root = _factor(parts_of(terms, len(numbers)), by)
    return root.split(sizes) if bool(root.isfinite().all()) else (None,) * len(sizes)


def _factor(parts: Sequence[Vertex], by: Together) -> torch.Tensor:
    """R, for movements ``R u`` that these parts are in together, u of at most unit length; of few columns, where all are the same map of fewer entries.

    What is done for each entry of the result takes the square of their number.
    """
    fewer = [f for v in parts if (f := linear_map_of_fewer(v)) is not None]
    is_same = len(fewer) == len(parts) and all(torch.equal(matrix, fewer[0][1]) for _, matrix in fewer)
    within = by.within([v for v, _ in fewer] if is_same else parts)
    values, vectors = torch.linalg.eigh(within.cov.detach())
    # no less than the covariance, whatever was rounded
    values = values.clamp(min=0) + 1e-12 * values[-1].abs()
    root = vectors * (values.sqrt() * (within.scale * (1 + 1e-9)))
    return fewer[0][1] @ root if is_same else root
