"""Steepest steps of many parameters at once: tensors that one ball and one shape describe go through its duality map together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thunder_norm.modular.duality import Ball, Method, OperatorBall

_LARGE = 2**16  # entries


def steepest_steps(parts: Sequence[tuple[Ball, torch.Tensor, float]], method: Method = "newton_schulz") -> list[torch.Tensor]:
    """``size * ball.lmo(g)`` for each (ball, g, size), in order.

    Matrices of one shape are orthogonalized in one batch: as many matrix products as for one of them.
    """
    found: dict[int, torch.Tensor] = {}
    for positions in batches([(of_kind, g) for of_kind, g, _ in parts]):
        of_kind, first, _ = parts[positions[0]]
        if len(positions) == 1:
            found[positions[0]] = of_kind.lmo(first, method) * parts[positions[0]][2]
            continue
        steps = of_kind.lmo(torch.stack([parts[i][1] for i in positions]), method)
        found |= {i: step * parts[i][2] for i, step in zip(positions, steps, strict=True)}
    return [found[i] for i in range(len(parts))]


def nearest(parts: Sequence[tuple[Ball, torch.Tensor]]) -> list[torch.Tensor]:
    """``ball.project(t)`` for each (ball, t), in order; those of one shape in one batch."""
    found: dict[int, torch.Tensor] = {}
    for positions in batches(parts):
        of_kind, _ = parts[positions[0]]
        found |= zip(positions, of_kind.project(torch.stack([parts[i][1] for i in positions])), strict=True)
    return [found[i] for i in range(len(parts))]


def batches(tensors: Sequence[tuple[Ball, torch.Tensor]]) -> list[list[int]]:
    """Positions of the tensors that go through a duality map together.

    Large ones that are not operators are mapped one by one: as fast, and nothing is copied.
    """
    groups: dict[Any, list[int]] = {}
    for i, (of_kind, t) in enumerate(tensors):
        alone = i if t.numel() > _LARGE and not isinstance(of_kind, OperatorBall) else None
        groups.setdefault((of_kind, t.shape, t.dtype, t.device, alone), []).append(i)
    return list(groups.values())


@torch.no_grad()
def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of those with an entry that is NaN or infinite; one transfer a device."""
    per_device: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        if t.numel():
            per_device.setdefault(t.device, []).append(name)
    bad = []
    for names in per_device.values():
        finite = torch.stack([tensors[name].isfinite().all() for name in names]).tolist()
        bad += [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    return bad
