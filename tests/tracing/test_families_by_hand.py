"""Families of models as people write them by hand: eager PyTorch's results, bounds that hold, targets and training steps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import NormedTensor, norm_report, normed
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform
import thunder


class ProbSparse(nn.Module):
    """Attention of the Informer: the queries that say most, and the mean of the values for the others."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        seen = q @ k[:, ::2].transpose(1, 2)
        top = (seen.amax(-1) - seen.mean(-1)).topk(2, sorted=False).indices
        rows = torch.arange(len(x))[:, None]
        weights = torch.softmax(q[rows, top] @ k.transpose(1, 2) / math.sqrt(6), -1)
        context = v.mean(1, keepdim=True).expand_as(v).clone()
        context[rows, top, :] = weights @ v
        return context


class LocationAttention(nn.Module):
    """That of Tacotron 2, which masks the data of its energies."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.energy = nn.Linear(6, 1, bias=False)
        self.location = nn.Conv1d(2, 6, 3, padding=1, bias=False)

    def forward(self, memory, mask):
        context, last = memory.mean(1), memory.new_zeros(memory.shape[:2])
        total, key, found = last, self.key(memory), []
        for _ in range(2):
            place = self.location(torch.stack([last, total], 1)).transpose(1, 2)
            energies = self.energy(torch.tanh(self.query(context)[:, None] + key + place)).squeeze(-1)
            energies.data.masked_fill_(mask, -float("inf"))
            last = torch.softmax(energies, 1)
            total = total + last
            context = torch.bmm(last[:, None], memory).squeeze(1)
            found.append(context)
        return torch.stack(found, 1)


class HashGrid(nn.Module):
    """Features of the corners around each point, as in instant neural graphics primitives."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, 2) for _ in range(2))
        self.linear, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("primes", torch.tensor([1, 2654435761]))

    def forward(self, x):
        features = []
        for level, table in enumerate(self.tables):
            place = x * (3 * 2**level)
            near = place.floor()
            inside, near = place - near, near.long()
            total = 0
            for corner in torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]):
                a, b = ((near + corner) * self.primes).unbind(-1)
                weight = torch.where(corner.bool(), inside, 1 - inside).prod(-1, keepdim=True)
                total = total + weight * table(torch.bitwise_xor(a, b) % 16)
            features.append(total)
        return self.out(torch.sin(3 * self.linear(torch.cat(features, -1))))


class Highway(nn.Module):
    """A gate and its rest."""

    def __init__(self):
        super().__init__()
        self.gates, self.layers = (nn.ModuleList(nn.Linear(6, 6) for _ in range(3)) for _ in range(2))

    def forward(self, x):
        for gate, layer in zip(self.gates, self.layers, strict=True):
            g = torch.sigmoid(gate(x))
            x = g * torch.tanh(layer(x)) + (1 - g) * x
        return x


