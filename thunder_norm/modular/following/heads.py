"""Heads of all attentions of a run, and by which powers of a factor their queries and keys are to be multiplied.

A logit is ``sum_j q_j k_j`` over the entries of a head.  It is multiplied by gamma if for every j the entries of parameters in q_j are
multiplied by ``gamma^a`` and those in k_j by ``gamma^(1 - a)``.  Of normalized queries and keys these are entries of gains.  An entry that
another head has as well must stay what it is, and the other side then takes all of gamma; where both sides have such entries (gains that
heads share), the heads that share them are multiplied by one gamma together.  What multiplies queries and keys alike takes its root.  An
entry that is taken elsewhere must stay what it is, and so must those of frozen parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.modular.following.attentions import Attention, Part, Side
from thunder_norm.modular.following.notes import Notes
from thunder_norm.modular.following.strands import Made

Entry = tuple[str, int]  # a parameter, and an index into those of its axes that queries or keys have


@dataclass(frozen=True, eq=False)
class Head:
    """One head; of attentions that run several times with the same entries, once.

    Attributes:
        name: the parameters of its queries, and which of these heads it is.
        query: for each entry j of the head, the entries of parameters that multiply it.
        key: the same of its key.
        can_scale: whether queries, and keys, are multiplied as their entries are.
        at: of attentions: the position, and the number of the head there.
        gains: what queries, and keys, are multiplied by entry by entry.
    """

    name: str
    query: tuple[frozenset[Entry], ...]
    key: tuple[frozenset[Entry], ...]
    can_scale: tuple[bool, bool]
    at: list[tuple[int, int]]
    gains: tuple[tuple[str, ...], tuple[str, ...]]


def heads_of(notes: Notes, frozen: Set[str]) -> list[Head]:
    """The heads of a run.

    Args:
        notes: of the run.
        frozen: parameters that nothing multiplies.

    Raises:
        NormMismatchError: of an attention it is not known which entries of parameters make a head.
    """
    found: dict[object, Head] = {}
    for position, attention in enumerate(notes.attentions):
        if attention.problem or not attention.num_heads:
            raise NormMismatchError(
                with_details(
                    "the heads of an attention are not known",
                    attention=f"number {position + 1} of {len(notes.attentions)}, of {_names(attention) or 'no parameters'}",
                    why=attention.problem,
                )
            )
        sides = attention.query, attention.key
        gains = _gains(attention.query), _gains(attention.key)
        can = _can_scale(attention.query, frozen), _can_scale(attention.key, frozen)
        mixed = range(attention.num_mixed)  # heads that a matrix makes of others are of all that these are of
        width = next(p.at.shape[1] for side in sides for p in side.parts)
        for number in mixed or range(attention.num_heads):
            of = list(range(attention.num_heads)) if mixed else [number]
            query, key = _without_nothing(*(_entries(side, width, of, notes, lambda p: p.scales) for side in sides))
            new = Head(f"{_names(attention, of)}, head {number}", query, key, can, [], gains)
            all_of_it = _without_nothing(*(_entries(side, width, of, notes, lambda p: True) for side in sides))
            found.setdefault((query, key, can, all_of_it, bool(mixed) and number), new).at.append((position, number))
    return list(found.values())


def _without_nothing(
    query: tuple[frozenset[Entry], ...], key: tuple[frozenset[Entry], ...]
) -> tuple[tuple[frozenset[Entry], ...], tuple[frozenset[Entry], ...]]:
    """Both sides without places where neither has entries: those of other terms, where logits of one head are of several products."""
    there = [j for j, pair in enumerate(zip(query, key, strict=True)) if any(pair)]
    return tuple(query[j] for j in there), tuple(key[j] for j in there)


def _names(attention: Attention, numbers: Sequence[int] | slice = slice(None)) -> str:
    """The parameters of the queries of some heads."""
    weights = (p for p in attention.query.parts if p.kind == "weight")
    return ", ".join(dict.fromkeys(p.name for p in weights if not p.axes or (p.at[numbers] >= 0).any()))


def _gains(side: Side) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.name for p in side.parts if p.kind == "gain"))


def _can_scale(side: Side, frozen: Set[str]) -> bool:
    """Whether queries, or keys, are multiplied as their entries are; tokens that are parameters themselves (``bias_k``) have none of these."""
    scaling = {p.name for p in side.parts if p.scales}
    is_frozen = bool(scaling) and scaling <= frozen
    return side.is_scaled and not is_frozen and not any(p.kind == "itself" for p in side.parts)


def _entries(
    side: Side, width: int, numbers: Sequence[int], notes: Notes, chosen: Callable[[Part], bool]
) -> tuple[frozenset[Entry], ...]:
    """For each of the entries of heads, `width` each, the entries of parameters in it, of some of the parts."""
    parts = [p for p in side.parts if p.kind != "itself" and chosen(p)]
    columns = [[i for n in numbers for i in _flat(p.axes, p.at[n], notes.shapes[p.name])] for p in parts]
    of_each = range(width * len(numbers))
    return tuple(frozenset((p.name, c[j]) for p, c in zip(parts, columns, strict=True) if c[j] >= 0) for j in of_each)


def _flat(axes: Sequence[int], at: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Indices along the axes as one number; negative for none."""
    found = torch.zeros(len(at), dtype=torch.long)
    for axis, of_axis in zip(axes, at.long().unbind(-1), strict=True):
        found = torch.where((of_axis < 0) | (found < 0), -1, found * shape[axis] + of_axis)
    return found.tolist()


