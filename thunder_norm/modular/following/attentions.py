"""Attentions of a program: which entries of which parameters make the queries and the keys of each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thunder_norm.modular.following.strands import NOTHING, Followed, Kind, Made, Product, Scale, Score, is_constant_along

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
        made: what the program makes of the parameter before all else.
    """

    name: str
    kind: Kind
    axes: tuple[int, ...]
    at: torch.Tensor
    scales: bool = True
    made: Made = Made()


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
        largest: [heads], the largest logit that a softmax saw, without what was added to logits; None without data, or if it is not known.
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
        rows = [_Rows.of(product) for product in score.products]
        terms, of_entry = _terms(rows, score.ids)
        widths = [product.shape[-1] for product in score.products]
        query = _side([product.query for product in score.products], widths, [of.queries for of in rows], terms)
        key = _side([product.key for product in score.products], widths, [of.keys for of in rows], terms)
        if not query.parts and not key.parts:
            return Attention(empty, empty, 0, problem="no parameter's entries are followed to its queries or its keys")
        query, key = _without_repetitions(query, key)
        _, inverse = torch.unique(_table(query, key), dim=0, return_inverse=True)
        order = _order_of_first(inverse)
        first = torch.tensor([int((inverse == h).nonzero()[0, 0]) for h in order])
        heads, num_heads = torch.empty(len(order), dtype=torch.long), len(order)
        heads[torch.tensor(order)] = torch.arange(len(order))
        heads = heads[inverse]
        if score.num_mixed:
            of_entry, heads, num_heads = score.ids[0], torch.arange(score.num_mixed), score.num_mixed
        is_unknown = logits.is_meta or score.is_stretched
        largest = None if is_unknown else _largest(score.raw, logits, heads, of_entry, num_heads, is_shifted)
        return Attention(_of_heads(query, first), _of_heads(key, first), len(order), largest, score.num_mixed)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows of a product are of one head: those of one n, or, if queries there have no entries in common, each of these alone.

    So it is where heads are among the tokens (``einsum`` puts there what keys do not have: heads that share keys).  Where keys have as
    many among theirs, these are channels of one head that attend to each other.

    Attributes:
        numbers: [n, tokens], of which group a row is; keys', where heads are among these.
        queries: [groups, some], the rows of each, among ``n * tokens``; some several times where others have more.
        keys: [groups, tokens], the same of keys.
    """

    numbers: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    @staticmethod
    def of(product: Product) -> _Rows:
        """Those of a product."""
        n, tokens, _ = product.shape
        one, other = (product.key, product.query) if product.is_of_keys else (product.query, product.key)
        number = torch.arange(n).view(-1, 1).expand(n, tokens)
        of_one = connected(one, n)
        if of_one is not None and connected(other, n) is None:
            number = torch.unique(of_one, return_inverse=True)[1].view(n, tokens)
        flat = number.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount()
        at = torch.arange(int(counts.max())).minimum(counts.view(-1, 1) - 1) + (counts.cumsum(0) - counts).view(-1, 1)
        num_others = next((t.shape[1] for s in other.strands for of in s.labels for t in of.values()), 0)
        rows = order[at], order[at[:, :1]] // tokens * num_others + torch.arange(num_others)
        return _Rows(number, *(reversed(rows) if product.is_of_keys else rows))


def connected(state: Followed, n: int) -> torch.Tensor | None:
    """For rows [n, tokens] of queries or keys a number, the same of those that have entries in common; None if all of each n have."""
    labels = [(s.name, of) for s in state.strands if s.kind == "weight" for of in s.labels if of]
    if all(is_constant_along(t, 1) for _, of in labels for t in of.values()):
        return None
    tokens = next(t.shape[1] for _, of in labels for t in of.values())
    row = torch.arange(n * tokens).view(n, tokens, 1)
    nodes, entries, total = [], [], 0
    for name in sorted({name for name, _ in labels}):
        own = [of for other, of in labels if other == name]
        lengths = {a: max(int(of[a].max()) + 1 for of in own if a in of) for of in own for a in of}
        for of in own:
            entry, is_there = torch.zeros((), dtype=torch.long), torch.ones((), dtype=torch.bool)
            for a, length in lengths.items():
                t = of.get(a, torch.zeros((), dtype=torch.int32))
                entry, is_there = entry * length + t, is_there & (t >= 0)
            nodes.append(row.expand(is_there.shape)[is_there])
            entries.append((total + entry)[is_there])
        total += math.prod(lengths.values())
    at = torch.cat(nodes)
    of_n = at // tokens * total + torch.cat(entries)
    numbers = row.flatten()
    while True:  # the least number goes from rows to entries and from these to rows, until it is everywhere
        least = torch.full((n * total,), n * tokens).scatter_reduce(0, of_n, numbers[at], "amin")
        found = numbers.scatter_reduce(0, at, least[of_n], "amin")
        if torch.equal(found, numbers):
            break
        numbers = found
    has_some = (
        torch.zeros(n * tokens, dtype=torch.bool).scatter(0, at, True).view(n, tokens)
    )  # others go with the first of their n
    numbers = numbers.view(n, tokens)
    first = torch.where(has_some, numbers, n * tokens).amin(1, keepdim=True)
    first = torch.where(first < n * tokens, first, row[:, 0])
    numbers = torch.where(has_some, numbers, first)
    return None if torch.equal(numbers, first.expand(n, tokens)) else numbers


def _terms(rows: Sequence[_Rows], ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The different sums that logits are: [sums, products] groups of rows, with NOTHING for none; and which sum each logit is, or NOTHING."""
    of_each = []
    for of, t in zip(rows, ids, strict=True):
        numbers = torch.nn.functional.pad(of.numbers.flatten(), (0, 1), value=NOTHING)
        found = numbers[(t[..., :1] if is_constant_along(t, t.ndim - 1) else t).long()]
        of_each.append(found[..., :1] if is_constant_along(found, t.ndim - 1) else found)
    if len(of_each) == 1:
        return torch.arange(len(rows[0].queries)).view(-1, 1), of_each[0]
    code = torch.zeros((), dtype=torch.long)
    for of, found in zip(rows, of_each, strict=True):
        code = code * (len(of.queries) + 1) + found + 1
    codes, of_entry = torch.unique(code, return_inverse=True)
    terms = []
    for of in reversed(rows):
        terms.insert(0, codes % (len(of.queries) + 1) - 1)
        codes = codes // (len(of.queries) + 1)
    found = torch.stack(terms, -1)
    # an entry without some of the terms (what a relative shift brings from elsewhere) is of the head that has them
    is_there = found >= 0
    is_part = ((found.unsqueeze(1) == found) | ~is_there.unsqueeze(1)).all(-1) & is_there.any(-1, keepdim=True)
    whole = torch.where(is_part, is_there.sum(-1), -1).argmax(1)
    of_entry = torch.where(is_there.any(-1), whole, len(found))[of_entry]
    places = torch.arange(of_entry.numel())
    first = torch.full((len(found) + 1,), len(places)).scatter_reduce(0, of_entry.flatten(), places, "amin")[:-1]
    order = first.argsort()[: int((first < len(places)).sum())]
    numbers = torch.full((len(found) + 1,), NOTHING).scatter(0, order, torch.arange(len(order)))
    return found[order], numbers[of_entry]


