"""Programs whose profiles are compared with measurements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Convolutions(nn.Module):
    """Strided, grouped, dilated and transposed convolutions, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, groups=4, dilation=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.transposed = nn.ConvTranspose2d(16, 8, 3, stride=2)
        self.flat = nn.Conv1d(8, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.grouped(F.relu(self.strided(x)))))
        y = self.transposed(F.max_pool2d(y, 2))
        y = self.flat(y.flatten(2))
        return F.log_softmax(self.head(y.mean(-1)), -1).mean()


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Tied(nn.Module):
    """A language model in small; its head is its table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def convolutions() -> tuple[nn.Module, dict[str, Any]]:
    return Convolutions(), {"x": torch.randn(2, 3, 16, 16)}


def tied() -> tuple[nn.Module, dict[str, Any]]:
    return Tied(), {"ids": torch.randint(0, 50, (2, 8))}


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    return model, {"input": torch.randn(16, 64)}


class Addmm(nn.Module):
    """Layers as those of transformers' GPT-2: a call of addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(32, 8))
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.up).relu() @ self.down


def addmm() -> tuple[nn.Module, dict[str, Any]]:
    return Addmm(), {"x": torch.randn(16, 8)}


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), {"src": torch.randn(2, 5, 16)}
