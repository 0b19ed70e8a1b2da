"""Models that a training monitor watches in the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal attention, by torch's function or written out."""

    def __init__(self, width: int, heads: int, *, is_written_out: bool = False):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.is_written_out = heads, is_written_out

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, t, d = x.shape
        return self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        if self.is_written_out:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, *, is_written_out: bool = False):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, is_written_out=is_written_out)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class LanguageModel(nn.Module):
    """A decoder of tokens."""

    def __init__(
        self,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        tokens: int = 20,
        length: int = 12,
        dropout: float = 0.0,
        **options: Any,
    ):
        super().__init__()
        self.emb, self.pos = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout, **options) for _ in range(depth)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def language_model(**options: Any) -> tuple[nn.Module, torch.Tensor, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    """A decoder, a batch, and its loss."""
    return LanguageModel(**options), torch.randint(20, (4, 12)), token_loss


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def perceptron(dropout: float = 0.0) -> tuple[nn.Sequential, torch.Tensor, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
    return model, torch.randn(8, 6), square_loss


def convolutional() -> tuple[nn.Module, torch.Tensor, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(288, 4)
    )
    return model, torch.randn(2, 3, 8, 8), square_loss
