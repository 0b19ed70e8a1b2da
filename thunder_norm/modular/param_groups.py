"""Groups of parameters for other people's optimizers: which of them are matrices, and where one is several, from the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.model_state.shards import is_spread
from thunder_norm.modular.blocks import Block
from thunder_norm.modular.leaves import hand_on_gradients
from thunder_norm.modular.roles import Role, Roles, find_roles
from thunder_norm.modular.wrappers import unwrapped

For = Literal["muon", "emerging", "dion", "dion2", "nordion2", "normuon", "scion", "adamw"]

# role -> Scion's norm of it, and the number of dimensions that has
_SCION: dict[str, tuple[str, dict[str, Any], int]] = {
    "matrix": ("Spectral", {}, 2),
    "stack": ("Spectral", {}, 2),
    "head": ("Sign", {}, 2),
    "tied": ("Sign", {}, 2),
    "table": ("ColNorm", {"transpose": True}, 2),
}


def param_groups(
    model: torch.nn.Module,
    *example_args: Any,
    for_: For = "muon",
    split: bool | Literal["heads"] = False,
    roles: Roles | Mapping[str, Any] | None = None,
    **example_kwargs: Any,
) -> list[dict[str, Any]]:
    """Groups of the parameters that require grad, for an optimizer that treats matrices apart.

    Each group is a dict as optimizers of torch take it, with ``"params"``, and for each of these an entry of ``"param_names"``,
    ``"roles"`` (see `Role`) and ``"blocks"`` (a list of dicts, the fields of `Block`; of what is not split, one).  ``"algorithm"`` says
    whose it is.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> groups = param_groups(model, torch.randn(3, 4))
    >>> [(g["algorithm"], g["param_names"]) for g in groups]
    [('muon', ['0.weight']), ('adamw', ['2.weight']), ('adamw', ['0.bias', '2.bias'])]
    >>> muon = torch.optim.Muon([g for g in groups if g["algorithm"] == "muon"], lr=0.02)
    >>> adamw = torch.optim.AdamW([g for g in groups if g["algorithm"] == "adamw"], lr=1e-3)

    Args:
        model: any module; of a wrapped one, that inside.
        *example_args: arguments that say shapes and dtypes, as for `find_roles`.
        for_: "muon" (`torch.optim.Muon` for hidden matrices, AdamW for the rest; also dion's Muon, which is for both), "emerging"
            (NVIDIA's emerging optimizers; as "muon"), "dion", "dion2", "nordion2", "normuon" (microsoft/dion, optimizers that read
            ``"algorithm"``, each the name that it gives itself), "scion" (LIONS-EPFL/scion, one optimizer that reads ``"norm"`` and
            ``"norm_kwargs"``), "adamw" (all; gains and biases without decay).
        split: give matrices with several blocks, and stacks of matrices, as one leaf for each matrix, which shares memory with the
            parameter and gets its part of the gradient in every backward.  Its first dimension has the outputs, also where the parameter
            has them second.  "heads": queries and keys head by head, too.  Blocks that alternate by runs of several indices cannot be views of
            two dimensions, and are refused, unless "heads" cuts them apart: then values that alternate are cut by heads as well.
        roles: the table, or changes of it, as for `find_roles`.
        **example_kwargs: as `example_args`, by name.

    Raises:
        NormMapKeyError: as `find_roles`.
        NormMismatchError: as `find_roles`; `for_` or `split` is none of these; a parameter has other dimensions than the optimizer takes; `split` of
            blocks that are no views, or of DTensors.
        GradientError: (in a later backward, with `split`) gradients of a leaf were cleared and those of its parameter not, or the
            parameter is elsewhere in memory.
    """
    if for_ not in get_args(For):
        raise NormMismatchError(f"for_ must be one of {', '.join(map(repr, get_args(For)))}, got {for_!r}")
    if not isinstance(split, bool) and split != "heads":
        raise NormMismatchError(f"split must be True, False or 'heads', got {split!r}")
    if isinstance(model, torch.nn.Module):
        model, _ = unwrapped(model)
    if not isinstance(roles, Roles):
        roles = find_roles(model, *example_args, roles=roles, **example_kwargs)
    members = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            leaves = _leaves(roles[name], p, split == "heads") if split else []
            members += leaves or [_Member(name, p, roles[name], roles[name].blocks)]
    grouped: dict[Any, list[_Member]] = {}
    for member in members:
        grouped.setdefault(tuple(sorted(_options(member, for_).items(), key=str)), []).append(member)
    found = [_group(some, for_) for some in grouped.values()]
    return sorted(found, key=lambda g: g["algorithm"] == "adamw")


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """One tensor that an optimizer gets."""

    name: str
    tensor: torch.Tensor
    role: Role
    blocks: tuple[Block, ...]

    @property
    def is_matrix(self) -> bool:
        return self.role.role in ("matrix", "stack") and self.tensor.ndim == 2


def _options(member: _Member, for_: For) -> dict[str, Any]:
    """What is the same in a group, as strings and numbers."""
    is_light = member.role.role in ("gain", "bias")
    if for_ == "scion":
        norm, kwargs = _of_scion(member)
        return {"algorithm": "scion", "norm": norm, "norm_kwargs": tuple(kwargs.items())}
    if member.is_matrix and for_ != "adamw":
        return {"algorithm": "muon" if for_ == "emerging" else for_}
    return {"algorithm": "adamw"} | ({"weight_decay": 0.0} if is_light else {})


def _of_scion(member: _Member) -> tuple[str, dict[str, Any]]:
    role, ndim = member.role.role, member.tensor.ndim
    if role in ("convolution", "depthwise"):
        norm, kwargs, wanted = "SpectralConv", {}, ndim if ndim in (3, 4) else 4
    else:
        norm, kwargs, wanted = _SCION.get(role, ("BiasRMS", {}, 1))
        wanted = ndim if role not in _SCION and ndim < 2 else wanted
    if ndim != wanted:
        raise NormMismatchError(
            with_details(
                f"Scion has no norm for {member.name!r}, a {role} of shape {list(member.tensor.shape)}: {norm} has {wanted} dimensions",
                instead=("split=True gives stacks matrix by matrix; " if role == "stack" and ndim == 3 else "")
                + "another optimizer for it, and requires_grad=False here; or another role",
            )
        )
    return norm, kwargs


def _group(members: Sequence[_Member], for_: For) -> dict[str, Any]:
    options = _options(members[0], for_)
    if "norm_kwargs" in options:
        options["norm_kwargs"] = dict(options["norm_kwargs"])
    return {
        "params": [m.tensor for m in members],
        "param_names": [m.name for m in members],
        "roles": [m.role.role for m in members],
        "blocks": [[dataclasses.asdict(b) for b in m.blocks] for m in members],
        **options,
    }


def _leaves(role: Role, p: torch.Tensor, per_head: bool) -> list[_Member]:
    """One leaf for each matrix of a parameter; none if the parameter is as good."""
    if role.role not in ("matrix", "stack") or p.ndim > 3:
        return []
    axis = role.out_axis
    blocks = _pieces(role, per_head)
    if axis is None or p.ndim == 2 and len(blocks) == 1 and axis == 0:
        return []
    if is_spread(p):
        raise NormMismatchError(
            f"{role.name!r} is sharded: its blocks are no views; ModularOptimizer steps by blocks without them"
        )
    if not _are_views(blocks):
        by_heads = "split='heads', which has them head by head; or " if not per_head and _are_views(_pieces(role, True)) else ""
        raise NormMismatchError(
            with_details(
                f"blocks of {role.name!r} alternate, so they are no views of two dimensions",
                blocks=", ".join(map(str, role.blocks)),
                instead=f"{by_heads}split=False, and an optimizer that reads the groups' blocks; ModularOptimizer does with blocks=True",
            )
        )
    stack_axis = role.stack_axis or 0
    places = [
        _Place(block, index, axis, stack_axis)
        for index in ([None] if p.ndim == 2 else range(p.shape[stack_axis]))
        for block in blocks
    ]
    leaves = [place(p.detach()).requires_grad_() for place in places]
    hand_on_gradients(role.name, p, leaves, places)
    return [
        _Member(role.name + place.suffix, leaf, role, () if place.block is None else (place.block,))
        for leaf, place in zip(leaves, places, strict=True)
    ]


def _pieces(role: Role, per_head: bool) -> list[Block | None]:
    """What the leaves of a matrix are: its blocks, or heads of these; None for all of it."""
    found: list[Block | None] = []
    for block in role.blocks:
        by_heads = per_head and (block.role in ("query", "key") or not block.is_view)
        found += (by_heads and block.of_heads) or (block,)
    return found or [None]


def _are_views(blocks: Sequence[Block | None]) -> bool:
    return all(block is None or block.is_view for block in blocks)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in a parameter a matrix is."""

    block: Block | None
    index: int | None
    axis: int
    stack_axis: int

    @property
    def suffix(self) -> str:
        parts = [] if self.index is None else [str(self.index)]
        if self.block is not None and self.block.num_indices < self.block.length:
            every = self.block.period if self.block.num_runs > 1 else 1  # runs of one index
            stop = self.block.start + (self.block.num_runs - 1) * every + self.block.size
            parts.append(f"{self.block.start}:{stop}" + (f":{every}" if every > 1 else ""))
        return f"[{', '.join(parts)}]" if parts else ""

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """The matrix in a tensor of the parameter's shape, outputs first: a view."""
        part = t if self.block is None else self.block.of(t)
        part = part if self.index is None else part.select(self.stack_axis, self.index)
        return part.mT if self.axis == t.ndim - 1 else part
