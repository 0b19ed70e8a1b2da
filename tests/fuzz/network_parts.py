"""Parts of random networks, each a module that keeps the shape of its input, by name: of rows [.., d], of tokens [b, t, d], of images [b, d, h, w]."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Make = Callable[[random.Random, int], nn.Module]

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.Softplus,
    nn.Hardtanh,
    nn.ReLU6,
    nn.Mish,
    nn.Hardswish,
    nn.Softsign,
    nn.Tanhshrink,
    nn.SELU,
    nn.LogSigmoid,
    nn.Softshrink,
    nn.PReLU,
)


class Of(nn.Module):
    """A function of an input and of modules."""

    def __init__(self, f: Callable[..., torch.Tensor], *parts: nn.Module):
        super().__init__()
        self.f, self.parts = f, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the function says."""
        return self.f(x, *self.parts)


class Attention(nn.Module):
    """Self-attention of some heads, in one operation or written out, perhaps causal."""

    def __init__(self, width: int, heads: int, is_causal: bool, is_written_out: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_causal, self.is_written_out = heads, is_causal, is_written_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of tokens."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        if self.is_written_out:
            y = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(-3, -2).flatten(-2))


def activation(pick: random.Random) -> nn.Module:
    """One of them."""
    return pick.choice(ACTIVATIONS)()


def normalization(pick: random.Random, d: int) -> nn.Module:
    """Of features, by torch's modules or written out."""
    made: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(d, eps=pick.choice([1e-5, 1e-2])),
        lambda: nn.RMSNorm(d, eps=1e-5),
        lambda: nn.LayerNorm(d, elementwise_affine=False),
        lambda: Of(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda: Of(lambda x: F.normalize(x, dim=-1)),
    ]
    return pick.choice(made)()


def _mlp(pick: random.Random, d: int) -> nn.Module:
    h = pick.choice([3, 6, 8])
    return nn.Sequential(nn.Linear(d, h), activation(pick), nn.Linear(h, d))


def _residual(part: nn.Module, scale: float = 1.0, times: int = 1) -> nn.Module:
    def f(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        for _ in range(times):
            x = x + scale * inner(x)
        return x

    return Of(f, part)


def _gated(pick: random.Random, d: int) -> nn.Module:
    h = pick.choice([3, 6])
    return Of(
        lambda x, a, b, act, out: out(act(a(x)) * b(x)), nn.Linear(d, h), nn.Linear(d, h), activation(pick), nn.Linear(h, d)
    )


def _attention(pick: random.Random, d: int) -> nn.Module:
    return Attention(d, pick.choice([1, 2]), pick.random() < 0.4, pick.random() < 0.3)


def _graph(pick: random.Random, d: int) -> nn.Module:
    seed = pick.randrange(1000)

    def f(x: torch.Tensor, own: nn.Module, others: nn.Module) -> torch.Tensor:
        n = x.shape[-2]
        edges = (torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.4).to(x.dtype) + torch.eye(n, dtype=x.dtype)
        return (edges / edges.sum(-1, keepdim=True) @ others(x) + own(x)).relu()

    return Of(f, nn.Linear(d, d), nn.Linear(d, d))


def _recurrent(pick: random.Random, d: int) -> nn.Module:
    kind: Any = pick.choice([nn.RNN, nn.GRU, nn.LSTM])
    return Of(lambda x, r: r(x)[0], kind(d, d, pick.choice([1, 1, 2]), batch_first=True))


def _batch_norm(pick: random.Random, d: int) -> nn.Module:
    made = nn.BatchNorm2d(d)
    assert made.running_mean is not None and made.running_var is not None
    made.running_mean.normal_()
    made.running_var.uniform_(0.1, 3)
    return made


ROWS: dict[str, Make] = {
    "linear": lambda pick, d: nn.Linear(d, d),
    "mlp": _mlp,
    "residual": lambda pick, d: _residual(_mlp(pick, d), pick.choice([1.0, 0.5, -1.0])),
    "repeated": lambda pick, d: _residual(_mlp(pick, d), 0.5, pick.randint(2, 4)),
    "tied": lambda pick, d: Of(lambda x, m, act: F.linear(act(m(x)), m.weight.T), nn.Linear(d, 5), activation(pick)),
    "gated": _gated,
    "gated in place": lambda pick, d: Of(
        lambda x, a, b: torch.tanh(a(x)) * torch.sigmoid(b(x)) + x, nn.Linear(d, d), nn.Linear(d, d)
    ),
    "excited": lambda pick, d: Of(lambda x, a, b: x * torch.sigmoid(b(F.relu(a(x)))), nn.Linear(d, 3), nn.Linear(3, d)),
    "glu": lambda pick, d: nn.Sequential(nn.Linear(d, 2 * d), nn.GLU()),
    "softmax": lambda pick, d: Of(lambda x, a, b: b(torch.softmax(a(x), -1)), nn.Linear(d, 4), nn.Linear(4, d)),
    "joined": lambda pick, d: Of(lambda x, a, b: b(torch.cat([x, a(x).relu()], -1)), nn.Linear(d, 3), nn.Linear(d + 3, d)),
    "activation": lambda pick, d: activation(pick),
    "normalization": normalization,
    "dropout": lambda pick, d: nn.Dropout(0.5),
}
TOKENS: dict[str, Make] = {
    "attention": _attention,
    "residual attention": lambda pick, d: _residual(_attention(pick, d)),
    "normalized attention": lambda pick, d: _residual(nn.Sequential(normalization(pick, d), _attention(pick, d))),
    "normalized mlp": lambda pick, d: _residual(nn.Sequential(normalization(pick, d), _mlp(pick, d))),
    "encoder layer": lambda pick, d: nn.TransformerEncoderLayer(
        d, 2, 8, 0.1, pick.choice(["relu", "gelu"]), batch_first=True, norm_first=pick.random() < 0.5
    ),
    "graph": _graph,
}
SEQUENCES: dict[str, Make] = {"recurrent": _recurrent}
IMAGES: dict[str, Make] = {
    "convolution": lambda pick, d: nn.Conv2d(d, d, pick.choice([1, 3]), padding="same"),
    "residual convolution": lambda pick, d: _residual(nn.Sequential(nn.Conv2d(d, d, 3, padding=1), activation(pick))),
    "batch norm": _batch_norm,
    "group norm": lambda pick, d: nn.GroupNorm(pick.choice([1, d]), d),
    "instance norm": lambda pick, d: nn.InstanceNorm2d(d, affine=True),
    "average pool": lambda pick, d: nn.AvgPool2d(3, 1, 1),
    "max pool": lambda pick, d: nn.MaxPool2d(3, 1, 1),
    "activation": lambda pick, d: activation(pick),
}
PARTS = ROWS | TOKENS | SEQUENCES | IMAGES
