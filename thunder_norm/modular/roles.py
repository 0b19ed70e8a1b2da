"""Roles of parameters: what the program does with each, and which of them are several matrices in one.

The program runs once, without data if it can, and every parameter is followed to what takes it, and what takes its products (see
`thunder_norm.modular.following`).  A matrix is cut into the coarsest blocks such that every operation takes whole ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.modular.blocks import Block, check_partition, regular, whole
from thunder_norm.modular.following.mode import follow
from thunder_norm.modular.following.notes import Notes
from thunder_norm.modular.following.strands import Use
from thunder_norm.modular.wrappers import unwrapped
from thunder_norm.norms.lifts.parameters import tied_names
from thunder_norm.tables import pandas_for

RoleName = Literal["matrix", "head", "table", "tied", "stack", "convolution", "depthwise", "gain", "bias", "other", "unused"]

_OF_ATTENTION = ("query", "key", "value")
_OF_BLOCKS = (*_OF_ATTENTION, "gate", "gated")


@dataclass(frozen=True)
class Role:
    """What one parameter is.

    Attributes:
        name: its first name.
        shape: its shape.
        role: "matrix" (multiplies activations), "head" (a matrix whose product is the program's result, or enters a loss), "table" (rows
            are looked up, or added at their places), "tied" (a table that is the head as well), "stack" (several matrices: experts,
            heads), "convolution" (also one that multiplies patches which the program cuts out), "depthwise" (a convolution of each channel
            by itself), "gain" (multiplies entry by entry), "bias" (is added), "other", or "unused".
        blocks: of a matrix, stack or bias the blocks along the axis of its outputs, one if it is not split; of others none.
        out_axis: the axis of its outputs; None where it has none.
        groups: of a convolution.
        names: all names, if it is tied to others.
        is_first: whether all that it multiplies, as a matrix or a kernel, depends on no parameter: the program's inputs.
        is_attended: whether all that it multiplies, as a matrix, is what attention returns.
        is_factor: whether its product is multiplied entry by entry by that of one other matrix of its shape, as by a gate, and by no others,
            or, of a matrix of two blocks, whether these gate one another.
        is_at_places: whether, of a table, all rows that are looked up are those of places that depend on no input (positions).
        stack_axis: of a stack of three dimensions, the axis that says which matrix; None if it is not known, and of others.
    """

    name: str
    shape: tuple[int, ...]
    role: RoleName
    blocks: tuple[Block, ...] = ()
    out_axis: int | None = None
    groups: int = 1
    names: tuple[str, ...] = ()
    is_first: bool = False
    is_attended: bool = False
    is_factor: bool = False
    is_at_places: bool = False
    stack_axis: int | None = None

    @property
    def is_split(self) -> bool:
        """Whether it has several blocks."""
        return len(self.blocks) > 1


class Roles:
    """The table of roles: iterate over it, index it by any name of a parameter, print it.

    Attributes:
        rows: a `Role` for each parameter, in the model's order.
    """

    def __init__(self, rows: Sequence[Role]):
        self.rows = tuple(rows)
        self._by_name = {name: row for row in rows for name in (row.name, *row.names)}

    def __iter__(self) -> Iterator[Role]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Role:
        """The role of a parameter.

        Raises:
            NormMapKeyError: no parameter has that name.
        """
        if name not in self._by_name:
            raise _unknown(name, self._by_name)
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def of_attention(self) -> frozenset[str]:
        """By first name, the parameters with a block that makes queries, keys or values, and those that multiply what attention returns."""
        return frozenset(r.name for r in self.rows if r.is_attended or any(b.role in _OF_ATTENTION for b in r.blocks))

    def changed(self, given: Mapping[str, RoleName | Sequence[Block]]) -> Roles:
        """The table with other roles, or other blocks, for some parameters.

        Args:
            given: name or pattern (``"*.c_attn.weight"``) -> a role, or blocks (see `thunder_norm.modular.split`); later ones count.

        Raises:
            NormMapKeyError: no parameter has that name, or fits that pattern.
            NormMismatchError: no mapping, no role of that name, one that a parameter of that shape cannot have, or blocks that do not make it up.
        """
        if not isinstance(given, Mapping):
            raise NormMismatchError(f"roles are given as a mapping from names to roles or blocks, got {given!r}")
        rows = {row.name: row for row in self.rows}
        for pattern, value in given.items():
            for row in self.fitting(pattern):
                rows[row.name] = _with(rows[row.name], value)
        return Roles(list(rows.values()))

    def fitting(self, pattern: str) -> list[Role]:
        """The rows of parameters that have a name, or one that fits a pattern.

        Raises:
            NormMapKeyError: there is none.
        """
        found = [row for row in self.rows if any(fnmatchcase(n, str(pattern)) for n in (row.name, *row.names))]
        if not found:
            raise _unknown(pattern, self._by_name)
        return found

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each parameter (needs pandas, the extra `dataframe`).

        Raises:
            ImportError: there is no pandas.
        """
        pandas = pandas_for("Roles.to_dataframe")
        fields = [f.name for f in dataclasses.fields(Role)]
        return pandas.DataFrame({name: [getattr(row, name) for row in self.rows] for name in fields})

    def __repr__(self) -> str:
        cells = [("parameter", "shape", "role", "blocks"), *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells)

    def _repr_html_(self) -> str:
        head, *rows = [("parameter", "shape", "role", "blocks"), *map(_cells, self.rows)]
        lines = [f"<tr>{''.join(f'<th>{c}</th>' for c in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows]
        return f"<table>{''.join(lines)}</table>"


def _cells(row: Role) -> tuple[str, str, str, str]:
    groups = f", {row.groups} groups" if row.groups > 1 and row.role == "convolution" else ""
    is_plain = len(row.blocks) == 1 and not row.blocks[0].role
    return row.name, "x".join(map(str, row.shape)), row.role + groups, "" if is_plain else "; ".join(map(str, row.blocks))


def _with(row: Role, value: Any) -> Role:
    if isinstance(value, str):
        if value not in get_args(RoleName):
            raise NormMismatchError(f"a role is one of {', '.join(get_args(RoleName))}, got {value!r} for {row.name!r}")
        low, high = _NDIMS.get(value, (0, 99))
        if not low <= len(row.shape) <= high:
            raise NormMismatchError(
                f"{row.name!r} of shape {list(row.shape)} cannot be a {value}: that has {low} dimensions or more"
            )
        has_blocks = value in ("matrix", "head", "stack", "bias")
        axis = row.out_axis if row.out_axis is not None or not has_blocks else max(0, len(row.shape) - 2)
        blocks = row.blocks or ((whole(axis, row.shape[axis]),) if has_blocks and axis is not None and row.shape else ())
        stack_axis = row.stack_axis or 0 if value == "stack" and len(row.shape) == 3 else None
        return replace(row, role=value, blocks=blocks if has_blocks else (), out_axis=axis, stack_axis=stack_axis)
    if not isinstance(value, Sequence) or not value or not all(isinstance(b, Block) for b in value):
        raise NormMismatchError(f"a role is a name or a sequence of blocks, got {value!r} for {row.name!r}")
    check_partition(row.name, row.shape, value)
    return replace(row, blocks=tuple(value), out_axis=value[0].axis)


_NDIMS = {"matrix": (2, 2), "head": (2, 2), "table": (2, 99), "tied": (2, 2), "stack": (3, 99), "convolution": (3, 99)}
_NDIMS |= {"depthwise": (3, 99)}


def _unknown(name: Any, names: Mapping[str, Any]) -> NormMapKeyError:
    import difflib

    close = difflib.get_close_matches(name, names, n=3) if isinstance(name, str) else []
    return NormMapKeyError(
        with_details(f"no parameter is named, or fits, {name!r}", did_you_mean=", ".join(map(repr, close)) or None)
    )


def find_roles(
    model: torch.nn.Module,
    *example_args: Any,
    roles: Mapping[str, RoleName | Sequence[Block]] | None = None,
    **example_kwargs: Any,
) -> Roles:
    """What each parameter of a model is: see `Roles`.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    >>> print(find_roles(model, torch.tensor([1, 2])))
    parameter  shape  role   blocks
    0.weight   7x4    table
    1.weight   7x4    head
    1.bias     7      bias

    Args:
        model: any module, of a wrapped one that inside; on the meta device too.  It runs once without data, or, if it asks for values, with them.
        *example_args: arguments that say shapes and dtypes, as for `ModularNorm`.
        roles: name or pattern -> a role or blocks, instead of what was found: see `Roles.changed`.
        **example_kwargs: as `example_args`, by name.

    Raises:
        NormMapKeyError: as `Roles.changed`.
        NormMismatchError: as `Roles.changed`, or the model is none.
    """
    if not isinstance(model, torch.nn.Module):
        raise NormMismatchError(f"roles are those of a torch.nn.Module, got {type(model).__name__}")
    model, _ = unwrapped(model)
    found = roles_in(follow(model, example_args, example_kwargs), tied_names(model))
    return found if roles is None else found.changed(roles)


def roles_in(notes: Notes, tied: Mapping[str, tuple[str, ...]]) -> Roles:
    """The roles in a run that was followed."""
    of_each: dict[str, list[Use]] = {name: [] for name in notes.shapes}
    for use in notes.uses:
        of_each[use.name].append(use)
    rows = [_role(name, tuple(shape), notes, of_each[name], tied[name]) for name, shape in notes.shapes.items()]
    factors = _factors({row.name: row for row in rows}, set(notes.factors))
    return Roles([replace(row, is_factor=row.name in factors) for row in rows])


def _factors(rows: Mapping[str, Role], products: set[frozenset[str]]) -> frozenset[str]:
    """Of the matrices (or stacks) that gate others, or are gated, those of one kind of product alone, of two: two of one shape, or one's two blocks."""
    found: set[str] = set()
    for names in products:
        is_one = len(names) == 1
        alike = {(rows[name].shape, rows[name].role) for name in names}
        is_sole = all(len(rows[name].blocks) == 1 + is_one and sum(name in other for other in products) == 1 for name in names)
        if len(names) <= 2 and is_sole and len(alike) == 1 and alike.pop()[1] in ("matrix", "stack"):
            found |= names
    return frozenset(found)


def _role(name: str, shape: tuple[int, ...], notes: Notes, uses: Sequence[Use], names: tuple[str, ...]) -> Role:
    met = notes.met.get(name, [])
    role = _named(shape, {m.op for m in met}, uses)
    if role == "stack" and _is_kernel(shape, [m.summed for m in met if m.op == "matrix"]):
        role = "convolution"
    convolution = next((m for m in met if m.op == "convolution"), None)
    if convolution is not None:
        in_channels = shape[1 - convolution.out_axis] * (1 if convolution.out_axis else convolution.groups)
        if convolution.groups > 1 and convolution.groups == in_channels:
            role = "depthwise"
    stack_axis = _stack_axis([m.summed for m in met]) if role == "stack" and len(shape) == 3 else None
    axis, blocks = None, ()
    if role in ("matrix", "head", "convolution", "bias") or role == "stack" and (len(shape) != 3 or stack_axis is not None):
        axis, blocks = _blocks(shape, uses, stack_axis)
    names = names if len(names) > 1 else ()
    groups = 1 if convolution is None else convolution.groups
    products = [m for m in met if m.op in ("matrix", "convolution")]
    is_first = bool(products) and all(m.is_first for m in products)
    is_attended = bool(products) and all(m.is_attended for m in products)
    is_at_places = role == "table" and {m.is_at_places for m in met if m.op == "table"} == {True}
    return Role(name, shape, role, blocks, axis, groups, names, is_first, is_attended, False, is_at_places, stack_axis)


def _is_kernel(shape: tuple[int, ...], summed: Sequence[frozenset[int]]) -> bool:
    """Whether what has four dimensions or more multiplies patches that the program cuts out itself: one axis is left of it, that of channels."""
    large = {axis for axis, size in enumerate(shape) if size != 1}
    return len(shape) > 3 and bool(summed) and all(axes and len(large - axes) == 1 for axes in summed)


def _stack_axis(summed: Sequence[frozenset[int]]) -> int | None:
    """Which axis of three says which matrix; None if products disagree.

    The first one, as of experts and of heads, unless products sum over it alone (``td,dhk->thk``), or over both others (``thk,dhk->td``).
    """
    found = {1 if axes in ({0}, {1, 2}) else 0 for axes in summed if axes} or {0}
    return found.pop() if len(found) == 1 else None


def _named(shape: tuple[int, ...], met: set[str], uses: Sequence[Use]) -> RoleName:
    is_light = sum(size > 1 for size in shape) <= 1
    products = [u for u in uses if u.kind == "weight"]
    if not met and not uses:
        return "unused"
    if "convolution" in met:
        return "convolution"
    if "table" in met:
        return "tied" if "matrix" in met else "table"
    if "matrix" in met:
        if len(shape) > 2:
            return "stack"
        if len(shape) < 2:
            return "gain"
        is_head = bool(products) and all(u.op in ("output", "loss") and u.is_sole for u in products)
        return "head" if is_head else "matrix"
    if "factor" in met and not is_light:
        return "matrix" if len(shape) == 2 else "stack"
    if "gain" in met:
        return "gain"
    if "bias" in met or all(u.kind == "itself" for u in uses) and met <= {"factor"}:
        return "bias" if is_light else "table"
    return "other"


def _blocks(shape: tuple[int, ...], uses: Sequence[Use], stack_axis: int | None) -> tuple[int | None, tuple[Block, ...]]:
    """The axis of outputs, and the blocks along it; none if they are no regular runs."""
    axes = sorted({axis for u in uses for axis in u.rows if u.kind in ("weight", "bias") and axis != stack_axis})
    axes = [axis for axis in axes if shape[axis] != 1] or axes[
        :1
    ]  # one index is all there is, whether products sum over it or not
    cut = [axis for axis in axes if any(axis in u.rows and not u.rows[axis].all() for u in uses)]
    if len(cut) > 1 or not axes:
        return (axes[-1] if axes else None), ()
    axis = cut[0] if cut else axes[-1]
    takings = [u for u in uses if axis in u.rows]
    if not cut:
        every = torch.ones(shape[axis], dtype=torch.bool)
        return axis, (_described(whole(axis, shape[axis]), every, takings),)
    masks = torch.unique(torch.stack([u.rows[axis] for u in takings]), dim=0)
    _, of_row = torch.unique(masks, dim=1, return_inverse=True)
    blocks = []
    for key in dict.fromkeys(of_row.tolist()):
        rows = of_row == key
        found = regular(rows, axis)
        if found is None:
            return axis, ()
        blocks.append(_described(found, rows, takings))
    return axis, tuple(blocks)


def _described(block: Block, rows: torch.Tensor, uses: Sequence[Use]) -> Block:
    """The block with its role and heads."""
    own = [u for u in uses if torch.equal(u.rows[block.axis], rows)]
    ops = {u.op for u in own}
    role = next((op for op in _OF_BLOCKS if op in ops), "")
    for use in own if role in _OF_ATTENTION else ():
        heads = use.heads
        if heads is None or heads.numel() != block.num_indices:
            continue
        for is_dealt in (False, True):
            rows = block.indices.view(-1, len(heads)).mT if is_dealt else block.indices.view(len(heads), -1)
            if torch.equal(heads, rows):
                return replace(block, role=role, heads=len(heads), is_dealt=is_dealt)
    return replace(block, role=role)
