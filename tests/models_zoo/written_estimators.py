"""Programs whose values are others than what their gradients are of, or that write their own parameters: quantizers, masks, teachers, densities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .written import images, vectors, written
from .written_more import sequences


@written("VQ-VAE", images)
class VQVAE(nn.Module):
    """van den Oord et al.'s: the nearest codes, with the gradient of what they are nearest to."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 4, 2, 1))
        self.codes = nn.Embedding(12, 8)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
        nn.init.uniform_(self.codes.weight, -1 / 12, 1 / 12)

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 8)
        distances = flat.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * flat @ self.codes.weight.t()
        nearest = distances.argmin(1).unsqueeze(1)
        one_hot = torch.zeros(nearest.shape[0], 12, device=x.device)
        one_hot.scatter_(1, nearest, 1)
        quantized = (one_hot @ self.codes.weight).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2).contiguous()), loss


class MaskedConv2d(nn.Conv2d):
    """A convolution that sees what comes before, in rows: its weight is masked in each call."""

    mask: torch.Tensor

    def __init__(self, *sizes: int, sees_itself: bool, **options: int):
        super().__init__(*sizes, **options)
        mask = torch.ones_like(self.weight)
        middle = mask.shape[-1] // 2
        mask[:, :, middle, middle + sees_itself :] = 0
        mask[:, :, middle + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


@written("PixelCNN", images)
class PixelCNN(nn.Module):
    """van den Oord et al.'s, gated."""

    def __init__(self):
        super().__init__()
        self.first = MaskedConv2d(3, 16, 5, padding=2, sees_itself=False)
        self.second = MaskedConv2d(8, 16, 3, padding=1, sees_itself=True)
        self.last = nn.Conv2d(8, 6, 1)

    @staticmethod
    def gated(x):
        a, b = x.chunk(2, 1)
        return torch.tanh(a) * torch.sigmoid(b)

    def forward(self, x):
        h = self.gated(self.first(x))
        return self.last(h + self.gated(self.second(h)))


@written("BYOL", images, images)
class BYOL(nn.Module):
    """Grill et al.'s: a teacher that is the moving average of its student, in the same call."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = self.encoder(), self.encoder()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    @staticmethod
    def encoder() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)
        )

    def forward(self, first, second):
        with torch.no_grad():
            for p, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                t.mul_(0.99).add_(p, alpha=0.01)
            target = F.normalize(self.teacher(second), dim=-1)
        return 2 - 2 * (F.normalize(self.predictor(self.student(first)), dim=-1) * target).sum(-1)


@written("RealNVP density", vectors)
class RealNVP(nn.Module):
    """Dinh et al.'s log density, by torch.distributions' normal distribution of the latents."""

    def __init__(self):
        super().__init__()
        self.register_buffer("masks", torch.tensor([[1.0, 0.0] * 4, [0.0, 1.0] * 4]))
        self.scales = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 8), nn.Tanh()) for _ in self.masks
        )
        self.shifts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 8)) for _ in self.masks)

    def forward(self, z):
        log_det = z.new_zeros(z.shape[0])
        for mask, scale, shift in zip(self.masks, self.scales, self.shifts, strict=True):
            kept = mask * z
            s, t = scale(kept) * (1 - mask), shift(kept) * (1 - mask)
            z = (1 - mask) * (z - t) * torch.exp(-s) + kept
            log_det = log_det - s.sum(1)
        prior = torch.distributions.MultivariateNormal(torch.zeros(8, device=z.device), torch.eye(8, device=z.device))
        return prior.log_prob(z) + log_det


@written("hyper-connections", sequences)
class HyperConnections(nn.Module):
    """Xie et al.'s: four streams that a doubly stochastic matrix mixes, which Sinkhorn's iterations make of what the streams say."""

    def __init__(self):
        super().__init__()
        self.weights, self.biases = nn.Linear(64, 24, bias=False), nn.Parameter(torch.zeros(24))
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def mixed(self, streams):
        pre, post, comb = (self.weights(F.rms_norm(streams.flatten(-2), (64,))) + self.biases).split([4, 4, 16], dim=-1)
        comb = torch.softmax(comb.unflatten(-1, (4, 4)), dim=-1) + 1e-6
        for _ in range(10):
            comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        return torch.sigmoid(pre), 2 * torch.sigmoid(post), comb

    def forward(self, x):
        streams = x.unsqueeze(-2).expand(-1, -1, 4, -1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            pre, post, comb = self.mixed(streams)
            y = F.silu(layer(norm((pre.unsqueeze(-1) * streams).sum(-2))))
            streams = post.unsqueeze(-1) * y.unsqueeze(-2) + comb @ streams
        return streams.mean(-2)
