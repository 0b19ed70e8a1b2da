"""A drawn model that is made, with what is known of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.modular import ModularNorm

from .optimizer_attentions import Attended
from .optimizer_truth import Known

_MASSES: Mapping[str, float] = {
    "heavy": 1.0,
    "light": 0.1,
    "added": 0.1,
    "tokens": 1.0,
    "attention": 1.0,
    "gated": 1.0,
    "places": 1.0,
}
_WITH_NOISE = {"attention": 0.5, "gated": 0.5, "places": 0.3}


class NoOracle(Exception):
    """What torch cannot say."""


def total(out: Any) -> torch.Tensor:
    """A number of all that a model returns."""
    return sum((t.float().square().sum() for t in tree_leaves(out)), torch.zeros(()))


@dataclass(frozen=True)
class Case:
    """A model with its arguments, and what is known of it."""

    model: torch.nn.Module
    inputs: torch.Tensor
    known: dict[str, Known]
    attentions: tuple[Attended, ...]
    draw: random.Random
    made: Callable[[], torch.nn.Module]

    def misfit(self, norm: ModularNorm, with_noise: bool = False, is_of_optimizer: bool = False) -> str | None:
        """Where kinds of norms, masses or targets are others than is known."""
        for name, p in self.model.named_parameters():
            known, found = self.known[name], norm.norms[name]
            kind, dims = found.kind, tuple(d % p.ndim for d in found.elem_dims) if p.ndim else ()
            if known.norm == "matrix":
                is_right = issubclass(kind, RMSToRMSTensor) and dims == known.axes_of(p.ndim)
                is_right &= (
                    not known.is_kernel or issubclass(kind, RMSToRMSConvTensor) and getattr(kind, "groups", 1) == known.groups
                )
            elif known.norm == "rows":
                is_right = kind is RMSTensor and dims == (p.ndim - 1,)
            else:
                is_right = known.norm != "entries" or issubclass(kind, LinfTensor) or kind is RMSTensor and not dims
            if not is_right and norm.sensitivities[name]:
                return f"{name} has the norm {kind.__name__} over {found.elem_dims}, not {known.norm} {known.axes}"
            if known.mass:
                mass = _MASSES[known.mass]
                mass = 1.0 if known.mass == "added" and norm.mode == "modula" else mass
                mass = 4.0 if known.mass == "tokens" and norm.mode == "typical" else mass
                mass = 0.0 if known.mass == "light" and norm.mode == "modula" and not is_of_optimizer else mass
                mass = _WITH_NOISE.get(known.mass, mass) if with_noise and norm.mode == "typical" else mass
                mass = mass if known.is_trained else 0.0
                if abs(norm.masses[name] - mass) > 1e-12:
                    return f"{name} has mass {norm.masses[name]}, not {mass}"
        shares = sum(t * norm.sensitivities[name] for name, t in norm.targets.items())
        reached = sum(m for name, m in norm.masses.items() if norm.sensitivities[name])
        return None if norm.mode == "typical" or abs(shares - reached / norm.mass) < 1e-9 else f"shares add up to {shares}"
