"""Models and gradients for tests of the optimizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.seeds import seeded

# of `Model`: the axes of a unit's entries; those that are not named take whole steps
UNITS = {"table.weight": (1,), "conv.bias": (0,), "norm.weight": (), "norm.bias": (0,), "head.weight": (1,), "head.bias": (0,)}


class Model(nn.Module):
    """A table, a kernel, operators of two shapes, biases and gains; unused parameters and frozen ones."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        made: dict[str, Any] = {"dtype": dtype}
        self.table = nn.Embedding(7, 8, **made)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, **made)
        self.norm = nn.LayerNorm(8, **made)
        self.one = nn.Linear(8, 8, bias=False, **made)
        self.two = nn.Linear(8, 8, bias=False, **made)
        self.head = nn.Linear(8, 3, **made)
        self.fixed = nn.Parameter(torch.ones(8, **made), requires_grad=False)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.table(i)
        x = self.conv(x.mT).mT
        x = self.norm(x) * self.fixed
        return self.head(self.two(torch.relu(self.one(x))))


def made(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(seeded(seed))
    return Model(dtype), torch.randint(0, 7, (4, 5))


def backward(model: nn.Module, i: torch.Tensor, seed: int = 0) -> None:
    model.zero_grad()
    out = model(i)
    aim = torch.randn(out.shape, generator=torch.Generator().manual_seed(seeded(seed)), dtype=out.dtype)
    (out - aim).square().mean().backward()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def lmo(name: str, d: np.ndarray) -> np.ndarray:
    """Of the parameters of `Model`, from the definitions, in numpy."""
    if name == "conv.weight":  # every tap an operator of norm 1 / taps
        return np.stack([lmo("one.weight", d[:, :, k]) / d.shape[2] for k in range(d.shape[2])], -1)
    if name in ("one.weight", "two.weight", "head.weight"):
        u, s, vh = np.linalg.svd(d, full_matrices=False)
        return u[:, s > 1e-12 * s[0]] @ vh[s > 1e-12 * s[0]] * math.sqrt(d.shape[0] / d.shape[1])
    if name == "norm.weight":
        return np.sign(d)
    size = np.sqrt((d**2).mean(-1, keepdims=True))  # rows of tables, biases
    return np.divide(d, size, out=np.zeros_like(d), where=size > 0)


def project(name: str, w: np.ndarray) -> np.ndarray:
    """To the nearest of norm at most 1, of the parameters of `Model`, from the definitions, in numpy."""
    if name == "conv.weight":
        return np.stack([project("one.weight", w[:, :, k] * w.shape[2]) / w.shape[2] for k in range(w.shape[2])], -1)
    if name in ("one.weight", "two.weight", "head.weight"):
        u, s, vh = np.linalg.svd(w, full_matrices=False)
        return u * np.minimum(s, math.sqrt(w.shape[0] / w.shape[1])) @ vh
    if name == "norm.weight":
        return np.clip(w, -1, 1)
    return w / np.maximum(np.sqrt((w**2).mean(-1, keepdims=True)), 1)
