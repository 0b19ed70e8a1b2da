"""Attentions of a program: which entries of which parameters make the queries and the keys of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thunder_norm.modular.following.strands import NOTHING, Followed, Kind, Scale, Score, is_constant_along

_MASKED = -9000.0  # what is added to a logit that counts for nothing; positions' own biases are not that large


@dataclass(frozen=True, eq=False)
class Part:
    """A term of all queries, or keys.

    Attributes:
        name: the parameter.
        kind: how it came in.
        axes: of the parameter.
        at: [heads, entries of a head, axes], the indices; -1 where an entry has no such term.
        scales: whether the side is multiplied by c if this and the others of which it is said are.
        offset: what the program adds to the parameter before all else.
    """

    name: str
    kind: Kind
    axes: tuple[int, ...]
    at: torch.Tensor
    scales: bool = True
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Side:
    """The queries of an attention, or its keys.

    Attributes:
        parts: their terms.
        is_scaled: whether they are multiplied by c if those of these are that say so.
    """

    parts: tuple[Part, ...]
    is_scaled: bool


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a run.

    Attributes:
        query: by head.
        key: by head; heads that share a key have the same entries there.
        num_heads: how many.
        largest: [heads], the largest logit that a softmax saw, without what was added to logits; None without data.
        num_mixed: if the softmax saw heads that a matrix made of these, how many; 0 otherwise.  `largest` is of them.
        problem: why nothing is known of the heads, if so.
    """

    query: Side
    key: Side
    num_heads: int
    largest: torch.Tensor | None = None
    num_mixed: int = 0
    problem: str = ""

    @staticmethod
    def of(score: Score, logits: torch.Tensor, is_shifted: bool = False) -> Attention:
        """The attention whose softmax takes `logits`, of which each row may have been shifted (by its largest)."""
        empty = Side((), False)
        if score.problem:
            return Attention(empty, empty, 0, problem=score.problem)
        shapes = [product.shape for product in score.products]
        query = _side([product.query for product in score.products], shapes)
        key = _side([product.key for product in score.products], shapes)
        if not query.parts or not key.parts:
            return Attention(empty, empty, 0, problem="no parameter's entries are followed to its queries and its keys")
        query, key = _without_repetitions(query, key)
        _, inverse = torch.unique(torch.cat([_table(query), _table(key)], 1), dim=0, return_inverse=True)
        order = _order_of_first(inverse)
        first = torch.tensor([int((inverse == h).nonzero()[0, 0]) for h in order])
        of_n = torch.empty(len(order), dtype=torch.long)
        of_n[torch.tensor(order)] = torch.arange(len(order))
        heads = torch.arange(score.num_mixed) if score.num_mixed else of_n[inverse]
        largest = None if logits.is_meta else _largest(score, logits, heads, score.num_mixed or len(order), is_shifted)
        return Attention(_of_heads(query, first), _of_heads(key, first), len(order), largest, score.num_mixed)


def _order_of_first(inverse: torch.Tensor) -> list[int]:
    return list(dict.fromkeys(inverse.tolist()))


def _of_heads(side: Side, first: torch.Tensor) -> Side:
    return replace(side, parts=tuple(replace(p, at=p.at[first]) for p in side.parts))


def _table(side: Side) -> torch.Tensor:
    return torch.cat([p.at.flatten(1) for p in side.parts], 1)


def _without_repetitions(query: Side, key: Side) -> tuple[Side, Side]:
    """The sides without entries of heads that are made of what others are made of: of channels that attend to each other all are one."""
    parts = (*query.parts, *key.parts)
    of_entries = torch.cat([p.at for p in parts], -1).transpose(0, 1).flatten(1)
    _, inverse = torch.unique(of_entries, dim=0, return_inverse=True)
    order = _order_of_first(inverse)
    if len(order) == len(inverse):
        return query, key
    first = torch.tensor([int((inverse == j).nonzero()[0, 0]) for j in order])
    query, key = (replace(s, parts=tuple(replace(p, at=p.at[:, first]) for p in s.parts)) for s in (query, key))
    return query, key


def _side(states: Sequence[Followed], shapes: Sequence[tuple[int, int]]) -> Side:
    """The terms of the factors [n, tokens, d] of several products, one after the other along d."""
    parts: list[Part] = []
    widths = [width for _, width in shapes]
    for i, state in enumerate(states):
        before, after = sum(widths[:i]), sum(widths[i + 1 :])
        for strand in state.strands:
            for labels in strand.labels:
                axes = tuple(sorted(labels))
                if axes:
                    patterns = _patterns(torch.stack([labels[a] for a in axes], -1))
                else:  # one for all
                    patterns = [torch.zeros(*shapes[i], 0, dtype=torch.int32)]
                padded = [torch.nn.functional.pad(t, (0, 0, before, after), value=NOTHING) for t in patterns]
                parts += [Part(strand.name, strand.kind, axes, t, strand.scales, strand.offset) for t in padded]
    is_scaled = all(state.scale is not Scale.NOTHING for state in states)
    return Side(tuple(parts), is_scaled)


def _patterns(at: torch.Tensor) -> list[torch.Tensor]:
    """The different indices that the tokens of [n, tokens, d, axes] have in a place, each [n, d, axes], with none where others have more.

    Tokens differ in places that a rotary embedding leaves out, where parameters are of tokens, and where channels are the tokens.
    """
    if all(is_constant_along(t, 1) for t in at.unbind(-1)):
        return [at[:, 0]]
    distinct, number = torch.unique(at.flatten(0, 2), dim=0, return_inverse=True)
    in_order = number.view(at.shape[:3]).sort(1).values
    is_new = torch.nn.functional.pad(in_order[:, 1:] != in_order[:, :-1], (0, 0, 1, 0), value=True)
    place = is_new.cumsum(1) - 1
    found = torch.full((len(at), int(place.max()) + 1, at.shape[2]), len(distinct)).scatter_(1, place, in_order)
    return list(torch.nn.functional.pad(distinct, (0, 0, 0, 1), value=NOTHING)[found].unbind(1))


def _largest(score: Score, logits: torch.Tensor, heads: torch.Tensor, num_heads: int, is_shifted: bool) -> torch.Tensor | None:
    if score.raw.shape != logits.shape or score.ids.shape != logits.shape:
        return None
    raw, limit = score.raw.double(), torch.finfo(logits.dtype).min / 4
    more = logits.double() - raw
    more = more - more.amax(-1, keepdim=True) if is_shifted else more
    is_masked = (logits <= limit) | (more <= _MASKED)  # of NaN neither
    of_each = raw.masked_fill(is_masked, -torch.inf).flatten().cpu()
    at = heads[score.ids.flatten().long()]
    return torch.full((num_heads,), -torch.inf, dtype=torch.float64).scatter_reduce(0, at, of_each, "amax")
