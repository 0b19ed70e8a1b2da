"""Blocks: a matrix whose product is split (queries, keys and values, a gate and what it gates) is several matrices in one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_norm.errors import NormMismatchError
from thunder_norm.scalars import is_count


@dataclass(frozen=True)
class Block:
    """Some of the indices along one axis of a parameter: ``start + k * period + j`` for k below the number of runs, j below size.

    >>> Block("key", axis=0, length=12, start=2, size=2, period=6).indices.tolist()
    [2, 3, 8, 9]

    Attributes:
        role: what it is for, "query", "key", "value", "gate" (a function of it multiplies others), "gated", or "".
        axis: of the parameter.
        length: of the axis.
        start: of the first run of indices.
        size: of a run.
        period: from one run to the next; the length of the axis if there is one alone.
        heads: how many heads of an attention it has, of as many indices each; None if it is none's, or these are not regular.
        runs: how many; None if they go on to the end of the axis.
        is_dealt: whether heads have its indices in turn, one after the other, and not each its own in one go.
    """

    role: str
    axis: int
    length: int
    start: int
    size: int
    period: int
    heads: int | None = None
    runs: int | None = None
    is_dealt: bool = False

    @property
    def num_runs(self) -> int:
        """How many runs it has."""
        return self.length // self.period if self.runs is None else self.runs

    @property
    def num_indices(self) -> int:
        """How many indices it has."""
        return self.num_runs * self.size

    @property
    def indices(self) -> torch.Tensor:
        """The indices."""
        return (self.start + self.period * torch.arange(self.num_runs)[:, None] + torch.arange(self.size)).flatten()

    @property
    def is_view(self) -> bool:
        """Whether it is a view of as many dimensions as the parameter has: one run, or runs of one index each."""
        return self.num_runs == 1 or self.size == 1

    @property
    def of_heads(self) -> tuple[Block, ...] | None:
        """A block for each head; None if heads are not known, or one is no runs of one size at one distance."""
        if self.heads is None or self.num_indices % self.heads:
            return None
        rows = self.indices.view(-1, self.heads).mT if self.is_dealt else self.indices.view(self.heads, -1)
        found = [regular(torch.zeros(self.length).index_fill(0, at, 1).bool(), self.axis, self.role, heads=1) for at in rows]
        return None if None in found else tuple(block for block in found if block is not None)

    def view(self, t: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of the parameter's shape, a view: with the runs as a dimension of its own, if there are several."""
        return runs_of(t, self.axis, self.start, self.size, self.period, self.num_runs)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of the parameter's shape, with the runs one after the other: a copy, unless it is a view."""
        view = self.view(t)
        return view if self.num_runs == 1 else view.flatten(self.axis, self.axis + 1)

    def write(self, t: torch.Tensor, block: torch.Tensor) -> None:
        """Put the block's entries into a tensor of the parameter's shape."""
        view = self.view(t)
        view.copy_(block.reshape(view.shape))

    def __str__(self) -> str:
        runs = "" if self.num_runs == 1 else f" of every {self.period}"
        runs += "" if self.runs is None or self.num_runs == 1 else f", {self.runs} times"
        heads = "" if self.heads is None else f", {self.heads} head{'s' if self.heads > 1 else ''}"
        return f"{self.role or 'block'} {self.start}:{self.start + self.size}{runs}{heads}{' in turn' if self.is_dealt else ''}"


def runs_of(t: torch.Tensor, dim: int, start: int, size: int, period: int, runs: int) -> torch.Tensor:
    """Runs of indices along a dimension: a view, with the runs as a dimension before that of what is in one, if there are several."""
    part = t.narrow(dim, start, (runs - 1) * period + size)
    return part if runs == 1 else part.unfold(dim, size, period).movedim(-1, dim + 1 if dim >= 0 else dim)


def whole(axis: int, length: int, role: str = "", heads: int | None = None) -> Block:
    """The block that is all of an axis."""
    return Block(role, axis, length, 0, length, length, heads)


def regular(rows: torch.Tensor, axis: int, role: str = "", heads: int | None = None) -> Block | None:
    """The block of some indices along an axis; None if they are no runs of one size at one distance.

    Args:
        rows: a mask of the indices.
        axis: of the parameter.
        role: what the block is for.
        heads: that it has.
    """
    length = len(rows)
    at = rows.nonzero().flatten().tolist()
    starts = [i for before, i in zip([-2, *at], at, strict=False) if i != before + 1]
    size = len(at) // len(starts)
    if len(starts) == 1:
        return Block(role, axis, length, starts[0], size, length, heads)
    period = starts[1] - starts[0]
    goes_on = starts[0] + size <= period and length == len(starts) * period
    found = Block(role, axis, length, starts[0], size, period, heads, None if goes_on else len(starts))
    return found if size * len(starts) == len(at) and at == found.indices.tolist() else None


def check_partition(name: str, shape: Sequence[int], blocks: Sequence[Block]) -> None:
    """Refuse blocks that do not make up a parameter.

    Raises:
        NormMismatchError: they are along several axes, an index is in none or in two, or heads have different numbers of them.
    """
    ndim = len(shape)
    fits = all(0 <= b.axis < ndim and b.length == shape[b.axis] and 0 < b.size <= b.period for b in blocks)
    fits = fits and all(b.num_indices % (b.heads or 1) == 0 for b in blocks)
    indices = sorted(i for b in blocks for i in b.indices.tolist()) if fits else []
    if len({b.axis for b in blocks}) != 1 or indices != list(range(blocks[0].length)):
        raise NormMismatchError(
            f"blocks of {name!r} must have every index along one axis once; its shape is {list(shape)}, got {', '.join(map(str, blocks))}"
        )


def split(sizes: Sequence[int], axis: int = 0, roles: Sequence[str] = (), heads: Sequence[int | None] = ()) -> tuple[Block, ...]:
    """Blocks of these sizes, one after the other.

    >>> [str(b) for b in split([4, 2, 2], roles=["query", "key", "value"])]
    ['query 0:4', 'key 4:6', 'value 6:8']

    Raises:
        NormMismatchError: sizes, roles or heads are no sequences, a size is not positive, the axis is no integer, or there are other
            numbers of roles or heads than of sizes.
    """
    if not isinstance(sizes, Sequence) or not sizes or not all(map(is_count, sizes)):
        raise NormMismatchError(f"sizes of blocks must be positive integers, got {sizes!r}")
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise NormMismatchError(f"the axis of blocks must be an integer, got {axis!r}")
    if not (isinstance(roles, Sequence) and isinstance(heads, Sequence)):
        raise NormMismatchError(f"roles and heads of blocks must be sequences, got {roles!r} and {heads!r}")
    if any(given and len(given) != len(sizes) for given in (roles, heads)):
        raise NormMismatchError(f"{len(sizes)} blocks were given {len(roles)} roles and {len(heads)} numbers of heads")
    total, start, found = sum(sizes), 0, []
    for i, size in enumerate(sizes):
        found.append(Block(roles[i] if roles else "", axis, total, start, size, total, heads[i] if heads else None))
        start += size
    return tuple(found)
