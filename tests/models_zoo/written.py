"""Programs that people write by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import WRITTEN, add
from .written_layers import CausalAttention, DoubleConv, Expert, SelectiveScan, SpectralConv


def written(name: str, *inputs: Callable[[], torch.Tensor]) -> Callable[[type[nn.Module]], Any]:
    """Add the decorated module, with these arguments."""

    def enter(cls: type[nn.Module]) -> Any:
        add(name, WRITTEN, lambda: (cls(), tuple(make() for make in inputs), {}))
        return cls

    return enter


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (2, 8))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


def vectors() -> torch.Tensor:
    return torch.randn(4, 8)


@written("nanoGPT", tokens)
class NanoGPT(nn.Module):
    """Karpathy's: pre-norm blocks, tied embedding, logits of the last place alone."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(32, 32),
                "wpe": nn.Embedding(8, 32),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(self.block() for _ in range(2)),
                "ln_f": nn.LayerNorm(32, bias=False),
            }
        )
        self.lm_head = nn.Linear(32, 32, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    @staticmethod
    def block() -> nn.ModuleDict:
        mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))
        return nn.ModuleDict({"ln_1": nn.LayerNorm(32), "attn": CausalAttention(32, 4), "ln_2": nn.LayerNorm(32), "mlp": mlp})

    def forward(self, idx):
        b, t = idx.size()
        assert t <= 8, f"cannot forward a sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = x + block.attn(block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        return self.lm_head(self.transformer.ln_f(x)[:, [-1], :])


@written("UNet", images)
class UNet(nn.Module):
    """Two levels, with skips that are concatenated."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(3, 8), DoubleConv(8, 16)])
        self.bottom = DoubleConv(16, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([DoubleConv(32, 16), DoubleConv(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


class Recurrent(nn.Module):
    """The last state of a recurrent network over embedded tokens, classified."""

    def __init__(self, cell: type[nn.RNNBase]):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.rnn = cell(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 4)

    def forward(self, ids):
        out, _ = self.rnn(self.embedding(ids))
        return self.head(out[:, -1])


@written("LSTM classifier", tokens)
class LSTMClassifier(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM)


@written("GRU classifier", tokens)
class GRUClassifier(Recurrent):
    def __init__(self):
        super().__init__(nn.GRU)


@written("selective scan", tokens)
class Mamba(nn.Module):
    """Mamba's block, its recurrence as a loop over places."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm, self.mixer = nn.LayerNorm(16), SelectiveScan(16, inner=24, states=4)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.mixer(self.norm(x)))


def edges() -> torch.Tensor:
    return torch.randint(0, 6, (2, 14))


@written("graph convolution", lambda: torch.randn(6, 8), edges)
class GraphConvolution(nn.Module):
    """Kipf and Welling's, messages summed by `index_add` and divided by the roots of the degrees."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        ones = torch.ones(source.shape[0], dtype=x.dtype)
        degree = torch.ones(x.shape[0], dtype=x.dtype).index_add(0, target, ones)
        weight = (degree[source] * degree[target]).rsqrt()
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = x / degree[:, None] + torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])
            x = F.relu(x) if i == 0 else x
        return x


@written("einops ViT", images)
class EinopsViT(nn.Module):
    """lucidrains' way: patches and heads by `rearrange` and `repeat`."""

    def __init__(self):
        super().__init__()
        from einops.layers.torch import Rearrange

        self.patches = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.LayerNorm(48), nn.Linear(48, 32), nn.LayerNorm(32)
        )
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32))
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, img):
        from einops import rearrange, repeat

        x = self.patches(img)
        x = torch.cat([repeat(self.cls, "1 1 d -> b 1 d", b=x.shape[0]), x], dim=1) + self.positions
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attention = (torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(16)).softmax(dim=-1)
        x = x + self.out(rearrange(torch.matmul(attention, v), "b h n d -> b n (h d)"))
        return self.head(x.mean(dim=1))


