"""Parameters over several processes: every matrix is worked on by one rank, and all ranks move alike.

A duality map needs all of a norm's dimensions, and acts on every index of the others alike: a parameter falls into *parts*, ranges of
those others.  A rank that holds a whole part works on it where it is.  The shards of any other part go to one rank, its owner, and what
the owner makes of it comes back as shards: two exchanges for all parameters together.  Where several ranks hold the same matrix
(replicas, as under DistributedDataParallel) only one of them works on it, too; vectors are not worth sending.  Owners are chosen so
that all ranks have as much work, by a computation that is the same on all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from thunder_norm.errors import NormMismatchError, ThunderNormError, with_details
from thunder_norm.model_state.shards import Box, box, check_placement, is_spread, local
from thunder_norm.modular.duality import Ball, OperatorBall

Work = Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]]
"""What is to be done with parts: positions of their parameters, the parts -> as many tensors of the same shapes."""


@dataclass(frozen=True)
class Part:
    """What a duality map acts on by itself.

    Attributes:
        name: of the parameter.
        box: where in the parameter it is.
        pieces: the shards in it -> the ranks that hold each.
        cost: of working on it, in operations.
        owner: the rank that works on it; None if all that hold it do.
    """

    name: str
    box: Box
    pieces: dict[Box, tuple[int, ...]]
    cost: float
    owner: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each rank that holds any of it holds all of it."""
        return len(self.pieces) == 1

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(sorted(rank for ranks in self.pieces.values() for rank in ranks))

    def source(self, piece: Box) -> int:
        """The rank that sends a piece to the owner: itself, or of replicas the one in the owner's place."""
        assert self.owner is not None
        place = next((ranks.index(self.owner) for ranks in self.pieces.values() if self.owner in ranks), self.owner)
        ranks = self.pieces[piece]
        return self.owner if self.owner in ranks else ranks[place % len(ranks)]

    def slices(self, piece: Box) -> tuple[slice, ...]:
        """Where in the part a piece is."""
        return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(piece, self.box, strict=True))


@dataclass(frozen=True)
class _Route:
    """A piece that goes from one rank to another, or stays where it is."""

    part: Part
    piece: Box
    source: int
    target: int


@dataclass(frozen=True)
class _Plan:
    """What one rank does for some parameters.

    Attributes:
        here: the parts it works on.
        to_owners: what it sends and receives before.
        from_owners: what it sends and receives after.
        exchanged: the parameters of which anything moves between any ranks.
    """

    here: list[Part]
    to_owners: list[_Route]
    from_owners: list[_Route]
    exchanged: frozenset[str]


