"""Layers written out, and modules of several arguments and results."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class WrittenRMSNorm(nn.Module):
    def __init__(self, c, how="rsqrt"):
        super().__init__()
        self.gain, self.how = nn.Parameter(torch.ones(c)), how

    def forward(self, x):
        if self.how == "rsqrt":
            return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2))
        if self.how == "divided":
            return self.gain * (x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt())
        if self.how == "layer":
            centered = x - x.mean(-1, keepdim=True)
            return self.gain * centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-2)
        return self.gain * F.normalize(x, dim=-1)


class WrittenAttention(nn.Module):
    """[n, t, c], with heads."""

    def __init__(self, c, heads=2, how="sdpa"):
        super().__init__()
        self.qkv, self.out, self.heads, self.how = nn.Linear(c, 3 * c), nn.Linear(c, c), heads, how

    def forward(self, x):
        n, t, c = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
            y = F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Mixer(nn.Module):
    """[n, t, c], across tokens and then channels."""

    def __init__(self, t, c):
        super().__init__()
        self.tokens, self.channels = nn.Linear(t, t), nn.Linear(c, c)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x).permute(0, 1, 2).contiguous()


class SetsItems(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[..., 0] = 0.0
        y[:, -1:] = y[:, -1:] * 2
        return y


class Preallocated(nn.Module):
    def forward(self, x):
        out = torch.zeros_like(x)
        for i in range(x.shape[-1]):
            out[..., i] = x[..., : i + 1].sum(-1)
        return out


class Pairs(nn.Module):
    """Products of pairs, by Bilinear."""

    def __init__(self, bilinear, body):
        super().__init__()
        self.bilinear, self.body = bilinear, body

    def forward(self, x):
        return self.bilinear(x, self.body(x))


class TwoInputs(nn.Module):
    def __init__(self, first, second, how="add"):
        super().__init__()
        self.first, self.second, self.how = first, second, how

    def forward(self, x, y):
        a, b = self.first(x), self.second(y)
        if self.how == "add":
            return a + b
        if self.how == "mul":
            return a * b
        if self.how == "cat":
            return torch.cat([a, b], -1)
        return a @ b.transpose(-1, -2)


class Translated(nn.Module):
    """Something of two arguments, such as nn.Transformer, on both inputs."""

    def __init__(self, body, first, second):
        super().__init__()
        self.body, self.first, self.second = body, first, second

    def forward(self, x, y):
        return self.body(self.first(x), self.second(y))


class Both(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x), self.second(x)


class AsDict(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        y = self.first(x)
        return {"first": y, "rest": [self.second(x), y.argmax(-1)], "size": x.shape[-1], "none": None}


class Result(NamedTuple):
    value: torch.Tensor
    same: torch.Tensor


class AsNamedTuple(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        return Result(y, y)
