"""Steepest steps of many parameters at once: tensors that one ball and one shape describe go through its duality map together."""

from __future__ import annotations

import cmath
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from thunder_norm.modular.duality import Ball
from thunder_norm.modular.orthogonal import Method


def steepest_steps(parts: Sequence[tuple[Ball, torch.Tensor, float]], method: Method = "newton_schulz") -> list[torch.Tensor]:
    """``size * ball.lmo(g)`` for each (ball, g, size), in order.

    Tensors of one ball and shape go through it together (see `batches`).
    """
    found: dict[int, torch.Tensor] = {}
    for positions in batches([(of_kind, g) for of_kind, g, _ in parts], method=method):
        together = steepest_batch(
            parts[positions[0]][0], [parts[i][1] for i in positions], [parts[i][2] for i in positions], method
        )
        found |= zip(positions, together, strict=True)
    return [found[i] for i in range(len(parts))]


def steepest_batch(
    of_kind: Ball, gradients: Sequence[torch.Tensor], sizes: Sequence[float], method: Method = "newton_schulz"
) -> list[torch.Tensor]:
    """``size * ball.lmo(g)`` for gradients of one batch (see `batches`), in order."""
    if len(gradients) == 1:
        return [of_kind.lmo(gradients[0], method, sizes[0])]
    if len(set(sizes)) == 1:  # as of repeated blocks
        return list(of_kind.lmo(torch.stack(list(gradients)), method, sizes[0]).unbind())
    steps = of_kind.lmo(torch.stack(list(gradients)), method)
    return list(torch._foreach_mul(steps.unbind(), list(sizes)))


def nearest(parts: Sequence[tuple[Ball, torch.Tensor]]) -> list[torch.Tensor]:
    """``ball.project(t)`` for each (ball, t), in order; those of one shape in one batch."""
    found: dict[int, torch.Tensor] = {}
    for positions in batches(parts):
        of_kind, _ = parts[positions[0]]
        found |= zip(positions, of_kind.project(torch.stack([parts[i][1] for i in positions])), strict=True)
    return [found[i] for i in range(len(parts))]


def batches(
    tensors: Sequence[tuple[Ball, torch.Tensor]], apart: Sequence[Hashable] | None = None, method: Method = "newton_schulz"
) -> list[list[int]]:
    """Positions of the tensors that go through a duality map together: of one ball and shape, and equal in `apart`.

    On a GPU all matrices of one shape: as many matrix products as for one of them.  Those that are mapped one by one as fast, large
    ones on a CPU, stay alone: nothing is copied.
    """
    groups: dict[Any, list[int]] = {}
    for i, (of_kind, t) in enumerate(tensors):
        alone = i if of_kind.goes_alone(t, method) else None
        groups.setdefault((of_kind, t.shape, t.dtype, t.device, alone, apart and apart[i]), []).append(i)
    return list(groups.values())


class Batches:
    """`batches`, found anew only when other tensors come than the last time."""

    def __init__(self, method: Method) -> None:
        self._method: Method = method
        self._of: list[tuple] = []
        self._found: list[list[int]] = []

    def of(self, tensors: Sequence[tuple[Ball, torch.Tensor]], apart: Sequence[Hashable]) -> list[list[int]]:
        """As `batches`, which looks at nothing of a tensor but these."""
        key = [(of_kind, t.shape, t.dtype, t.device, by) for (of_kind, t), by in zip(tensors, apart, strict=True)]
        if key != self._of:
            self._of, self._found = key, batches(tensors, apart, self._method)
        return self._found


@torch.no_grad()
def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of those with an entry that is NaN or infinite; one transfer a device.

    A sum is read once, and is not finite if an entry is not.  If it is not, entries are looked at: finite ones may overflow in a sum.
    """
    per_device: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        if t.numel():
            per_device.setdefault(t.device, []).append(name)
    suspected = []
    for names in per_device.values():
        sums = torch.stack([_sum(tensors[name]) for name in names]).tolist()
        suspected += [name for name, found in zip(names, sums, strict=True) if not cmath.isfinite(found)]
    return [name for name in suspected if not tensors[name].isfinite().all()]


def _sum(t: torch.Tensor) -> torch.Tensor:
    return t.sum(dtype=torch.float32) if t.dtype.itemsize < 4 else t.sum()
