"""Attentions of a program: which entries of which parameters make the queries and the keys of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_norm.modular.following.strands import Followed, Kind, Score, is_constant_along

_MASKED = -9000.0  # what is added to a logit that counts for nothing; positions' own biases are not that large


@dataclass(frozen=True, eq=False)
class Part:
    """A term of all queries, or keys.

    Attributes:
        name: the parameter.
        kind: how it came in.
        axes: of the parameter.
        at: [heads, entries of a head, axes], the indices; -1 where an entry has no such term.
    """

    name: str
    kind: Kind
    axes: tuple[int, ...]
    at: torch.Tensor


@dataclass(frozen=True, eq=False)
class Side:
    """The queries of an attention, or its keys.

    Attributes:
        parts: their terms.
        is_homogeneous: whether they are multiplied by c if these are.
    """

    parts: tuple[Part, ...]
    is_homogeneous: bool


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a run.

    Attributes:
        query: by head.
        key: by head; heads that share a key have the same entries there.
        num_heads: how many.
        largest: [heads], the largest logit that a softmax saw, without what was added to logits; None without data.
        problem: why nothing is known of the heads, if so.
    """

    query: Side
    key: Side
    num_heads: int
    largest: torch.Tensor | None = None
    problem: str = ""

    @staticmethod
    def of(score: Score, logits: torch.Tensor) -> Attention:
        """The attention whose softmax takes `logits`."""
        sides = [_rows(score.query), _rows(score.key)]
        if None in sides:
            empty = Side((), False)
            return Attention(empty, empty, 0, None, "which entries make a query or a key differs between tokens")
        (query, q_at), (key, k_at) = sides  # type: ignore[misc]
        together = torch.cat([q_at, k_at], 1)
        _, inverse = torch.unique(together, dim=0, return_inverse=True)
        order = _order_of_first(inverse)
        first = torch.tensor([int((inverse == h).nonzero()[0, 0]) for h in order])
        of_n = torch.empty(len(order), dtype=torch.long)
        of_n[torch.tensor(order)] = torch.arange(len(order))
        heads = of_n[inverse]
        return Attention(
            _of_heads(query, first, score.query.is_homogeneous),
            _of_heads(key, first, score.key.is_homogeneous),
            len(order),
            None if logits.is_meta else _largest(score, logits, heads, len(order)),
        )


def _order_of_first(inverse: torch.Tensor) -> list[int]:
    return list(dict.fromkeys(inverse.tolist()))


def _of_heads(parts: Sequence[Part], first: torch.Tensor, is_homogeneous: bool) -> Side:
    return Side(tuple(Part(p.name, p.kind, p.axes, p.at[first]) for p in parts), is_homogeneous)


def _rows(state: Followed) -> tuple[list[Part], torch.Tensor] | None:
    """The terms of [n, tokens, d], and all their indices as one table [n, ...]; None if tokens differ."""
    parts = []
    for strand in state.strands:
        for labels in strand.labels:
            axes = tuple(sorted(labels))
            if not all(is_constant_along(labels[a], 1) for a in axes):
                return None
            if axes:
                parts.append(Part(strand.name, strand.kind, axes, torch.stack([labels[a][:, 0] for a in axes], -1)))
    if not parts:
        return None
    return parts, torch.cat([p.at.flatten(1) for p in parts], 1)


def _largest(score: Score, logits: torch.Tensor, heads: torch.Tensor, num_heads: int) -> torch.Tensor | None:
    if score.raw.shape != logits.shape or score.ids.shape != logits.shape:
        return None
    raw, limit = score.raw.double(), torch.finfo(logits.dtype).min / 4
    is_masked = (logits <= limit) | (logits.double() - raw <= _MASKED)  # of NaN neither
    of_each = raw.masked_fill(is_masked, -torch.inf).flatten().cpu()
    at = heads[score.ids.flatten().long()]
    return torch.full((num_heads,), -torch.inf, dtype=torch.float64).scatter_reduce(0, at, of_each, "amax")
