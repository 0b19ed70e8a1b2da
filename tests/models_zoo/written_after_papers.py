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


@written("diagonal state space", sequences)
class DiagonalStateSpace(nn.Module):
    """Gu et al.'s S4D: a convolution by exponentials of complex numbers, which the step divides."""

    def __init__(self):
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(16) * 2 - 4)
        self.log_real, self.imag = (
            nn.Parameter(torch.full((16, 4), -0.7)),
            nn.Parameter(math.pi * torch.arange(4.0).repeat(16, 1)),
        )
        self.c, self.d, self.out = nn.Parameter(torch.randn(16, 4, 2)), nn.Parameter(torch.randn(16)), nn.Linear(16, 16)

    def forward(self, x):
        x, n = x.mT, x.shape[1]
        a = -torch.exp(self.log_real) + 1j * self.imag
        steps = a * self.log_step.exp()[:, None]
        c = torch.view_as_complex(self.c) * (steps.exp() - 1) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(steps[..., None] * torch.arange(n, device=x.device))).real
        y = torch.fft.irfft(torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(kernel, n=2 * n), n=2 * n)[..., :n]
        return self.out(F.gelu(y + x * self.d[:, None]).mT)


@written("orthogonal recurrent network", sequences)
class OrthogonalRecurrent(nn.Module):
    """Helfrich et al.'s scoRNN: a state that a Cayley transform of a skew matrix turns."""

    def __init__(self):
        super().__init__()
        self.skew, self.into = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Linear(16, 8)
        self.b, self.out = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)
        self.register_buffer("signs", torch.tensor([1.0, -1] * 4))

    def forward(self, x):
        a, eye = self.skew.triu(1), torch.eye(8, device=x.device)
        a = a - a.mT
        turn = torch.linalg.solve(eye + a, eye - a) * self.signs
        h = x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            z = self.into(x[:, t]) + h @ turn.mT
            h = torch.sign(z) * F.relu(z.abs() + self.b)
        return self.out(h)


def answers() -> torch.Tensor:
    return torch.randn(2, 8, 3)


@written("ridge regression head", sequences, answers)
class RidgeHead(nn.Module):
    """Bertinetto et al.'s R2D2: features that a linear system in closed form fits the answers with."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.log_weight, self.scale = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        known, asked = self.features(x)[:, :4], self.features(x)[:, 4:]
        system = known.mT @ known + F.softplus(self.log_weight) * torch.eye(4, device=x.device)
        return self.scale * (asked @ torch.linalg.solve(system, known.mT @ y[:, :4]))


@written("scaled by the largest", sequences)
class ScaledByTheLargest(nn.Module):
    """Attention by scores over the sum of their moduli, and features over the largest of them, as low precision takes them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT
        x = x + (scores / scores.abs().sum(-1, keepdim=True).clamp(min=1e-5)) @ v
        h = F.relu(self.up(x / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)))
        return x + self.down(h / (h.sum(-1, keepdim=True) + 1e-5))


def levels() -> torch.Tensor:
    return torch.randint(0, 16, (2, 24))


@written("WaveNet", levels)
class WaveNet(nn.Module):
    """Van den Oord et al.'s: dilated, gated; the sum of the skips begins with a number, which the first of them cannot cut."""

    def __init__(self):
        super().__init__()
        self.start, self.ends = nn.Conv1d(16, 8, 1), nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 16, 1))
        self.filters, self.gates = (nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=2**i) for i in range(3)) for _ in range(2))
        self.skips, self.rest = (
            nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)),
            nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2)),
        )

    def forward(self, x):
        x, skip = self.start(F.one_hot(x, 16).mT.float()), 0
        for i in range(3):
            y = torch.tanh(self.filters[i](x)) * torch.sigmoid(self.gates[i](x))
            s = self.skips[i](y)
            try:
                skip = skip[:, :, -s.size(2) :]
            except TypeError:
                skip = 0
            skip = s + skip
            if i < 2:
                x = self.rest[i](y) + x[:, :, -y.size(2) :]
        return self.ends(skip)


@written("Barlow Twins", vectors, vectors)
class BarlowTwins(nn.Module):
    """Zbontar et al.'s loss: a correlation matrix, whose diagonal is written into."""

    def __init__(self):
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.bn = nn.BatchNorm1d(8, affine=False)

    def forward(self, a, b):
        c = self.bn(self.projector(a)).T @ self.bn(self.projector(b))
        c.div_(len(a))
        on_diagonal = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diagonal = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().pow_(2).sum()
        return on_diagonal + 0.0051 * off_diagonal


def stories() -> torch.Tensor:
    return torch.randint(0, 20, (2, 5, 4))


def questions() -> torch.Tensor:
    return torch.randint(0, 20, (2, 4))


@written("memory network", stories, questions)
class MemoryNetwork(nn.Module):
    """Sukhbaatar et al.'s, end to end: three hops over bags of words, their tables tied from one to the next."""

    def __init__(self):
        super().__init__()
        self.tables, self.times = nn.ModuleList(nn.Embedding(20, 8) for _ in range(4)), nn.Parameter(torch.randn(4, 5, 8) * 0.1)

    def forward(self, story, question):
        u = self.tables[0](question).sum(1)
        for hop in range(3):
            keys, values = (self.tables[i](story).sum(2) + self.times[i] for i in (hop, hop + 1))
            shares = F.softmax((keys * u.unsqueeze(1)).sum(2), dim=1)
            u = u + (values * shares.unsqueeze(2)).sum(1)
        return u @ self.tables[3].weight.T
