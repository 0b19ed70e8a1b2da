"""Programs that choose by thresholds which they compute: attention without small weights, bins of a spline; and powers that are parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .written import vectors, written
from .written_more import sequences


@written("entmax attention", sequences)
class EntmaxAttention(nn.Module):
    """Peters et al.'s: weights of which many are 0, by a threshold that is found in twenty bisections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    @staticmethod
    def entmax(x, alpha=1.5):
        x = x * (alpha - 1)
        largest, _ = x.max(-1, keepdim=True)
        low, high = largest - 1, largest - (1 / x.shape[-1]) ** (alpha - 1)
        at_low = (torch.clamp(x - low, min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) - 1
        step = high - low
        for _ in range(20):
            step = step / 2
            middle = low + step
            p = torch.clamp(x - middle, min=0) ** (1 / (alpha - 1))
            low = torch.where((p.sum(-1, keepdim=True) - 1) * at_low >= 0, middle, low)
        return p / p.sum(-1, keepdim=True)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(self.entmax(q @ k.mT / 4) @ v)


@written("spline flow", vectors)
class SplineFlow(nn.Module):
    """Durkan et al.'s: couplings by monotone splines of rational quadratic functions, and the density of what comes out."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 56)) for _ in range(2))

    @staticmethod
    def knots(shares, end):
        shares = 1e-3 + (1 - 1e-3 * shares.shape[-1]) * F.softmax(shares, dim=-1)
        places = 2 * end * F.pad(torch.cumsum(shares, dim=-1), (1, 0)) - end
        places[..., 0], places[..., -1] = -end, end
        return places, places[..., 1:] - places[..., :-1]

    def spline(self, x, widths, heights, slopes, end=3.0):
        inside = (x >= -end) & (x <= end)
        slopes = F.pad(slopes, (1, 1))
        slopes[..., 0] = slopes[..., -1] = math.log(math.exp(1 - 1e-3) - 1)
        (left, widths), (below, heights), slopes = self.knots(widths, end), self.knots(heights, end), 1e-3 + F.softplus(slopes)
        kept = x.clamp(-end, end)
        place = (torch.sum(kept[..., None] >= left, dim=-1) - 1).clamp(0, widths.shape[-1] - 1)[..., None]
        left, below, width, height, slope, rise, last = (
            t.gather(-1, place)[..., 0] for t in (left, below, widths, heights, slopes, heights / widths, slopes[..., 1:])
        )
        t = (kept - left) / width
        bend = t * (1 - t)
        below_line = rise + (slope + last - 2 * rise) * bend
        y = below + height * (rise * t**2 + slope * bend) / below_line
        steepness = rise**2 * (last * t**2 + 2 * rise * bend + slope * (1 - t) ** 2)
        volume = torch.log(steepness) - 2 * torch.log(below_line)
        return torch.where(inside, y, x), torch.where(inside, volume, torch.zeros_like(volume))

    def forward(self, x):
        volume = x.new_zeros(x.shape[0])
        for net in self.nets:
            kept, changed = x.chunk(2, dim=-1)
            p = net(kept).view(x.shape[0], 4, 14)
            changed, more = self.spline(changed, p[..., :5], p[..., 5:10], p[..., 10:])
            volume = volume + more.sum(-1)
            x = torch.cat([changed, kept], dim=-1)
        return -0.5 * (x**2).sum(-1) - 4 * math.log(2 * math.pi) + volume


@written("channel energies", lambda: torch.rand(2, 12, 20))
class ChannelEnergies(nn.Module):
    """Wang et al.'s front end for speech: energies over what they were lately, to powers that are learned."""

    def __init__(self):
        super().__init__()
        self.share, self.power = nn.Parameter(torch.full((12,), 0.04)), nn.Parameter(torch.full((12,), 0.96))
        self.offset, self.root = nn.Parameter(torch.full((12,), 2.0)), nn.Parameter(torch.full((12,), 2.0))
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        share = self.share.clamp(0, 1)
        lately = [x[..., 0]]
        for t in range(1, x.shape[-1]):
            lately.append((1 - share) * lately[-1] + share * x[..., t])
        power, root = torch.clamp(self.power, max=1.0)[:, None], torch.clamp(self.root, min=1.0)[:, None]
        offset = self.offset[:, None]
        y = (x / (1e-6 + torch.stack(lately, dim=-1)) ** power + offset) ** (1 / root) - offset ** (1 / root)
        return self.out(y.mean(-1))