@dataclass(frozen=True, eq=False)
class Scaled:
    """The parameters that multiply queries or keys.

    Attributes:
        axes: name -> the axes that its entries are counted along.
        made: name -> what the program makes of it before all else, and they multiply.
    """

    axes: dict[str, tuple[int, ...]]
    made: dict[str, Made]

    @staticmethod
    def of(notes: Notes) -> Scaled:
        """Those of a run.

        Raises:
            NormMismatchError: those of two attentions are different.
        """
        axes: dict[str, tuple[int, ...]] = {}
        made: dict[str, Made] = {}
        for attention in notes.attentions:
            for part in (*attention.query.parts, *attention.key.parts):
                if part.scales and part.kind != "itself":
                    if axes.setdefault(part.name, part.axes) != part.axes:
                        raise NormMismatchError(f"attentions take {part.name!r} along different axes")
                    if made.setdefault(part.name, part.made) != part.made:
                        raise NormMismatchError(
                            f"different things are made of {part.name!r} before it multiplies queries or keys"
                        )
        return Scaled(axes, made)


@dataclass(frozen=True)
class Owners:
    """Which heads have an entry, and on which side.

    Attributes:
        of_each: entry -> {(head, 0 for its query or 1 for its key)}; absent if it is taken elsewhere, or frozen.
    """

    of_each: dict[Entry, frozenset[tuple[int, int]]]

    @staticmethod
    def of(heads: Sequence[Head], notes: Notes, axes: Mapping[str, tuple[int, ...]], frozen: Set[str]) -> Owners:
        """The owners of all entries that multiply queries and keys, but those of frozen parameters."""
        found: dict[Entry, set[tuple[int, int]]] = {}
        for h, head in enumerate(heads):
            for side, entries in enumerate((head.query, head.key)):
                for entry in frozenset().union(*entries):
                    found.setdefault(entry, set()).add((h, side))
        elsewhere = _taken_elsewhere(notes, axes)
        return Owners({e: frozenset(owners) for e, owners in found.items() if e[0] not in frozen and not elsewhere[e[0]][e[1]]})

    def heads(self, entries: Iterable[Entry], sides: Sequence[int]) -> frozenset[int] | None:
        """The heads that have some of these entries; None if one of them is on another side of a head, or taken elsewhere."""
        found: set[int] = set()
        for entry in entries:
            owners = self.of_each.get(entry)
            if owners is None or any(of not in sides for _, of in owners):
                return None
            found |= {h for h, _ in owners}
        return frozenset(found)


def _taken_elsewhere(notes: Notes, axes: Mapping[str, tuple[int, ...]]) -> dict[str, list[bool]]:
    """Entries that other operations take as well, or that are in queries or keys which they do not multiply.

    What a program returns, as its cache, is none.
    """
    shapes = {name: [notes.shapes[name][a] for a in of_it] for name, of_it in axes.items()}
    found = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for use in notes.uses:
        if use.name in axes and use.op not in ("query", "key", "output"):
            taken = torch.ones((), dtype=torch.bool)
            for d, axis in enumerate(axes[use.name]):
                rows = use.rows.get(axis, torch.ones(notes.shapes[use.name][axis], dtype=torch.bool))
                taken = taken & rows.view([-1 if d == i else 1 for i in range(len(axes[use.name]))])
            found[use.name] |= taken
    for part in (p for a in notes.attentions for p in (*a.query.parts, *a.key.parts)):
        if part.name in axes and not part.scales:
            at = [i for i in _flat(part.axes, part.at.flatten(0, 1), notes.shapes[part.name]) if i >= 0]
            found[part.name].view(-1)[at if part.axes == axes[part.name] else slice(None)] = True
    return {name: mask.flatten().tolist() for name, mask in found.items()}