class Opacity(nn.Module):
    """Colours along rays by what is left of the light, as in radiance fields."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, points):
        r = self.net(points)
        alpha = 1 - torch.exp(-F.relu(r[..., 3] + 1) * 0.3)  # 1: whatever is drawn, there is something to see
        left = torch.cumprod(torch.cat([torch.ones(len(points), 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * left)[..., None] * torch.sigmoid(r[..., :3])).sum(1)


class Stabilized(nn.Module):
    """The sLSTM: exponential gates relative to the largest so far, over a normalizer that starts at 0."""

    def __init__(self):
        super().__init__()
        self.inputs, self.recurrent = nn.Linear(6, 16), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        h = c = n = m = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            z, i, f, o = (self.inputs(x[:, t]) + self.recurrent(h)).chunk(4, -1)
            before = F.logsigmoid(f) + m
            m = torch.max(before, i)
            keep, new = torch.exp(before - m), torch.exp(i - m)
            c, n = keep * c + new * torch.tanh(z), keep * n + new
            h = torch.sigmoid(o) * (c / (n + 1e-6))
        return h


class Decays(nn.Module):
    """The GRU-D: what was not seen is what was seen last, on its way to the mean."""

    def __init__(self):
        super().__init__()
        self.rate, self.of_hidden = nn.Parameter(torch.rand(4)), nn.Linear(4, 5)
        self.gates, self.candidate = nn.Linear(13, 10), nn.Linear(13, 5)
        self.register_buffer("mean", torch.randn(4) * 0.1)

    def forward(self, x, seen, since):
        mean = self.get_buffer("mean")
        h, last = x.new_zeros(len(x), 5), mean.expand(len(x), -1)
        for value, mask, d in zip(x.unbind(1), seen.unbind(1), since.unbind(1), strict=True):
            last = torch.where(mask, value, last)
            decay, mask = torch.exp(-torch.max(torch.zeros_like(d), self.rate * d)), mask.to(x.dtype)
            value = mask * value + (1 - mask) * (decay * last + (1 - decay) * mean)
            h = torch.exp(-F.relu(self.of_hidden(d))) * h
            z, r = torch.sigmoid(self.gates(torch.cat([value, h, mask], 1))).chunk(2, 1)
            h = (1 - z) * h + z * torch.tanh(self.candidate(torch.cat([value, r * h, mask], 1)))
        return h


class Kalman(nn.Module):
    """A filter: its transition multiplies states and is multiplied, and a solve has no bound by norms alone."""

    def __init__(self):
        super().__init__()
        self.transition = nn.Parameter(torch.eye(3) * 0.9 + torch.randn(3, 3) * 0.05)
        self.seen = nn.Parameter(torch.randn(2, 3) * 0.5)

    def forward(self, y):
        mean, spread, found = y.new_zeros(len(y), 3), torch.eye(3), []
        for t in range(y.shape[1]):
            mean = mean @ self.transition.T
            spread = self.transition @ spread @ self.transition.T + torch.eye(3)
            of_seen = self.seen @ spread
            gain = torch.linalg.solve(of_seen @ self.seen.T + torch.eye(2), of_seen).T
            mean = mean + (y[:, t] - mean @ self.seen.T) @ gain.T
            spread = (torch.eye(3) - gain @ self.seen) @ spread
            found.append(mean)
        return torch.stack(found, 1)


def points():
    return torch.rand(3, 5, 3)


PROGRAMS = {
    "ProbSparse attention": (ProbSparse, lambda: (torch.randn(2, 6, 6),)),
    "location attention": (
        LocationAttention,
        lambda: (torch.randn(2, 4, 6), torch.tensor([[False] * 4, [False, False, True, True]])),
    ),
    "hash grid": (HashGrid, lambda: (torch.rand(5, 2),)),
    "highway": (Highway, lambda: (torch.randn(3, 6),)),
    "opacity": (Opacity, lambda: (points(),)),
    "sLSTM": (Stabilized, lambda: (torch.randn(2, 3, 6),)),
    "GRU-D": (Decays, lambda: (torch.randn(2, 2, 4), torch.rand(2, 2, 4) > 0.4, torch.rand(2, 2, 4))),
}


def made(name):
    torch.manual_seed(seeded(0))
    build, inputs = PROGRAMS[name]
    return build(), inputs()


def jit(model):
    return thunder.jit(model, transforms=[NormTransform()])


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_eagers(name):
    model, args = made(name)
    found = []
    for call in (model, jit(model)):
        model.zero_grad()
        x = args[0].clone().requires_grad_()
        y = call(x, *args[1:])
        y.sin().sum().backward()
        found.append((y, x.grad, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "location attention"])
def test_bounds_hold(name):
    model, args = made(name)
    y = normed(jit(model))(*args)
    assert isinstance(y, NormedTensor)
    assert actual_norm(y) <= y.norm_size * (1 + 1e-5) < math.inf
    assert all(math.isfinite(r.norm_size) for r in norm_report(jit(model), *args).rows)


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_lower_a_loss(name):
    model, args = made(name)
    targets = ModularNorm(model, *args, mode="typical").targets
    assert set(targets) == {n for n, _ in model.named_parameters()} and min(targets.values()) > 1e-6
    optimizer = ModularOptimizer(model, *args, lr=0.05)
    aim = torch.randn(model(*args).shape, generator=torch.Generator().manual_seed(seeded(1)))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(*args), aim)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_uses_that_disagree_have_a_norm_at_the_data_where_norms_alone_bound_nothing():
    """Refused before, as if none of the norms that the uses of the transition want could be converted."""
    torch.manual_seed(seeded(0))
    model, y = Kalman(), torch.randn(2, 3, 2)
    rows = norm_report(jit(model), y).rows
    assert all(math.isfinite(r.norm_size) and r.actual <= r.norm_size * (1 + 1e-5) for r in rows)
    assert rows[-1].actual == pytest.approx(model(y).square().mean(-1).sqrt().max().item(), rel=1e-5)
    assert min(ModularNorm(model, y, mode="typical").targets.values()) > 1e-6


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, x, ids=None):
        return self.linear(self.table(x.long() if ids is None else ids)) + 0 * x.sum()


@pytest.mark.parametrize("mode", ["typical", "modula"])
def test_integers_that_a_program_rounds_to_are_as_those_given_to_it(mode):
    """Refused before; in bounds they still are, as the entries that they name change with the input."""
    torch.manual_seed(seeded(0))
    model, x = Rows(), torch.rand(5) * 8
    masses = {"table": 1.0}  # in mode "typical" a table's mass says whether the integers are given
    inside, given = (ModularNorm(model, *args, mode=mode, masses=masses).targets for args in ((x,), (x, x.long())))
    assert inside == pytest.approx(given)
    with pytest.raises(NormMismatchError, match=r"torch.int64 is not covered(.|\n)*mode='typical'"):
        ModularNorm(model, x)
