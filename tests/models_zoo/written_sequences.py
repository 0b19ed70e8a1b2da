"""Sequence models of after 2019: recurrences in place of attention, attentions that subtract, tokens that skip layers, forecasts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .written import written
from .written_more import sequences


@written("retention", sequences)
class Retention(nn.Module):
    """Sun et al.'s: decays in place of a softmax, and a norm of each head."""

    decays: torch.Tensor

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(16, 16, bias=False) for _ in range(5))
        self.register_buffer("decays", 1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), 4)))
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (layer(x).view(b, t, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        steps = torch.arange(t)[:, None] - torch.arange(t)
        decay = torch.where(steps >= 0, self.decays[:, None, None] ** steps.clamp(min=0), torch.zeros(()))
        y = (q @ k.transpose(-1, -2) * 4**-0.5 * decay) @ v
        y = self.norm(y.transpose(1, 2).reshape(b * t, d)).view(b, t, d)
        return self.out(F.silu(self.gate(x)) * y)


@written("differential attention", sequences)
class DifferentialAttention(nn.Module):
    """Ye et al.'s: the difference of two softmaxes, by a factor that four vectors say."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.factors = nn.ParameterDict({name: torch.randn(4) * 0.1 for name in ("q1", "k1", "q2", "k2")})
        self.norm = nn.RMSNorm(8)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2) * 4**-0.5
        k = self.k(x).view(b, t, 4, 4).transpose(1, 2)
        v = self.v(x).view(b, t, 2, 8).transpose(1, 2)
        weights = F.softmax(q @ k.mT + torch.triu(torch.full((t, t), float("-inf")), 1), dim=-1, dtype=torch.float32).type_as(x)
        first, second = ((self.factors[f"q{i}"] * self.factors[f"k{i}"]).sum(-1).exp() for i in (1, 2))
        weights = weights.view(b, 2, 2, t, t)
        y = self.norm((weights[:, :, 0] - (first - second + 0.2) * weights[:, :, 1]) @ v) * 0.8
        return self.out(y.transpose(1, 2).reshape(b, t, 16))


@written("mixture of depths", sequences)
class MixtureOfDepths(nn.Module):
    """Raposo et al.'s: half of the tokens go through a block, those with the largest scores, and the others around it."""

    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(16, 1, bias=False), nn.Linear(16, 4)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        scores, chosen = torch.topk(self.router(x).squeeze(-1), 4, dim=1, sorted=False)
        chosen, order = torch.sort(chosen, 1)
        places = chosen.unsqueeze(-1).expand(-1, -1, 16)
        y = self.block(x.gather(1, places)) * torch.sigmoid(scores.gather(1, order)).unsqueeze(-1)
        return self.out(torch.scatter_add(x, 1, places, y))


class GatedResidual(nn.Module):
    """Lim et al.'s building block."""

    def __init__(self, given: int, hidden: int, out: int):
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(given, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * out)
        self.skip = nn.Linear(given, out) if given != out else nn.Identity()
        self.norm = nn.LayerNorm(out)

    def forward(self, x):
        return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(self.first(x)))), -1))


@written("random features of an attention", sequences)
class RandomFeatures(nn.Module):
    """Choromanski et al.'s FAVOR+, causal: positive features of orthogonal directions, less the largest of a row or of all keys."""

    directions: torch.Tensor

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        orthogonal, _ = torch.linalg.qr(torch.randn(16, 16))
        self.register_buffer("directions", orthogonal.T[:12] * torch.randn(12, 16).norm(dim=1, keepdim=True))

    def features(self, x, dims):
        x = x * 16**-0.25
        u = x @ self.directions.T
        squares = x.square().sum(-1, keepdim=True) / 2
        return 12**-0.5 * (torch.exp(u - squares - u.amax(dims, keepdim=True).detach()) + 1e-4)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.features(q, -1), self.features(k, (-1, -2))
        context = torch.einsum("bnm,bnd->bnmd", k, v).cumsum(1)
        shares = 1.0 / torch.einsum("bnm,bnm->bn", q, k.cumsum(1))
        return self.out(torch.einsum("bnm,bnmd,bn->bnd", q, context, shares))


@written("temporal fusion transformer", lambda: torch.randn(2, 6, 5))
class TemporalFusion(nn.Module):
    """Lim et al.'s: variables that are chosen softly, an LSTM, and attention to the past."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(1, 8) for _ in range(5))
        self.choice = GatedResidual(40, 16, 5)
        self.variables = nn.ModuleList(GatedResidual(8, 8, 8) for _ in range(5))
        self.lstm, self.gate, self.norm = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 16), nn.LayerNorm(8)
        self.attention, self.quantiles = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        e = torch.stack([layer(x[..., i : i + 1]) for i, layer in enumerate(self.embeddings)], -1)
        weights = torch.softmax(self.choice(e.flatten(-2)), -1).unsqueeze(-2)
        v = (torch.stack([layer(e[..., i]) for i, layer in enumerate(self.variables)], -1) * weights).sum(-1)
        h = self.norm(v + F.glu(self.gate(self.lstm(v)[0])))
        hidden = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
        return self.quantiles(h + self.attention(h, h, h, attn_mask=hidden)[0])
