"""Programs that people write after papers of other fields: molecules, cellular automata, sparse codes, states that are filtered, delta rules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .written import vectors, written
from .written_more import sequences


def atoms() -> torch.Tensor:
    return torch.randint(0, 5, (5,))


def positions() -> torch.Tensor:
    return torch.randn(5, 3)


@written("SchNet", atoms, positions)
class SchNet(nn.Module):
    """Schuett et al.'s energy of a molecule: filters of distances, which end at a cutoff."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.filter = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8))
        self.before, self.after, self.energy = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def forward(self, z, p):
        i, j = torch.triu_indices(len(z), len(z), 1, device=z.device)
        i, j = torch.cat((i, j)), torch.cat((j, i))
        d = (p[i] - p[j]).norm(dim=-1)
        cutoff = 0.5 * (torch.cos(d * math.pi / 3) + 1) * (d < 3).float()
        w = self.filter(torch.exp(-2.0 * (d[:, None] - self.centers) ** 2)) * cutoff[:, None]
        h = self.embedding(z)
        message = torch.zeros_like(h).index_add(0, i, self.before(h)[j] * w)
        h = h + self.after(F.softplus(message) - math.log(2))
        return self.energy(h).sum()


def cells() -> torch.Tensor:
    return torch.randn(1, 6, 5, 5)


def which_are_updated() -> torch.Tensor:
    return torch.rand(2, 1, 1, 5, 5)


@written("neural cellular automaton", cells, which_are_updated)
class CellularAutomaton(nn.Module):
    """Mordvintsev et al.'s: cells that perceive by Sobel filters, and are there while a neighbour is alive."""

    def __init__(self):
        super().__init__()
        self.hidden, self.update = nn.Conv2d(18, 16, 1), nn.Conv2d(16, 6, 1, bias=False)
        self_itself = torch.zeros(3, 3)
        self_itself[1, 1] = 1
        sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
        self.register_buffer("filters", torch.stack((self_itself, sobel, sobel.t()))[:, None].repeat(6, 1, 1, 1))

    @staticmethod
    def alive(x):
        return F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1

    def forward(self, x, drawn):
        for u in drawn:
            before = self.alive(x)
            perceived = F.conv2d(x, self.filters, padding=1, groups=6)
            x = x + self.update(F.relu(self.hidden(perceived))) * (u <= 0.5).float()
            x = x * (before & self.alive(x)).float()
        return x[:, :4].clamp(0, 1)


@written("LISTA", vectors)
class LISTA(nn.Module):
    """Gregor and LeCun's: sparse codes by soft thresholds that are learnt, as their formula says it."""

    def __init__(self):
        super().__init__()
        self.encode, self.inhibit = nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.decode = nn.Linear(12, 8, bias=False)
        self.thresholds = nn.Parameter(torch.full((3, 12), 0.1))

    def forward(self, y):
        b = self.encode(y)
        z = torch.zeros_like(b)
        for threshold in self.thresholds:
            u = b + self.inhibit(z)
            z = torch.sign(u) * F.relu(u.abs() - threshold)
        return self.decode(z)


def measured() -> torch.Tensor:
    return torch.randn(2, 3, 2)


@written("Kalman filter", measured)
class KalmanFilter(nn.Module):
    """The states of a learnt linear system, and the likelihood of what was measured."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.randn(2, 3))
        self.log_q, self.log_r = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))

    def forward(self, y):
        m = torch.zeros(len(y), 3, device=y.device)
        eye = torch.eye(3, device=y.device)
        p, loss = eye.repeat(len(y), 1, 1), 0.0
        for t in range(y.shape[1]):
            m, p = m @ self.a.t(), self.a @ p @ self.a.t() + torch.diag(self.log_q.exp())
            s = self.c @ p @ self.c.t() + torch.diag(self.log_r.exp())
            gain = p @ self.c.t() @ torch.linalg.inv(s)
            e = (y[:, t] - m @ self.c.t())[..., None]
            loss = loss + 0.5 * ((e.mT @ torch.linalg.solve(s, e)).flatten() + torch.logdet(s))
            m, p = m + (gain @ e).squeeze(-1), (eye - gain @ self.c) @ p
        return m, loss.mean()


@written("delta rule", sequences)
class DeltaRule(nn.Module):
    """A chunk of Yang et al.'s DeltaNet: the inverse of a triangular matrix row by row, written where it is read."""

    def __init__(self):
        super().__init__()
        self.qkv, self.beta, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.sigmoid(self.beta(x))
        a = -((k * beta) @ k.mT).tril(-1)
        for i in range(1, x.shape[1]):
            a[..., i, :i] = a[..., i, :i].clone() + (a[..., i, :i, None].clone() * a[..., :i, :i].clone()).sum(-2)
        u = (a + torch.eye(x.shape[1], device=x.device)) @ (v * beta)
        return self.out((q @ k.mT).tril() @ u)
