"""Heads of all attentions of a run, and by which powers of a factor their queries and keys are to be multiplied.

A logit is ``sum_j q_j k_j`` over the entries of a head.  It is multiplied by gamma if for every j the entries of parameters in q_j are
multiplied by ``gamma^a`` and those in k_j by ``gamma^(1 - a)``.  An entry that another head has as well, or that is taken elsewhere, must
stay what it is: the other side then takes all of gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.modular.following.attentions import Attention, Part, Side
from thunder_norm.modular.following.notes import Notes

Entry = tuple[str, int]  # a parameter, and an index into those of its axes that queries or keys have

_SCALED = ("weight", "bias", "table")


@dataclass(frozen=True, eq=False)
class Head:
    """One head; of attentions that run several times with the same entries, once.

    Attributes:
        name: the parameters of its queries, and which of these heads it is.
        query: for each entry j of the head, the entries of parameters in it.
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


def heads_of(notes: Notes) -> list[Head]:
    """The heads of a run.

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
        gains = _gains(attention.query), _gains(attention.key)
        for number in range(attention.num_heads):
            query, key = (_entries(side, number, notes) for side in (attention.query, attention.key))
            can = _can_scale(attention.query), _can_scale(attention.key)
            new = Head(f"{_names(attention)}, head {number}", query, key, can, [], gains)
            found.setdefault((query, key, can), new).at.append((position, number))
    return list(found.values())


def _names(attention: Attention) -> str:
    return ", ".join(dict.fromkeys(p.name for p in attention.query.parts if p.kind == "weight"))


def _gains(side: Side) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.name for p in side.parts if p.kind == "gain"))


def _can_scale(side: Side) -> bool:
    """Whether queries, or keys, are multiplied as their entries are; tokens that are parameters themselves (``bias_k``) have none of these."""
    return side.is_homogeneous and not any(p.kind == "itself" for p in side.parts)


def _entries(side: Side, number: int, notes: Notes) -> tuple[frozenset[Entry], ...]:
    """For each entry of the head, the entries of parameters in it."""
    parts = [p for p in side.parts if p.kind in _SCALED]
    columns = [_flat(p, number, notes.shapes[p.name]) for p in parts]
    width = side.parts[0].at.shape[1]
    return tuple(frozenset((p.name, c[j]) for p, c in zip(parts, columns, strict=True) if c[j] >= 0) for j in range(width))


def _flat(part: Part, number: int, shape: Sequence[int]) -> list[int]:
    """Indices along the parts' axes as one number; negative for none."""
    found = torch.zeros(part.at.shape[1], dtype=torch.long)
    for axis, of_axis in zip(part.axes, part.at[number].long().unbind(-1), strict=True):
        found = torch.where((of_axis < 0) | (found < 0), -1, found * shape[axis] + of_axis)
    return found.tolist()


def axes_of(notes: Notes) -> dict[str, tuple[int, ...]]:
    """The axes that the entries of a parameter are counted along.

    Raises:
        NormMismatchError: those of two attentions are different.
    """
    found: dict[str, tuple[int, ...]] = {}
    for attention in notes.attentions:
        for part in (*attention.query.parts, *attention.key.parts):
            if part.kind in _SCALED and found.setdefault(part.name, part.axes) != part.axes:
                raise NormMismatchError(f"attentions take {part.name!r} along different axes")
    return found


@dataclass(frozen=True)
class Owners:
    """Which head has an entry for itself, and on which side.

    Attributes:
        of_each: entry -> (head, 0 for its query or 1 for its key); absent if it is of several, or taken elsewhere.
    """

    of_each: dict[Entry, tuple[int, int]]

    @staticmethod
    def of(heads: Sequence[Head], notes: Notes, axes: dict[str, tuple[int, ...]]) -> Owners:
        """The owners of all entries of queries and keys."""
        found: dict[Entry, tuple[int, int] | None] = {}
        for h, head in enumerate(heads):
            for side, entries in enumerate((head.query, head.key)):
                for entry in frozenset().union(*entries):
                    found[entry] = (h, side) if found.get(entry, (h, side)) == (h, side) else None
        elsewhere = _taken_elsewhere(notes, axes)
        return Owners({e: owner for e, owner in found.items() if owner is not None and not elsewhere[e[0]][e[1]]})