@written("mixture of experts", vectors)
class MixtureOfExperts(nn.Module):
    """The two best of four experts, chosen with `topk`, their results gathered."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(Expert(8, 16) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        results = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = results.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return (weights[..., None] / weights.sum(-1)[:, None, None] * picked).sum(1)


@written("WGAN-GP critic", images)
class Critic(nn.Module):
    """Convolutions and leaky ReLUs without batch norm, a score for each image."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.InstanceNorm2d(16, affine=True),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4),
        )

    def forward(self, x):
        return self.features(x).view(-1)


@written("neural ODE", vectors)
class NeuralODE(nn.Module):
    """Four steps of Runge and Kutta's method of order 4."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 8))

    def derivative(self, t, y):
        return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], dim=-1))

    def forward(self, y):
        h = 0.25
        for i in range(4):
            t = i * h
            k1 = self.derivative(t, y)
            k2 = self.derivative(t + h / 2, y + h / 2 * k1)
            k3 = self.derivative(t + h / 2, y + h / 2 * k2)
            k4 = self.derivative(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y


@written("VAE", lambda: torch.rand(2, 64), lambda: torch.randn(2, 4))
class VAE(nn.Module):
    """Reconstruction, mean and log variance; the noise is an argument."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x, eps):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h).clamp(-4, 4)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@written("DeepSets", lambda: torch.randn(3, 5, 8), lambda: torch.arange(5)[None] < torch.tensor([[5], [3], [1]]))
class DeepSets(nn.Module):
    """A masked sum over the members of each set."""

    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 16))
        self.rho = nn.Sequential(nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 3))

    def forward(self, x, mask):
        return self.rho(self.phi(x).masked_fill(~mask[..., None], 0.0).sum(dim=1) / mask.sum(1, keepdim=True))


@written("Fourier neural operator", lambda: torch.randn(2, 16, 1))
class FourierNeuralOperator(nn.Module):
    """Li et al.'s in one dimension: the lowest frequencies by a complex matrix each."""

    def __init__(self):
        super().__init__()
        self.lift, self.project = nn.Linear(2, 8), nn.Linear(8, 1)
        self.spectral, self.pointwise = SpectralConv(8, 8, modes=4), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        grid = torch.linspace(0, 1, x.shape[1])[None, :, None].expand(x.shape[0], -1, -1)
        y = self.lift(torch.cat([x, grid], dim=-1)).permute(0, 2, 1)
        y = F.gelu(self.spectral(y) + self.pointwise(y))
        return self.project(y.permute(0, 2, 1))


@written("capsule network", images)
class CapsuleNet(nn.Module):
    """Sabour et al.'s: squashed vectors, two rounds of routing by agreement."""

    def __init__(self):
        super().__init__()
        self.conv, self.primary = nn.Conv2d(3, 16, 5), nn.Conv2d(16, 16, 5, stride=4)
        self.transform = nn.Parameter(0.1 * torch.randn(1, 16, 5, 8, 4))

    @staticmethod
    def squash(s):
        square = (s**2).sum(-1, keepdim=True)
        return square / (1 + square) * s / (square.sqrt() + 1e-8)

    def forward(self, x):
        u = self.primary(F.relu(self.conv(x)))
        u = self.squash(u.view(u.shape[0], 4, 4, -1).permute(0, 1, 3, 2).reshape(u.shape[0], -1, 4))
        votes = torch.einsum("bic,nijdc->bijd", u, self.transform[:, :, :, :, :])
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            coupling = logits.softmax(dim=2)
            v = self.squash((coupling[..., None] * votes).sum(dim=1))
            logits = logits + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)


@written("nn.Transformer", lambda: torch.randn(2, 6, 16), lambda: torch.randn(2, 5, 16))
class WholeTransformer(nn.Module):
    """torch's own, encoder and decoder, with a causal mask."""

    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)

    def forward(self, source, target):
        return self.model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]))
