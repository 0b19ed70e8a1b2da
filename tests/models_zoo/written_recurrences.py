"""Recurrences of after 2023, with states that are written, normalized and learnt on the way; and attention to some of what was before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .written import written
from .written_more import sequences


@written("sLSTM", sequences)
class ScalarLSTM(nn.Module):
    """Beck et al.'s: exponential gates, a state over the sum of its weights, kept finite by a running maximum."""

    def __init__(self):
        super().__init__()
        self.gates, self.norm = nn.Linear(16, 64), nn.GroupNorm(4, 16)
        self.recurrent = nn.Parameter(torch.randn(4, 4, 4, 4) / 2)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        b, t, d = x.shape
        c = x.new_zeros(b, 4, 4)
        n, m, h, ys = torch.ones_like(c), torch.zeros_like(c), torch.zeros_like(c), []
        for step in range(t):
            gates = self.gates(x[:, step]).view(b, 4, 4, 4) + torch.einsum("bhd,ghde->bghe", h, self.recurrent)
            i, f, z, o = gates.unbind(1)
            f = F.logsigmoid(f)
            largest = torch.maximum(f + m, i)
            now, keep, m = torch.exp(i - largest), torch.exp(f + m - largest), largest
            c, n = keep * c + now * torch.tanh(z), keep * n + now
            h = torch.sigmoid(o) * c / n
            ys.append(h.reshape(b, d))
        y = self.norm(torch.stack(ys, 1).view(b * t, d)).view(b, t, d) + x
        gate, value = self.up(y).chunk(2, -1)
        return y + self.down(F.gelu(gate) * value)


@written("gated delta rule", sequences)
class GatedDeltaRule(nn.Module):
    """Yang et al.'s, chunk by chunk: within one a triangular system is solved in place, row by row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.beta, self.decay = nn.Linear(16, 48, bias=False), nn.Linear(16, 2), nn.Linear(16, 2)
        self.rate, self.norm, self.out = nn.Parameter(torch.zeros(2)), nn.RMSNorm(8), nn.Linear(16, 16, bias=False)

    def forward(self, x, size=4):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k = F.normalize(F.silu(q), dim=-1) * 8**-0.5, F.normalize(F.silu(k), dim=-1)
        beta = self.beta(x).sigmoid().transpose(1, 2)[..., None]
        g = (-self.rate.exp() * F.softplus(self.decay(x))).transpose(1, 2)
        q, k, v, kb, g = (s.unflatten(2, (-1, size)) for s in (q, k, v * beta, k * beta, g))
        g = g.cumsum(-1)
        decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
        a = -((kb @ k.mT) * decay).masked_fill(torch.ones(size, size, dtype=torch.bool).triu(), 0)
        for i in range(1, size):
            row, before = a[..., i, :i].clone(), a[..., :i, :i].clone()
            a[..., i, :i] = row + (row.unsqueeze(-1) * before).sum(-2)
        a = a + torch.eye(size)
        v, kd = a @ v, a @ (kb * g.exp().unsqueeze(-1))
        state, y = x.new_zeros(b, 2, 8, 8), torch.zeros_like(v)
        for i in range(t // size):
            new = v[:, :, i] - kd[:, :, i] @ state
            y[:, :, i] = (q[:, :, i] * g[:, :, i, :, None].exp()) @ state + (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]) @ new
            left = (g[:, :, i, -1:] - g[:, :, i]).exp()[..., None]
            state = state * g[:, :, i, -1, None, None].exp() + (k[:, :, i] * left).mT @ new
        return self.out(self.norm(y).flatten(2, 3).transpose(1, 2).reshape(b, t, d))


@written("neural memory", sequences)
class NeuralMemory(nn.Module):
    """Behrouz et al.'s: a network for each sequence, trained on the way by gradients with momentum, mapped over the batch by `torch.func`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gates, self.norm = nn.Linear(16, 3), nn.RMSNorm(16)

    @staticmethod
    def read(weights, x):
        return x + F.silu(x @ weights["first"]) @ weights["second"]

    def surprise(self, weights, k, v, rates):
        return (rates * (self.read(weights, k) - v).square().mean(-1)).sum()

    def forward(self, x, size=4):
        q, k, v = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x)
        weights = {name: getattr(self, name).expand(x.shape[0], -1, -1) for name in ("first", "second")}
        momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
        rates, kept, lost = torch.sigmoid(self.gates(x)).unbind(-1)
        ys = []
        for now in (slice(i, i + size) for i in range(0, x.shape[1], size)):
            ys.append(torch.func.vmap(self.read)(weights, q[:, now]))
            slopes = torch.func.vmap(torch.func.grad(self.surprise))(weights, k[:, now], v[:, now], 0.1 * rates[:, now])
            keep, lose = (g[:, now].mean(1)[:, None, None] for g in (kept, lost))
            momentum = {name: keep * m - slopes[name] for name, m in momentum.items()}
            weights = {name: (1 - lose) * w + momentum[name] for name, w in weights.items()}
        return self.out(self.norm(torch.cat(ys, 1)))


@written("native sparse attention", sequences)
class NativeSparseAttention(nn.Module):
    """Yuan et al.'s: to what blocks are compressed to, to the blocks that matter most by that, and to what is near."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(16, 48), nn.Linear(16, 6), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)
        self.memory = nn.Parameter(torch.zeros(2, 2, 1, 8))

    def forward(self, x, block=2, most=2, near=3):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        keys, values = (layer(s.unflatten(2, (-1, block)).flatten(-2)) for layer, s in ((self.key, k), (self.value, v)))
        keys, values = (torch.cat([m.expand(b, -1, -1, -1), s], 2) for m, s in zip(self.memory, (keys, values), strict=True))
        places, lowest = torch.arange(t), -torch.finfo(x.dtype).max
        ends = torch.arange(t // block) * block + block - 1
        hidden = ~F.pad(places[:, None] >= ends, (1, 0), value=True)
        weights = (q * 8**-0.5 @ keys.mT).masked_fill(hidden, lowest).softmax(-1)
        own = places[:, None] // block == torch.arange(t // block)
        chosen = weights[..., 1:].masked_fill(own, 1e3).topk(most, dim=-1).indices
        seen = F.one_hot(chosen, t // block).amax(-2).bool().repeat_interleave(block, -1) & (places[:, None] >= places)
        far = (q * 8**-0.5 @ k.mT).masked_fill(~seen, lowest).softmax(-1) @ v
        window = (places[:, None] >= places) & (places[:, None] - places < near)
        close = F.scaled_dot_product_attention(q, k, v, attn_mask=window)
        gates = self.gate(x).sigmoid().view(b, t, 2, 3).permute(3, 0, 2, 1)[..., None]
        y = (torch.stack([weights @ values, far, close]) * gates).sum(0)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


@written("orthogonalized weight", sequences)
class OrthogonalizedWeight(nn.Module):
    """A layer whose weight is what five of Newton and Schulz's steps make of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(16, 16) / 4), nn.Linear(16, 4)

    def forward(self, x):
        w = self.weight / (self.weight.norm() + 1e-7)
        for _ in range(5):
            a = w @ w.T
            w = 3.4445 * w + (-4.7750 * a + 2.0315 * a @ a) @ w
        return self.out(torch.relu(x @ w.T))
