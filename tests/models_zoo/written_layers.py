"""Layers of the programs in `written`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    """nanoGPT's: one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (m.view(b, t, self.heads, c // self.heads).transpose(1, 2) for m in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class DoubleConv(nn.Sequential):
    """Two convolutions, each with batch norm and a ReLU in place."""

    def __init__(self, inputs: int, outputs: int):
        parts: list[nn.Module] = []
        for a, b in ((inputs, outputs), (outputs, outputs)):
            parts += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        super().__init__(*parts)


class SelectiveScan(nn.Module):
    """``h <- exp(dt A) h + dt B x``, ``y = C h + D x`` with dt, B and C made of x, gated.  Source: Gu and Dao 2023, "Mamba"."""

    def __init__(self, width: int, inner: int, states: int):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, 2 + 2 * states, bias=False), nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D, self.states = nn.Parameter(torch.ones(inner)), states

    def forward(self, x):
        places = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :places].transpose(1, 2))
        dt, b, c = self.x_proj(x).split([2, self.states, self.states], dim=-1)
        dt, a = F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log)
        decay, drive = torch.exp(dt[..., None] * a), dt[..., None] * b[:, :, None, :] * x[..., None]
        h, ys = torch.zeros_like(drive[:, 0]), []
        for i in range(places):
            h = decay[:, i] * h + drive[:, i]
            ys.append((h * c[:, i, None, :]).sum(-1))
        return self.out_proj((torch.stack(ys, dim=1) + x * self.D) * F.silu(gate))


class Expert(nn.Sequential):
    """A feed-forward block."""

    def __init__(self, width: int, hidden: int):
        super().__init__(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))


class SpectralConv(nn.Module):
    """The lowest `modes` frequencies, each times a complex matrix."""

    def __init__(self, inputs: int, outputs: int, modes: int):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(inputs, outputs, modes, dtype=torch.cfloat) / (inputs * outputs))
        self.modes, self.outputs = modes, outputs

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        result = torch.zeros(x.shape[0], self.outputs, spectrum.shape[-1], dtype=torch.cfloat)
        result[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weights)
        return torch.fft.irfft(result, n=x.shape[-1])
