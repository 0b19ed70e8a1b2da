"""What users do with parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize


class Affine(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.randn(c)), nn.Parameter(torch.randn(c))

    def forward(self, x):
        return x * self.gain + self.bias


class AffineInPlace(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.randn(c)), nn.Parameter(torch.randn(c))

    def forward(self, x):
        y = x * self.gain
        y += self.bias
        y.mul_(0.5).clamp_(-3, 3)
        return y


class Sliced(nn.Module):
    """Products with parts of one matrix, [3 c, c]."""

    def __init__(self, c, how="slice"):
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.randn(3 * c, c)), nn.Parameter(torch.randn(3 * c)), how

    def forward(self, x):
        c = x.shape[-1]
        if self.how == "slice":
            return F.linear(x, self.weight[c : 2 * c], self.bias[c : 2 * c])
        if self.how == "chunk":
            q, k, v = (F.linear(x, w, b) for w, b in zip(self.weight.chunk(3), self.bias.chunk(3), strict=True))
            return q * torch.tanh(k) + v
        if self.how == "split":
            a, b = self.weight.split([c, 2 * c])
            return F.linear(F.linear(x, b), b.t()) + F.linear(x, a)
        if self.how == "view":
            return torch.einsum("...i,hoi->...o", x, self.weight.view(3, c, c))
        if self.how == "unbind":
            return sum(F.linear(x, w) for w in self.weight.view(3, c, c).unbind(0))
        if self.how == "index":
            return x @ self.weight[torch.arange(c)].t()
        if self.how == "select":
            return x * self.weight[0] + self.bias[0]
        if self.how == "flat":
            return F.linear(x, self.weight.flatten()[: c * c].view(c, c))
        if self.how == "stack":
            return F.linear(x, torch.stack([self.weight[0], self.weight[1]]))
        return F.linear(x, torch.cat([self.weight[:1], self.weight[-1:]]), self.bias[:2])


class Tied(nn.Module):
    """One matrix, there and back."""

    def __init__(self, c, h=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(h, c))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


class TiedLayers(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class TiedEmbedding(nn.Module):
    def __init__(self, n, c):
        super().__init__()
        self.embedding, self.head = nn.Embedding(n, c), nn.Linear(c, n, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class TwiceUsed(nn.Module):
    """A parameter used as a matrix and as a table of gains."""

    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, c))

    def forward(self, x):
        return F.linear(x, self.weight) * self.weight.view(-1)[: x.shape[-1]]


class ListOfParameters(nn.Module):
    def __init__(self, c, n=2):
        super().__init__()
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(c)) for _ in range(n)])
        self.by_name = nn.ParameterDict({"gain": nn.Parameter(torch.ones(c)), "unused": nn.Parameter(torch.ones(1))})

    def forward(self, x):
        for bias in self.biases:
            x = x + bias
        return x * self.by_name["gain"]


class Positions(nn.Module):
    """Learned positions, and a token before the others."""

    def __init__(self, c, n=16):
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.randn(1, n, c)), nn.Parameter(torch.randn(1, 1, c))

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions[:, : x.shape[1]]


class LowRank(nn.Module):
    def __init__(self, c, rank=2):
        super().__init__()
        self.base = nn.Linear(c, c).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, c)), nn.Parameter(torch.randn(c, rank))

    def forward(self, x):
        return self.base(x) + 0.5 * (x @ self.a.t() @ self.b.t())


class MergedLowRank(nn.Module):
    def __init__(self, c, rank=2):
        super().__init__()
        self.base = nn.Parameter(torch.randn(c, c), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, c)), nn.Parameter(torch.randn(c, rank))

    def forward(self, x):
        return F.linear(x, self.base + self.b @ self.a)


class StandardizedWeight(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, c))

    def forward(self, x):
        w = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, w / (w.std(1, keepdim=True) + 1e-2))


class EqualizedWeight(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(c, c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), (self.weight * 0.5).t()).view_as(x)


class Functional(nn.Module):
    """The module called with other parameters than its own."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        scaled = {name: 0.5 * p for name, p in self.body.named_parameters()}
        return torch.func.functional_call(self.body, scaled, (x,))


class Penalty(nn.Module):
    """The module's result, and the size of its weights."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x), sum(p.square().sum() for p in self.body.parameters())


class ReturnsParameter(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c))

    def forward(self, x):
        return x + self.weight, self.weight


def with_parametrization(module, name, parametrization):
    parametrize.register_parametrization(module, name, parametrization)
    return module


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, w):
        return (w + w.t()) / 2


class Bounded(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, w):
        return self.scale * torch.tanh(w)
