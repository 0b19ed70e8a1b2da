"""Random row-wise programs for composed sensitivities, and an adversary that looks for inputs between which they are steeper."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.seeds import seeded

Program = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: tuple[Program, ...] = (
    F.relu,
    torch.tanh,
    torch.abs,
    torch.sin,
    F.gelu,
    F.silu,
    F.elu,
    lambda x: F.leaky_relu(x, 0.1),
    lambda x: F.hardtanh(x, -0.5, 0.5),
    lambda x: F.softplus(x, beta=2.0),
)


def program(seed: int, width: int = 6, depth: int = 4) -> Program:
    """A program of some layers on the last dimension, of `width` entries: rectangular, residual, scaled, sliced, joined."""
    pick = random.Random(seeded(seed))
    make = torch.Generator().manual_seed(seeded(seed))
    layers: list[Program] = []
    size = width
    for _ in range(depth):
        layer, size = _layer(pick, make, size)
        layers.append(layer)

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


def _matrix(make: torch.Generator, out: int, size: int) -> torch.Tensor:
    return torch.randn(out, size, generator=make, dtype=torch.float64) * (1.5 / size**0.5)


def _layer(pick: random.Random, make: torch.Generator, size: int) -> tuple[Program, int]:
    act = pick.choice(ACTIVATIONS)
    out = pick.randint(2, 7)
    w, v, u = _matrix(make, out, size), _matrix(make, size, out), _matrix(make, size, size)
    bias = torch.randn(out, generator=make, dtype=torch.float64)
    row = torch.randn(size, generator=make, dtype=torch.float64)
    c = pick.choice([-1.0, 0.5, 2.0])
    kinds: dict[str, tuple[Program, int]] = {
        "affine": (lambda x: act(F.linear(x, w, bias)), out),
        "residual": (lambda x: x + c * F.linear(act(F.linear(x, w, bias)), v), size),
        "two bends": (lambda x: x - F.linear(act(F.linear(act(F.linear(x, w)), v)), u), size),
        "gated": (lambda x: torch.sigmoid(F.linear(x, w, bias)) * torch.tanh(F.linear(x, w)), out),
        "gated residual": (lambda x: x + c * torch.sin(x @ u) * torch.sigmoid(x * row), size),
        "scaled": (lambda x: act(x * row) * c, size),
        "sliced": (lambda x: act(x)[..., : size - 1] - x[..., 1:] / 2 if size > 1 else x, max(size - 1, 1)),
        "joined": (lambda x: torch.cat([act(x @ w.T), x.flip(-1)], -1), out + size),
        "rolled": (lambda x: (x.roll(1, -1) - x) @ u, size),
        "mean": (lambda x: x - x.mean(-1, keepdim=True), size),
    }
    return kinds[pick.choice(sorted(kinds))]


def steepest(f: Program, size: int, seed: int, steps: int = 80, starts: int = 48) -> float:
    """The largest ``|f(x + d) - f(x)|_2 / |d|_2`` that gradient ascent finds, for rows x and d of all sizes, small ones at first."""
    make = torch.Generator().manual_seed(seeded(seed))
    x = torch.randn(starts, size, generator=make, dtype=torch.float64) * 2
    lengths = torch.logspace(-3, 1, starts, dtype=torch.float64)[:, None]
    d = F.normalize(torch.randn(starts, size, generator=make, dtype=torch.float64), dim=-1) * lengths
    x.requires_grad_()
    d.requires_grad_()
    optimizer, best = torch.optim.Adam([x, d], lr=0.05), 0.0
    for _ in range(steps):
        ratio = (f(x + d) - f(x)).norm(dim=-1) / d.norm(dim=-1)
        best = max([best, *ratio[d.detach().norm(dim=-1) > 1e-4].tolist()])
        optimizer.zero_grad()
        (-ratio.log().nan_to_num(neginf=0.0).sum()).backward()
        optimizer.step()
    return best
