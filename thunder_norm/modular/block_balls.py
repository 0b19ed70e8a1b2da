"""Unit balls of parameters that are several matrices: the largest of the blocks' norms, and each block's own duality map.

For a stack W of blocks W_b with O_b of the O outputs, ``|W x|^2 = sum_b (O_b / O) |W_b x|^2`` in mean squares, so the operator norm from RMS
to RMS (and the RMS norm of a bias) is at most the largest of the blocks': what moves an output by at most S times the norm of the stack
moves it by at most S times this one.  So it is at each tap of a kernel of one group; of several, each is stepped by itself as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.modular.blocks import Block, runs_of
from thunder_norm.modular.duality import Ball, ConvBall, OperatorBall, RMSBall
from thunder_norm.modular.orthogonal import Method
from thunder_norm.modular.roles import Roles, find_roles

Blocks = bool | Literal["heads"] | Roles | Mapping[str, Any]
"""What is asked for: none, those of the program, heads of queries and keys too, or those of a table or of changes of it."""


@dataclass(frozen=True)
class BlockBall(Ball):
    """``max_b |W_b|``: the steepest step and the projection of each block by itself.

    Attributes:
        of_each: the ball of one block.
        cuts: of each block: (dimension from the end, start, size of a run, period, number of runs).
    """

    of_each: Ball
    cuts: tuple[tuple[int, int, int, int, int], ...]

    @property
    def single(self) -> Ball:
        """The ball of one block."""
        return self.of_each

    def parts(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of a tensor: views, of those that alternate copies."""
        return [_part(t, *cut) for cut in self.cuts]

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.of_each.norm(part) for part in self.parts(t)]).amax()

    def goes_alone(self, t: torch.Tensor, method: Method = "newton_schulz") -> bool:
        return self.of_each.goes_alone(t, method)

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
        return self._each(lambda part: self.of_each.lmo(part, method, size), g, method)

    def project(self, t: torch.Tensor) -> torch.Tensor:
        return self._each(self.of_each.project, t)

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None, is_complex: bool = False) -> torch.Tensor:
        drawn = [self.of_each.draw(part.shape, generator, is_complex) for part in self.parts(torch.empty(shape, device="meta"))]
        return self._together(drawn, drawn[0].new_empty(shape))

    def _each(self, f: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor, method: Method = "newton_schulz") -> torch.Tensor:
        """`f` of every block, put together; small ones of one shape in one batch."""
        parts = self.parts(t)
        by_shape: dict[torch.Size, list[int]] = {}
        for i, part in enumerate(parts):
            by_shape.setdefault(part.shape, []).append(i)
        found: dict[int, torch.Tensor] = {}
        for positions in by_shape.values():
            if len(positions) == 1 or self.of_each.goes_alone(parts[positions[0]], method):
                found |= {i: f(parts[i]) for i in positions}
            else:
                found |= zip(positions, f(torch.stack([parts[i] for i in positions])).unbind(), strict=True)
        return self._together([found[i] for i in range(len(parts))], t)

    def _together(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The tensor of these blocks, differentiable in them."""
        dim = self.cuts[0][0]
        at = torch.cat([_part(torch.arange(like.shape[dim]), -1, *cut[1:]) for cut in self.cuts])
        return torch.cat(list(parts), dim).index_select(dim, torch.argsort(at).to(like.device))


def _part(t: torch.Tensor, dim: int, start: int, size: int, period: int, runs: int) -> torch.Tensor:
    part = runs_of(t, dim, start, size, period, runs)
    return part if runs == 1 else part.flatten(dim - 1, dim)


def roles_given(blocks: Blocks, model: torch.nn.Module, args: tuple, kwargs: dict) -> Roles | None:
    """The table of roles that `blocks` says; None if it says nothing of it.

    Raises:
        NormMapKeyError: as `find_roles`.
        NormMismatchError: as `find_roles`, or none of what may be said.
    """
    if isinstance(blocks, bool) or blocks == "heads":
        return None
    if isinstance(blocks, Roles):
        if missing := [name for name, _ in model.named_parameters() if name not in blocks]:
            raise NormMismatchError(f"the table of roles is of another model: it has no {missing[0]!r}")
        return blocks
    if not isinstance(blocks, Mapping):
        raise NormMismatchError(f"blocks must be True, False, 'heads', a table or a mapping of roles, got {blocks!r}")
    return find_roles(model, *args, roles=blocks, **kwargs)


def asked_for(blocks: Blocks, roles: Roles) -> frozenset[str]:
    """The parameters, by first name, of which it is said by name or pattern which blocks they have."""
    if not isinstance(blocks, Mapping):
        return frozenset()
    said = [pattern for pattern, value in blocks.items() if not isinstance(value, str)]
    return frozenset(row.name for pattern in said for row in roles.fitting(pattern))


def blocked(
    balls: Mapping[str, Ball],
    shapes: Mapping[str, Sequence[int]],
    roles: Roles,
    per_head: bool,
    asked: AbstractSet[str] = frozenset(),
) -> dict[str, tuple[tuple[Block, ...], BlockBall]]:
    """The blocks, and balls, of parameters that have several.

    Args:
        balls: the ball of each parameter as a whole, by its first name.
        shapes: their shapes.
        roles: of the parameters.
        per_head: cut queries and keys into their heads.
        asked: those whose blocks are to be stepped by themselves; of others whose norm does not allow it they are stepped whole.

    Raises:
        NormMismatchError: they are to be cut into heads, and which indices these have is not known, or not regular; or the norm of one that
            was asked for does not allow it.
    """
    found = {}
    for name, whole in balls.items():
        blocks = [piece for block in roles[name].blocks for piece in (_heads(name, block) if per_head else (block,))]
        if len(blocks) < 2:
            continue
        dim = blocks[0].axis - len(shapes[name])
        is_operator = isinstance(whole, OperatorBall) and whole.elem_dims[0] == dim
        is_of_groups = isinstance(whole, ConvBall) and whole.groups > 1
        is_row = isinstance(whole, RMSBall) and whole.elem_dims == (dim,)
        if is_operator and not is_of_groups or is_row:
            cuts = tuple((dim, b.start, b.size, b.period, b.num_runs) for b in blocks)
            found[name] = tuple(blocks), BlockBall(whole.kind, whole.elem_dims, whole, cuts)
        elif name in asked:
            raise NormMismatchError(
                with_details(
                    f"{name!r} cannot be stepped by its blocks along dimension {blocks[0].axis}",
                    blocks=", ".join(map(str, blocks)),
                    norm=f"{whole.kind.__name__} over dimensions {whole.elem_dims}",
                    why="each group of a kernel is stepped by itself as it is"
                    if is_of_groups
                    else "blocks are along the outputs of an operator, or along a row that has a norm together",
                )
            )
    return found


def _heads(name: str, block: Block) -> tuple[Block, ...]:
    """Queries or keys of each head."""
    if block.role not in ("query", "key") or block.heads == 1:
        return (block,)
    if (of_heads := block.of_heads) is None:
        raise NormMismatchError(
            with_details(
                f"blocks='heads' needs to know which indices of {name!r} belong to which head",
                block=block,
                instead="blocks=True, or blocks={...} with a block for each head",
            )
        )
    return of_heads
