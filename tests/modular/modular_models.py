"""Models that tests of the modular norm share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.core.test_modes import Residual

D = torch.float64


TOKENS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def largest_rms(t: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The norm of RMSTensor and (no dims) LinfTensor, written out."""
    return (t.square().mean(dims) if dims else t.square()).amax().sqrt()


def operator_norm(w: torch.Tensor) -> torch.Tensor:
    """The norm of RMSToRMSTensor by SVD, of matrices [..., out, in]."""
    return torch.linalg.svdvals(w)[..., 0].amax() * math.sqrt(w.shape[-1] / w.shape[-2])


class Attention(nn.Module):
    """Causal, with scores divided by the width of a head."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (m(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.heads / width)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Transformer(nn.Module):
    def __init__(self, width: int, norm: Callable[[], nn.Module]):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Parameter(torch.randn(4, width))
        feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.Sequential(*(Residual(nn.Sequential(norm(), m), 0.5) for m in (Attention(width, 2), feed_forward)))
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids) + self.positions))


class TiedLM(nn.Module):
    """One table embeds tokens and reads logits."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.tokens, self.up, self.head = nn.Embedding(11, width), nn.Linear(width, width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(F.relu(self.up(self.tokens(ids))) / self.width)


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9, bias), nn.ReLU(), nn.Linear(9, 7, bias), nn.ReLU(), nn.Linear(7, 4, bias))


def conv_net() -> nn.Sequential:
    convs = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, groups=2)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def residual_mlp() -> nn.Sequential:
    return nn.Sequential(*(Residual(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)), 1 / 3) for _ in range(3)))


def bag() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


@dataclass(frozen=True)
class Family:
    """A model, its input, and how much of the modular norm a search makes the output move, at least.

    What keeps it from 1: the norms of values, which biases of norm 1 raise, are bounds for inputs that are not those for which the
    perturbations are largest (`tanh`, attention, GELU, kernels that meet padding).
    """

    make: Callable[[], nn.Module]
    x: torch.Tensor
    attained: float
    has_forward_derivatives: bool = True


FAMILIES = {
    "MLP": Family(mlp, torch.randn(3, 6), 0.999),
    "conv net": Family(conv_net, torch.randn(2, 3, 7, 7), 0.9),
    "residual MLP": Family(residual_mlp, torch.randn(3, 6), 0.999),
    "transformer": Family(lambda: Transformer(8, nn.Identity), TOKENS, 0.3),
    "transformer with layer norms": Family(lambda: Transformer(8, lambda: nn.LayerNorm(8)), TOKENS, 0.2),
    "embedding bag": Family(bag, TOKENS, 0.999, has_forward_derivatives=False),
    "tied language model": Family(lambda: TiedLM(6), TOKENS, 0.9),
}
