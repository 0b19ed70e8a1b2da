"""What a drawn model is checked for; each check returns what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thunder_norm.modular import find_roles

from .optimizer_attentions import Attended
from .optimizer_truth import Known

_OF_ATTENTION = frozenset(["query", "key", "value"])


@dataclass(frozen=True)
class Case:
    """A model with its arguments, and what is known of it."""

    model: torch.nn.Module
    inputs: torch.Tensor
    known: dict[str, Known]
    attentions: tuple[Attended, ...]
    draw: random.Random
    made: Callable[[], torch.nn.Module]


def roles(case: Case) -> str | None:
    """Roles, blocks, heads, and what decides masses, are those that were written."""
    found = find_roles(case.model, case.inputs)
    for row in found:
        known = case.known[row.name]
        if known.role is not None and row.role != known.role:
            return f"{row.name} is {row.role}, not {known.role}"
        attended = {b.role for b in row.blocks} & _OF_ATTENTION - {cut.role for cut in known.cuts}
        if attended:
            return f"{row.name} is {attended} of an attention that there is not"
        blocks = [set(b.indices.tolist()) for b in row.blocks] if row.is_split else []
        wanted = [set(cut.rows) for cut in known.cuts] if len(known.cuts) > 1 else []
        if known.role in (None, "tied", "gain", "table"):
            continue
        if sorted(map(sorted, blocks)) != sorted(map(sorted, wanted)):
            return f"{row.name} has blocks {[str(b) for b in row.blocks]}, not {wanted}"
        if row.blocks and len(row.shape) < 3 and known.norm == "matrix" and row.out_axis != known.axes[0]:
            return f"{row.name} has its outputs along {row.out_axis}, not {known.axes[0]}"
        for cut in known.cuts:
            (block,) = [b for b in row.blocks if set(b.indices.tolist()) == set(cut.rows)]
            if cut.role is not None and block.role != cut.role:
                return f"rows {cut.rows} of {row.name} are {block.role or 'no role'}, not {cut.role}"
            heads = [sorted(of.indices.tolist()) for of in block.of_heads or ()]
            if cut.heads and sorted(heads) != sorted(map(sorted, cut.heads)):
                return f"heads of {row.name}: {heads}, not {cut.heads}"
    return None


CHECKS: dict[str, Callable[[Case], str | None]] = {"roles": roles}
