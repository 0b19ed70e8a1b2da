"""Programs of those who model the world: flows as derivatives, fields, operators, codes with thresholds, numbers of any size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .written import vectors, written


def neighbours() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 3, 4, 0, 2, 5], [1, 2, 0, 4, 3, 3, 4, 1]])


@written("Hamiltonian network", vectors)
class HamiltonianNetwork(nn.Module):
    """Greydanus et al.'s: a field of velocities that keeps an energy; the model itself lets its input require grad."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))

    def forward(self, x):
        with torch.enable_grad():
            x.requires_grad = True
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        q, p = slope.chunk(2, dim=-1)
        return torch.cat([p, -q], dim=-1)


@written("EGNN", lambda: torch.randn(6, 8), lambda: torch.randn(6, 3), neighbours)
class EGNN(nn.Module):
    """Satorras et al.'s: features and coordinates that turn with the input."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.coordinate = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(24, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, h, pos, edge_index):
        row, col = edge_index
        for _ in range(2):
            d = pos[row] - pos[col]
            r = d.pow(2).sum(-1, keepdim=True)
            message = self.edge(torch.cat([h[row], h[col], r], -1))
            moved = torch.zeros_like(pos).index_add(0, row, d / (r.sqrt() + 1) * self.coordinate(message))
            degree = torch.zeros(len(pos), 1).index_add(0, row, torch.ones(len(row), 1)).clamp(min=1)
            pos = pos + moved / degree
            h = h + self.node(torch.cat([h, torch.zeros(len(h), 16).index_add(0, row, message)], -1))
        return h, pos


@written("SIREN", lambda: torch.rand(5, 2) * 2 - 1)
class Siren(nn.Module):
    """Sitzmann et al.'s: a picture as a function of places, by sines."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 3)])
        with torch.no_grad():
            self.layers[0].weight.uniform_(-1 / 2, 1 / 2)
            for layer in self.layers[1:]:
                layer.weight.uniform_(-math.sqrt(6 / 16) / 30, math.sqrt(6 / 16) / 30)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.sin(30 * layer(x))
        return self.layers[-1](x)


@written("radiance field", lambda: torch.randn(3, 3), lambda: torch.randn(3, 3), lambda: torch.rand(3, 6))
class RadianceField(nn.Module):
    """Mildenhall et al.'s NeRF: colours along a ray, at places that are drawn and sorted, as far as light comes through."""

    octaves: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.second, self.density = nn.Linear(27, 24), nn.Linear(51, 24), nn.Linear(24, 1)
        self.colour = nn.Sequential(nn.Linear(27, 12), nn.ReLU(), nn.Linear(12, 3))
        self.register_buffer("octaves", 2.0 ** torch.arange(4))

    def encoded(self, x):
        angles = x[..., None, :] * self.octaves[:, None]
        return torch.cat([x, torch.sin(angles).flatten(-2), torch.cos(angles).flatten(-2)], -1)

    def forward(self, origin, direction, drawn):
        z = torch.sort(0.5 + 2.5 * drawn, dim=-1).values
        e = self.encoded(origin[:, None] + direction[:, None] * z[..., None])
        h = F.relu(self.second(torch.cat([F.relu(self.first(e)), e], -1)))
        towards = F.normalize(direction, dim=-1)[:, None].expand(-1, z.shape[1], -1)
        colours = torch.sigmoid(self.colour(torch.cat([h, towards], -1)))
        gaps = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1) * direction.norm(dim=-1, keepdim=True)
        opacity = 1 - torch.exp(-F.relu(self.density(h).squeeze(-1)) * gaps)
        comes_through = torch.cumprod(torch.cat([torch.ones_like(z[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        return ((opacity * comes_through)[..., None] * colours).sum(1)


@written("DeepONet", lambda: torch.randn(3, 10), lambda: torch.rand(7, 1))
class DeepONet(nn.Module):
    """Lu et al.'s: an operator, by functions of what is given and functions of where it is asked for."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 8))
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 8))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u, y):
        return torch.einsum("bp,np->bn", self.branch(u), self.trunk(y)) + self.bias


@written("wavelet shrinkage", vectors)
class Shrinkage(nn.Module):
    """Three layers of LISTA with thresholds that are not negative, between a transform and back."""

    def __init__(self):
        super().__init__()
        self.forth, self.again, self.back = nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 8)
        self.threshold = nn.Parameter(torch.full((16,), -2.0))

    def forward(self, x):
        b = self.forth(x)
        z, threshold = torch.zeros_like(b), F.softplus(self.threshold)
        for _ in range(3):
            u = b + self.again(z)
            z = torch.sign(u) * F.relu(u.abs() - threshold)
        return self.back(z)


@written("world model", vectors)
class WorldModel(nn.Module):
    """As Hafner et al.'s read and write numbers of any size: by a logarithm that keeps the sign, and its inverse."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x):
        y = self.layers(torch.sign(x) * torch.log1p(x.abs()))
        return torch.sign(y) * (torch.exp(y.abs()) - 1)
