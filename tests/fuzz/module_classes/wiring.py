"""Containers, and modules that connect others."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Each(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        for body in self.bodies:
            x = body(x)
        return x


class Named(nn.Module):
    def __init__(self, first, then):
        super().__init__()
        self.bodies = nn.ModuleDict({"first": first, "skipped": nn.Linear(1, 1), "then": then})

    def forward(self, x):
        for name, body in self.bodies.items():
            x = body(x) if name != "skipped" else x
        return x


class InContainer(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.parts = nn.Container(inner=body)

    def forward(self, x):
        return self.parts.inner(x)


class Mean(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return torch.stack([body(x) for body in self.bodies]).mean(0)


class Side(nn.Module):
    """Two modules on the two halves."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([self.first(a), self.second(b)], -1)


class Concat(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return torch.cat([body(x) for body in self.bodies], -1)


class Residual(nn.Module):
    def __init__(self, body, scale=1.0):
        super().__init__()
        self.body, self.scale = body, scale

    def forward(self, x):
        return x + self.scale * self.body(x)


class ResidualInPlace(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        y += x
        return y


class LayerScale(nn.Module):
    def __init__(self, body, c):
        super().__init__()
        self.body, self.gain = body, nn.Parameter(0.1 * torch.ones(c))

    def forward(self, x):
        return x + self.gain * self.body(x)


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self.body(x))


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self, body):
        super().__init__()
        self.first = self.second = body

    def forward(self, x):
        return self.first(x) - self.second(2 * x)


class Copied(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.second = body, copy.deepcopy(body)

    def forward(self, x):
        return self.first(x) + self.second(x)


class Gated(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x * torch.sigmoid(self.body(x))


class SqueezeExcite(nn.Module):
    """A gate for each channel, for [n, c, *places]."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x):
        s = x.flatten(2).mean(-1)
        s = torch.sigmoid(self.up(F.relu(self.down(s), inplace=True)))
        return x * s.reshape(*s.shape, *[1] * (x.dim() - 2))


class Experts(nn.Module):
    def __init__(self, c, *bodies):
        super().__init__()
        self.router, self.bodies = nn.Linear(c, len(bodies)), nn.ModuleList(bodies)

    def forward(self, x):
        weights = F.softmax(self.router(x), -1)
        return sum(weights[..., i : i + 1] * body(x) for i, body in enumerate(self.bodies))


class TopGate(nn.Module):
    """The largest entries, the others 0."""

    def __init__(self, k=2):
        super().__init__()
        self.k = k

    def forward(self, x):
        threshold = x.topk(self.k, -1).values[..., -1:]
        return torch.where(x >= threshold, x, torch.zeros_like(x))


class TrainBranch(nn.Module):
    def __init__(self, training, otherwise):
        super().__init__()
        self.in_training, self.otherwise = training, otherwise

    def forward(self, x):
        return self.in_training(x) if self.training else self.otherwise(x)


class Alternating(nn.Module):
    """Something else in each call: it counts them."""

    def __init__(self, even, odd):
        super().__init__()
        self.even, self.odd, self.calls = even, odd, 0

    def forward(self, x):
        self.calls += 1
        return self.odd(x) if self.calls % 2 else self.even(x)


class ByKeyword(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, *, scale=0.5):
        return self.body(input=x) * scale


class StochasticDepth(nn.Module):
    def __init__(self, body, p=0.5):
        super().__init__()
        self.body, self.p = body, p

    def forward(self, x):
        y = self.body(x)
        if not self.training:
            return x + y
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype) > self.p
        return x + y * keep / (1 - self.p)


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x