def _taken_elsewhere(notes: Notes, axes: dict[str, tuple[int, ...]]) -> dict[str, list[bool]]:
    """Entries that other operations take as well; what a program returns, as its cache, is none."""
    found = {name: torch.zeros([notes.shapes[name][a] for a in of_it], dtype=torch.bool) for name, of_it in axes.items()}
    for use in notes.uses:
        if use.name in axes and use.op not in ("query", "key", "output") and use.kind != "gain":
            taken = torch.ones((), dtype=torch.bool)
            for d, axis in enumerate(axes[use.name]):
                rows = use.rows.get(axis, torch.ones(notes.shapes[use.name][axis], dtype=torch.bool))
                taken = taken & rows.view([-1 if d == i else 1 for i in range(len(axes[use.name]))])
            found[use.name] |= taken
    return {name: mask.flatten().tolist() for name, mask in found.items()}


def powers(h: int, head: Head, owners: Owners, alpha: float) -> dict[Entry, float]:
    """By which powers of gamma the entries of a head are to be multiplied, so that its logits, and no others, are multiplied by gamma.

    Raises:
        NormMismatchError: there are none: its queries and its keys are normalized, shared with other heads, or taken elsewhere.
    """
    found: dict[Entry, float] = {}
    for group in _linked(head):
        sides = [frozenset().union(*(entries[j] for j in group)) for entries in (head.query, head.key)]
        if any(can and not entries for can, entries in zip(head.can_scale, sides, strict=True)):  # a product with 0
            continue
        free = [head.can_scale[side] and all(owners.of_each.get(e) == (h, side) for e in sides[side]) for side in (0, 1)]
        if not any(free):
            raise NormMismatchError(
                with_details(
                    f"the logits of {head.name} cannot be scaled alone",
                    queries=_why_not(h, head, owners, sides[0], 0),
                    keys=_why_not(h, head, owners, sides[1], 1),
                    instead="gains bound the logits of normalized queries and keys; make these smaller, by decay or by hand, for all heads that share them"
                    if any(g and not can for g, can in zip(head.gains, head.can_scale, strict=True))
                    else None,
                )
            )
        of_query = alpha if all(free) else float(free[0])
        found |= dict.fromkeys(sides[0], of_query) | dict.fromkeys(sides[1], 1 - of_query)
    return found


def _why_not(h: int, head: Head, owners: Owners, entries: frozenset[Entry], side: int) -> str:
    if not head.can_scale[side] and head.gains[side]:
        return f"they are normalized, clamped, or constants are added, after their projection: their size is in {', '.join(head.gains[side])}"
    if not head.can_scale[side]:
        return "they are not multiplied by what their projection is multiplied by: normalized, clamped, or constants are added, or tokens are parameters"
    names = sorted({e[0] for e in entries if owners.of_each.get(e) != (h, side)})
    return f"entries of {', '.join(names)} are also another head's, or taken elsewhere"


def _linked(head: Head) -> list[list[int]]:
    """The head's entries in groups: those that have an entry of a parameter in common must be multiplied alike."""
    group_of: dict[tuple[int, Entry], int] = {}
    groups: dict[int, list[int]] = {}
    for j, (query, key) in enumerate(zip(head.query, head.key, strict=True)):
        entries = [(0, e) for e in query] + [(1, e) for e in key]
        joined = sorted({group_of[e] for e in entries if e in group_of})
        target = joined[0] if joined else j
        groups.setdefault(target, [])
        for other in joined[1:]:
            groups[target] += groups.pop(other)
            group_of |= {e: target for e, g in group_of.items() if g == other}
        groups[target].append(j)
        group_of |= dict.fromkeys(entries, target)
    return list(groups.values())
