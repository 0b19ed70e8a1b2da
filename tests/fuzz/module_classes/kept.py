"""What modules keep on themselves, and hooks."""

from __future__ import annotations

import torch
from torch import nn


class CachedTable(nn.Module):
    """A table made of a parameter in the first call."""

    def __init__(self, c):
        super().__init__()
        self.bias, self.table = nn.Parameter(torch.randn(c)), None

    def forward(self, x):
        if self.table is None:
            self.table = self.bias * 2
        return x + self.table


class CachedBySize(nn.Module):
    """Tables by the length of the input, in a dictionary."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        n = x.shape[-1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, dtype=x.dtype, device=x.device).cos() * x.new_ones(n)
        return x * self.tables[n]


class Remembers(nn.Module):
    """The last input, all outputs, and how many there were."""

    def __init__(self, body):
        super().__init__()
        self.body, self.last, self.outputs, self.calls = body, None, [], 0

    def forward(self, x):
        y = self.body(x)
        self.last, self.calls = x, self.calls + 1
        self.outputs.append(y.detach())
        return y


class UsesLast(nn.Module):
    """A recurrent state that is kept between calls."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        self.state = x if self.state is None else 0.5 * (self.state.detach() + x)
        return self.state + x


class EmaInPlace(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.register_buffer("mean", torch.zeros(c))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0))
        return x - self.mean


class EmaReassigned(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.register_buffer("mean", torch.zeros(c), persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0)
        return x - self.mean


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x * 0.5


class Constants(nn.Module):
    """Tensors that are buffers, attributes, and made on the way."""

    def __init__(self, c):
        super().__init__()
        self.register_buffer("mask", torch.arange(c) % 2 == 0)
        self.register_buffer("order", torch.arange(c).flip(0))
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        x = x.masked_fill(self.mask, 0.5).index_select(-1, self.order)
        return torch.where(self.mask, x, -x) * self.scale + torch.ones(x.shape[-1], dtype=x.dtype)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.cos = self.sin = None

    def forward(self, x):
        if self.cos is None:
            t = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
            self.cos, self.sin = torch.cat([t, t], -1).cos(), torch.cat([t, t], -1).sin()
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin


def _halved(module, args):
    return (args[0] * 0.5,)


def _doubled(module, args, output):
    return output * 2


class Hooked(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        body.register_forward_pre_hook(_halved)
        body.register_forward_hook(_doubled)

    def forward(self, x):
        return self.body(x)


class Watched(nn.Module):
    """A hook keeps what a submodule makes."""

    def __init__(self, body):
        super().__init__()
        self.body, self.seen = body, {}
        body.register_forward_hook(lambda module, args, output: self.seen.__setitem__("out", output.detach()))

    def forward(self, x):
        return self.body(x) + self.seen["out"].mean() if "out" in self.seen else self.body(x)