@dataclass(frozen=True)
class _Team:
    """Ranks that hold some parameters together.

    Attributes:
        group: their process group; None for this process alone.
        rank: of this process in it.
        size: how many they are.
        parts: of each parameter.
        device: where the shards are.
        plans: for the parameters that were asked for so far.
    """

    group: Any
    rank: int
    size: int
    parts: dict[str, list[Part]]
    device: torch.device
    plans: dict[tuple[str, ...], _Plan] = field(default_factory=dict)

    @staticmethod
    def of(group: Any, tensors: Mapping[str, torch.Tensor], balls: Mapping[str, Ball]) -> _Team:
        boxes = _gathered(group, {name: box(t) for name, t in tensors.items()})
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        parts = [p for name, t in tensors.items() for p in _parts(name, t, [of_rank[name] for of_rank in boxes], balls[name])]
        owned = _with_owners(parts, balls, size)
        device = local(next(iter(tensors.values()))).device
        return _Team(group, rank, size, {name: [p for p in owned if p.name == name] for name in tensors}, device)

    def collected(self, shards: Mapping[str, torch.Tensor]) -> list[tuple[Part, torch.Tensor]]:
        """The parts this rank works on."""
        plan = self._plan(tuple(shards))
        arrived: dict[int, list[tuple[Box, torch.Tensor]]] = {id(p): [] for p in plan.here}
        for route, t in self._exchange(plan, plan.to_owners, shards, lambda route: shards[route.part.name]):
            arrived[id(route.part)].append((route.piece, t))
        return [(p, shards[p.name] if p.owner is None else _assembled(p, arrived[id(p)])) for p in plan.here]

    def returned(self, shards: Mapping[str, torch.Tensor], made: Sequence[tuple[Part, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """This rank's shards of what was made of the parts, from all ranks."""
        plan = self._plan(tuple(shards))
        results = {id(p): t for p, t in made}
        back = self._exchange(
            plan, plan.from_owners, shards, lambda route: results[id(route.part)][route.part.slices(route.piece)]
        )
        return {p.name: t for p, t in made if p.owner is None} | {route.part.name: t for route, t in back}

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        if names not in self.plans:
            parts = [p for name in names for p in self.parts[name]]
            owned = [p for p in parts if p.owner is not None]
            to_owners = [_Route(p, piece, p.source(piece), p.owner) for p in owned for piece in p.pieces]
            back = [_Route(p, piece, p.owner, rank) for p in owned for piece, ranks in p.pieces.items() for rank in ranks]
            self.plans[names] = _Plan(
                [p for p in parts if self.rank in (p.holders if p.owner is None else (p.owner,))],
                [r for r in to_owners if self.rank in (r.source, r.target)],
                [r for r in back if self.rank in (r.source, r.target)],
                frozenset(r.part.name for r in (*to_owners, *back) if r.source != r.target),
            )
        return self.plans[names]

    def _exchange(
        self,
        plan: _Plan,
        routes: Sequence[_Route],
        shards: Mapping[str, torch.Tensor],
        give: Callable[[_Route], torch.Tensor],
    ) -> list[tuple[_Route, torch.Tensor]]:
        """What arrives at this rank; one collective for each dtype."""
        found = [(route, give(route)) for route in routes if route.source == route.target]
        for dtype in dict.fromkeys(t.dtype for name, t in shards.items() if name in plan.exchanged):
            some = [route for route in routes if route.source != route.target and shards[route.part.name].dtype == dtype]
            outgoing = sorted((route for route in some if route.source == self.rank), key=lambda route: route.target)
            incoming = sorted((route for route in some if route.target == self.rank), key=lambda route: route.source)
            sent = [give(route).reshape(-1) for route in outgoing]
            received = torch.empty(sum(_entries(route.piece) for route in incoming), dtype=dtype, device=self.device)
            # bytes, because not every backend knows every dtype
            dist.all_to_all_single(
                received.view(torch.uint8),
                (torch.cat(sent) if sent else received.new_empty(0)).view(torch.uint8),
                self._splits([(route.source, route.piece) for route in incoming], dtype),
                self._splits([(route.target, route.piece) for route in outgoing], dtype),
                group=self.group,
            )
            tensors = received.split([_entries(route.piece) for route in incoming]) if incoming else ()
            found += [(route, t.view(_shape(route.piece))) for route, t in zip(incoming, tensors, strict=True)]
        return found

    def _splits(self, pieces: Sequence[tuple[int, Box]], dtype: torch.dtype) -> list[int]:
        sizes = [0] * self.size
        for rank, piece in pieces:
            sizes[rank] += _entries(piece) * dtype.itemsize
        return sizes


@dataclass(frozen=True)
class Spread:
    """Parameters, the ranks that hold them, and which rank works on what.

    Attributes:
        names: of the parameters.
        teams: the smaller ones first; each parameter is one's.
    """

    names: tuple[str, ...]
    teams: tuple[_Team, ...]

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], balls: Mapping[str, Ball], group: Any = None) -> Spread | None:
        """How tensors are spread; None if this process holds all of them alone.  Collective.

        Args:
            tensors: by the same names, in the same order, on all ranks.
            balls: those of their norms.
            group: ranks that hold the same in tensors that are no DTensors.

        Raises:
            NormMismatchError: shards that do not make up a tensor, or this process is not in the group.
        """
        if group is None and not any(map(is_spread, tensors.values())):
            return None
        if group is not None and dist.get_rank(group) < 0:
            raise NormMismatchError("this process is not in the process group it was given")
        by_mesh: dict[Any, dict[str, torch.Tensor]] = {}
        for name, t in tensors.items():
            check_placement(name, t)
            by_mesh.setdefault(t.device_mesh if is_spread(t) else None, {})[name] = t
        teams = [_Team.of(group if mesh is None else _group(mesh), some, balls) for mesh, some in by_mesh.items()]
        return Spread(tuple(tensors), tuple(sorted(teams, key=lambda team: team.size)))

    def map(self, names: Sequence[str], shards: Sequence[torch.Tensor], work: Work, can_fail: bool = False) -> list[torch.Tensor]:
        """Shards of what `work` makes of the parts of tensors, each part on one rank.  Collective.

        Args:
            names: of parameters, the same on all ranks.
            shards: this rank's part of a tensor for each, in the parameter's place.
            work: what is to be done.
            can_fail: whether it may raise for some data; then all ranks do.
        """
        at = {name: i for i, name in enumerate(names)}
        of_team = [{name: shards[at[name]] for name in names if name in team.parts} for team in self.teams]
        given = [team.collected(some) for team, some in zip(self.teams, of_team, strict=True)]
        flat = [item for items in given for item in items]
        made, error = [], None
        try:
            made = work([at[part.name] for part, _ in flat], [t for _, t in flat])
        except Exception as e:  # noqa: BLE001 - raised below, where no other rank waits for this one
            error = e
        if can_fail:
            self.agree(error)
        elif error is not None:
            raise error
        results = iter(made)
        found: dict[str, torch.Tensor] = {}
        for team, some, items in zip(self.teams, of_team, given, strict=True):
            found |= team.returned(some, [(part, next(results)) for part, _ in items])
        return [found[name] if name in found else torch.empty_like(t) for name, t in zip(names, shards, strict=True)]

    def agree(self, error: Exception | None, *said: Collection[str]) -> list[list[str]]:
        """For each set of names the names that any rank said; raises on all ranks if any has an error.  Collective."""
        flags = torch.tensor([error is not None, *(name in names for names in said for name in self.names)], dtype=torch.int32)
        for team in self.teams:
            if team.group is not None:
                on_device = flags.to(team.device)
                dist.all_reduce(on_device, dist.ReduceOp.MAX, group=team.group)
                flags = on_device.cpu()
        failed, *found = flags.tolist()
        if failed:
            self._raise_everywhere(error)
        parts = [found[i * len(self.names) : (i + 1) * len(self.names)] for i in range(len(said))]
        return [[name for name, is_said in zip(self.names, part, strict=True) if is_said] for part in parts]

    def _raise_everywhere(self, error: Exception | None) -> None:
        own = None if error is None else (type(error) if isinstance(error, ThunderNormError) else RuntimeError, str(error))
        errors = {rank: said for rank, said in self._of_all_ranks(own).items() if said is not None}
        if error is not None:
            raise error
        rank, (kind, text) = min(errors.items(), key=lambda item: item[0])
        raise kind(with_details("another rank failed, and this one stops with it", **{f"rank {rank}": text}))

    def _of_all_ranks(self, own: Any) -> dict[int, Any]:
        """What each rank has, by its global number."""
        found = {dist.get_rank(): own}
        for team in self.teams:
            for other in _gathered(team.group, found):
                found |= other
        return found

    @contextlib.contextmanager
    def same_random(self, given: torch.Generator | None) -> Iterator[torch.Generator]:
        """A generator that draws the same numbers on all ranks: those of the first one's.  Collective.

        A generator that was given is in the same state everywhere afterwards; of the default ones only the first rank's moves on.
        """
        own = torch.get_rng_state() if given is None else given.get_state()
        states = self._of_all_ranks(own)
        first = min(states)
        drawing = torch.Generator() if given is None else given
        drawing.set_state(states[first])
        yield drawing
        if given is None and dist.get_rank() == first:
            torch.set_rng_state(drawing.get_state())


def _group(mesh: Any) -> Any:
    """The process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)


def _gathered(group: Any, own: Any) -> list[Any]:
    """What each rank of a group has."""
    if group is None:
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def _parts(name: str, t: torch.Tensor, boxes: Sequence[Box | None], of_kind: Ball) -> list[Part]:
    """The parts of a parameter, from where each rank's shard of it is.

    Raises:
        NormMismatchError: the shards do not make up the tensor.
    """
    holders: dict[Box, list[int]] = {}
    for rank, shard in enumerate(boxes):
        if shard is not None and _entries(shard):
            holders.setdefault(shard, []).append(rank)
    if None in boxes or sum(map(_entries, holders)) != t.numel():
        placements = getattr(t, "placements", "no DTensor")
        raise NormMismatchError(
            with_details(
                f"the shards of {name!r} are no ranges of indices that make up the tensor",
                shape=list(t.shape),
                placements=placements,
            )
        )
    needed = {d + t.ndim for d in of_kind.elem_dims}
    by_others: dict[Any, dict[Box, tuple[int, ...]]] = {}
    for shard, ranks in holders.items():
        others = tuple(along for d, along in enumerate(shard) if d not in needed)
        by_others.setdefault(others, {})[shard] = tuple(ranks)
    return [_part(name, of_kind, pieces) for pieces in by_others.values()]


def _part(name: str, of_kind: Ball, pieces: dict[Box, tuple[int, ...]]) -> Part:
    hull = tuple((min(a for a, _ in ranges), max(b for _, b in ranges)) for ranges in zip(*pieces, strict=True))
    return Part(name, hull, pieces, _cost(of_kind, _shape(hull)))


def _cost(of_kind: Ball, shape: tuple[int, ...]) -> float:
    """Operations of a duality map, about: Newton-Schulz for matrices m x n multiplies 15 times, each 2 m^2 n or less."""
    entries = math.prod(shape)
    return (
        30.0 * entries * min(shape[d] for d in of_kind.elem_dims) if isinstance(of_kind.single, OperatorBall) else 10.0 * entries
    )


def _with_owners(parts: Sequence[Part], balls: Mapping[str, Ball], size: int) -> list[Part]:
    """The parts, each with the rank that works on it: costly ones first, each to a rank that has least to do so far."""
    loads, owners = [0.0] * size, {}
    can_own: dict[int, Sequence[int]] = {}
    for i, part in enumerate(parts):
        if not part.is_whole:
            can_own[i] = range(size)
        elif len(part.holders) == 1 or isinstance(balls[part.name].single, OperatorBall):
            can_own[i] = part.holders
    for i in sorted(can_own, key=lambda i: (len(can_own[i]) > 1, -parts[i].cost)):
        held = {rank: _entries(piece) for piece, ranks in parts[i].pieces.items() for rank in ranks}
        owner = min(can_own[i], key=lambda rank: (loads[rank], -held.get(rank, 0), rank))
        loads[owner] += parts[i].cost
        owners[i] = owner
    return [replace(part, owner=owners.get(i)) for i, part in enumerate(parts)]


def _assembled(part: Part, pieces: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    if part.is_whole:
        return pieces[0][1]
    result = pieces[0][1].new_empty(_shape(part.box))
    for piece, t in pieces:
        result[part.slices(piece)] = t
    return result


def _shape(of: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in of)


def _entries(of: Box) -> int:
    return math.prod(_shape(of))