@dataclass(frozen=True, eq=False)
class _Group:
    """Entries that must be multiplied alike; first of queries, then of keys.

    Attributes:
        can_scale: whether they multiply these.
        entries: of parameters.
    """

    can_scale: tuple[bool, bool]
    entries: tuple[frozenset[Entry], frozenset[Entry]]

    def of_sides(self, owners: Owners) -> list[frozenset[int] | None]:
        """Of each side the heads that have its entries; None if these cannot be multiplied, or not without the other side's."""
        sides = enumerate(zip(self.can_scale, self.entries, strict=True))
        return [owners.heads(entries, [side]) if can else None for side, (can, entries) in sides]

    def of_both(self, owners: Owners) -> frozenset[int] | None:
        """The heads that have entries of either side; None if not all of them can be multiplied."""
        return owners.heads(frozenset().union(*self.entries), [0, 1]) if all(self.can_scale) else None


def components(heads: Sequence[Head], owners: Owners) -> list[tuple[int, ...]]:
    """The heads that must be multiplied by one gamma, most of them alone; without those whose queries and keys nothing multiplies.

    Raises:
        NormMismatchError: there are no others, or what multiplies the queries and keys of one is taken elsewhere.
    """
    can = [h for h, head in enumerate(heads) if any(head.can_scale)]
    together = {h: (h,) for h in can or range(len(heads))}
    waiting = deque(together.values())
    while waiting:
        some = waiting.popleft()
        if together[some[0]] != some:  # part of a larger one by now
            continue
        more = _sharing(heads, some, owners)
        if more:
            joined = tuple(sorted({other for h in (*some, *more) for other in together[h]}))
            together |= dict.fromkeys(joined, joined)
            waiting.append(joined)
    return list(dict.fromkeys(together.values()))


def _sharing(heads: Sequence[Head], some: Sequence[int], owners: Owners) -> frozenset[int]:
    """Heads that must be multiplied together with some; none if those can be alone."""
    found: set[int] = set()
    for group in _groups([heads[h] for h in some]):
        known = [owning for owning in group.of_sides(owners) if owning is not None]
        both = group.of_both(owners)
        if not known and both is None:
            head = heads[some[0]]
            raise NormMismatchError(
                with_details(
                    f"the logits of {head.name} cannot be scaled",
                    queries=_why_not(head, group, owners, 0),
                    keys=_why_not(head, group, owners, 1),
                )
            )
        found |= min(known or [both or frozenset()], key=lambda owning: len(owning.difference(some)))
    return frozenset(found.difference(some))


def powers(heads: Sequence[Head], some: Sequence[int], owners: Owners, alpha: float) -> dict[Entry, float]:
    """By which powers of gamma entries are to be multiplied, so that the logits of some heads, and no others, are multiplied by gamma.

    Args:
        heads: all of them.
        some: of these, one of `components`.
        owners: of all entries.
        alpha: the queries' share.
    """
    found: dict[Entry, float] = {}
    for group in _groups([heads[h] for h in some]):
        free = [owning is not None and owning.issubset(some) for owning in group.of_sides(owners)]
        of_query = alpha if all(free) else float(free[0]) if any(free) else 0.5  # of both sides at once
        found |= dict.fromkeys(group.entries[0], of_query) | dict.fromkeys(group.entries[1], 1 - of_query)
    return {entry: power for entry, power in found.items() if power}


def _why_not(head: Head, group: _Group, owners: Owners, side: int) -> str:
    if group.can_scale[side]:
        names = sorted({e[0] for e in group.entries[side] if owners.heads([e], [side]) is None})
        return f"entries of {', '.join(names)} are on the other side as well, taken elsewhere, or frozen"
    which = f"; {', '.join(head.gains[side])} came before that" if head.gains[side] else ""
    return (
        f"nothing multiplies them: they are normalized, clamped, frozen, or constants are added, or tokens are parameters{which}"
    )


def _groups(heads: Sequence[Head]) -> list[_Group]:
    """The entries of heads in groups: those that have an entry of a parameter in common must be multiplied alike."""
    group_of: dict[Entry, int] = {}
    groups: dict[int, list[_Group]] = {}
    for j, pair in enumerate(_pairs(heads)):
        entries = frozenset().union(*pair.entries)
        joined = sorted({group_of[e] for e in entries if e in group_of})
        target = joined[0] if joined else j
        groups.setdefault(target, [])
        for other in joined[1:]:
            groups[target] += groups.pop(other)
            group_of |= {e: target for e, g in group_of.items() if g == other}
        groups[target].append(pair)
        group_of |= dict.fromkeys(entries, target)
    return [
        _Group(
            (all(p.can_scale[0] for p in pairs), all(p.can_scale[1] for p in pairs)),
            (frozenset().union(*(p.entries[0] for p in pairs)), frozenset().union(*(p.entries[1] for p in pairs))),
        )
        for pairs in groups.values()
    ]


def _pairs(heads: Sequence[Head]) -> list[_Group]:
    """What each query entry and its key entry have, without products with 0."""
    pairs = [_Group(head.can_scale, pair) for head in heads for pair in zip(head.query, head.key, strict=True)]
    return [p for p in pairs if not any(can and not of_it for can, of_it in zip(p.can_scale, p.entries, strict=True))]