def _order_of_first(inverse: torch.Tensor) -> list[int]:
    return list(dict.fromkeys(inverse.tolist()))


def _of_heads(side: Side, first: torch.Tensor) -> Side:
    return replace(side, parts=tuple(replace(p, at=p.at[first]) for p in side.parts))


def _table(query: Side, key: Side) -> torch.Tensor:
    return torch.cat([p.at.flatten(1) for p in (*query.parts, *key.parts)], 1)


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


def _side(states: Sequence[Followed], widths: Sequence[int], rows: Sequence[torch.Tensor], terms: torch.Tensor) -> Side:
    """The factors of several products, one after the other along the entries of a head.

    Args:
        states: of each product the factor [n, tokens, d].
        widths: of each d.
        rows: of each [groups, some], which of all ``n * tokens`` rows are in a group.
        terms: [sums, products], the groups that are summed; NOTHING for none.
    """
    parts: list[Part] = []
    for i, state in enumerate(states):
        before, after = sum(widths[:i]), sum(widths[i + 1 :])
        for strand in state.strands:
            for labels in strand.labels:
                axes = tuple(sorted(labels))
                if axes:
                    patterns = _patterns(torch.stack([labels[a] for a in axes], -1), rows[i])
                else:  # one for all
                    patterns = [torch.zeros(len(rows[i]), widths[i], 0, dtype=torch.int32)]
                padded = [torch.nn.functional.pad(t, (0, 0, before, after, 0, 1), value=NOTHING) for t in patterns]
                parts += [Part(strand.name, strand.kind, axes, t[terms[:, i]], strand.scales, strand.made) for t in padded]
    is_scaled = all(state.scale is not Scale.NOTHING for state in states)
    return Side(tuple(parts), is_scaled and bool(parts))


def _patterns(at: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """The different indices that the rows of groups have in a place, each [groups, d, axes], with none where others have more.

    Rows differ in places that a rotary embedding leaves out, where parameters are of tokens, and where channels are the tokens.

    Args:
        at: [n, tokens, d, axes].
        rows: [groups, some], of ``n * tokens``.
    """
    if all(is_constant_along(t, 1) for t in at.unbind(-1)):
        return [at[rows[:, 0] // at.shape[1], 0]]
    chosen = at.flatten(0, 1)[rows]
    distinct, number = torch.unique(chosen.flatten(0, 2), dim=0, return_inverse=True)
    in_order = number.view(chosen.shape[:3]).sort(1).values
    is_new = torch.nn.functional.pad(in_order[:, 1:] != in_order[:, :-1], (0, 0, 1, 0), value=True)
    place = is_new.cumsum(1) - 1
    found = torch.full((len(rows), int(place.max()) + 1, at.shape[2]), len(distinct)).scatter_(1, place, in_order)
    return list(torch.nn.functional.pad(distinct, (0, 0, 0, 1), value=NOTHING)[found].unbind(1))


def _largest(
    raw: torch.Tensor, logits: torch.Tensor, heads: torch.Tensor, of_entry: torch.Tensor, num_heads: int, is_shifted: bool
) -> torch.Tensor | None:
    if raw.shape != logits.shape:
        return None
    raw, limit = raw.double(), torch.finfo(logits.dtype).min / 4
    more = logits.double() - raw
    more = more - more.amax(-1, keepdim=True) if is_shifted else more
    is_masked = (logits <= limit) | (more <= _MASKED)  # of NaN neither
    of_entry = of_entry.expand(raw.shape).flatten().long()
    of_each = raw.masked_fill(is_masked, -torch.inf).flatten().cpu().masked_fill(of_entry < 0, -torch.inf)
    at = heads[of_entry.clamp(min=0)]
    return torch.full((num_heads,), -torch.inf, dtype=torch.float64).scatter_reduce(0, at, of_each, "amax")
