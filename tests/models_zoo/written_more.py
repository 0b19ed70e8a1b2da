"""More programs that people write by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .written import edges, images, vectors, written


def sequences() -> torch.Tensor:
    return torch.randn(2, 8, 16)


@written("linear attention", sequences)
class LinearAttention(nn.Module):
    """Katharopoulos et al.'s: the feature map elu + 1, sums over keys in place of a softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = 1 / (torch.einsum("bnd,bd->bn", q, k.sum(dim=1)) + 1e-6)
        return self.out(torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), z))


@written("spatial transformer", images)
class SpatialTransformer(nn.Module):
    """Jaderberg et al.'s: the image is read where an affine map says that the image gives."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 6))
        self.where[-1].bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.what = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    def forward(self, x):
        grid = F.affine_grid(self.where(x).view(-1, 2, 3), list(x.size()), align_corners=False)
        return F.log_softmax(self.what(F.grid_sample(x, grid, align_corners=False)), dim=1)


@written("selective scan by einsum", sequences)
class ScanByEinsum(nn.Module):
    """The scan of Mamba as minimal versions write it: decays and drives by einsum."""

    def __init__(self):
        super().__init__()
        self.project, self.dt = nn.Linear(16, 10, bias=False), nn.Linear(2, 16)
        self.A_log, self.D = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(16, 1)), nn.Parameter(torch.ones(16))

    def forward(self, x):
        dt, b, c = self.project(x).split([2, 4, 4], dim=-1)
        dt = F.softplus(self.dt(dt))
        decay = torch.exp(torch.einsum("bld,dn->bldn", dt, -torch.exp(self.A_log.float())))
        drive = torch.einsum("bld,bln,bld->bldn", dt, b, x)
        h, ys = torch.zeros(x.shape[0], 16, 4), []
        for i in range(x.shape[1]):
            h = decay[:, i] * h + drive[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, c[:, i]))
        return torch.stack(ys, dim=1) + x * self.D


@written("coupling flow", vectors)
class CouplingFlow(nn.Module):
    """Dinh et al.'s RealNVP from data to noise: the layers from the last to the first, and the logarithm of the volume."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(2)
        )
        self.shifts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.register_buffer("masks", torch.tensor([[0.0, 1.0] * 4, [1.0, 0.0] * 4]))

    def forward(self, x):
        log_volume = x.new_zeros(x.shape[0])
        for mask, scale, shift in zip(self.masks.flip(0), reversed(self.scales), reversed(self.shifts), strict=True):
            kept = mask * x
            s, t = scale(kept) * (1 - mask), shift(kept) * (1 - mask)
            x = (1 - mask) * (x - t) * torch.exp(-s) + kept
            log_volume -= s.sum(dim=1)
        return x, log_volume


@written("spectrally normed critic", images)
class SpectralCritic(nn.Module):
    """Miyato et al.'s: every weight over its largest singular value."""

    def __init__(self):
        super().__init__()
        spectral = nn.utils.spectral_norm
        self.features = nn.Sequential(spectral(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.1), nn.Flatten())
        self.score = spectral(nn.Linear(512, 1))

    def forward(self, x):
        return self.score(self.features(x)).view(-1)


@written("soft actor", vectors, lambda: torch.randn(4, 2))
class SoftActor(nn.Module):
    """Haarnoja et al.'s policy: a squashed Gaussian, and the logarithm of its density; the noise is an argument."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.mean, self.log_std = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x, noise):
        h = self.body(x)
        mean, log_std = self.mean(h), self.log_std(h).clamp(-20, 2)
        u = mean + log_std.exp() * noise
        density = -0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        return torch.tanh(u), (density - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)


@written("mLSTM", sequences)
class MLSTM(nn.Module):
    """Beck et al.'s xLSTM with a matrix memory, in parallel over time: sums of logarithms, masked and stabilized by their largest."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(16, 16) for _ in range(5))
        self.input_gate, self.forget_gate = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x) / 4, self.v(x)
        decays = F.logsigmoid(self.forget_gate(x)).squeeze(-1).cumsum(1)
        d = decays[:, :, None] - decays[:, None, :] + self.input_gate(x).squeeze(-1)[:, None, :]
        d = d.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf"))
        largest = d.max(-1, keepdim=True)[0]
        c = (q @ k.transpose(1, 2)) * torch.exp(d - largest)
        n = torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-largest))
        return self.out(torch.sigmoid(self.gate(x)) * ((c / (n + 1e-6)) @ v))


@written("linear recurrent unit", sequences)
class LRU(nn.Module):
    """Orvieto et al.'s: a diagonal recurrence of complex numbers, of which parameters give the logarithms."""

    def __init__(self):
        super().__init__()
        self.decay, self.phase = nn.Parameter(torch.rand(8) - 2), nn.Parameter(torch.rand(8))
        self.b, self.c = (nn.Parameter(torch.randn(2, *shape) / 8) for shape in ((8, 16), (16, 8)))
        self.skip = nn.Parameter(torch.randn(16))

    def forward(self, x):
        step = torch.exp(torch.complex(-torch.exp(self.decay), torch.exp(self.phase)))
        b, c = torch.complex(*self.b), torch.complex(*self.c)
        h, ys = torch.zeros(2, 8, dtype=b.dtype), []
        for t in range(x.shape[1]):
            h = step * h + x[:, t].to(b.dtype) @ b.T
            ys.append((h @ c.T).real + self.skip * x[:, t])
        return torch.stack(ys, 1)


@written("diffusion transformer", lambda: torch.randn(2, 3, 8, 8), lambda: torch.tensor([3, 70]), lambda: torch.tensor([1, 2]))
class DiffusionTransformer(nn.Module):
    """Peebles and Xie's: layer norms whose shift, scale and gate are made of the time and the class."""

    def __init__(self):
        super().__init__()
        self.patches, self.time, self.label = nn.Conv2d(3, 16, 2, 2), nn.Linear(16, 16), nn.Embedding(5, 16)
        self.attend = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16)) for _ in range(2)
        )
        self.modulate = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(16, 96)) for _ in range(2))
        self.out = nn.Linear(16, 12)

    def forward(self, image, t, label):
        rates = torch.exp(-math.log(1e4) * torch.arange(8, device=t.device) / 8)
        angles = t[:, None] * rates
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.label(label)
        x = self.patches(image).flatten(2).transpose(1, 2)
        for attend, mlp, modulate in zip(self.attend, self.mlp, self.modulate, strict=True):
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulate(c).unsqueeze(1).chunk(6, -1)
            h = F.layer_norm(x, (16,)) * (1 + scale) + shift
            x = x + gate * attend(h, h, h, need_weights=False)[0]
            x = x + gate_mlp * mlp(F.layer_norm(x, (16,)) * (1 + scale_mlp) + shift_mlp)
        y = self.out(x).reshape(len(image), 4, 4, 2, 2, 3)
        return torch.einsum("nhwpqc->nchpwq", y).reshape(image.shape)


@written("Informer attention", sequences)
class ProbSparse(nn.Module):
    """Zhou et al.'s: the queries that say most attend, the others get the mean of the values."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        seen = q @ k[:, ::2].transpose(1, 2)
        top = (seen.amax(-1) - seen.mean(-1)).topk(3, sorted=False).indices
        rows = torch.arange(len(x), device=x.device)[:, None]
        context = v.mean(1, keepdim=True).expand_as(v).clone()
        context[rows, top, :] = torch.softmax(q[rows, top] @ k.transpose(1, 2) / 4, -1) @ v
        return self.out(context)


@written("optical flow", images, images)
class OpticalFlow(nn.Module):
    """Teed and Deng's RAFT, small: correlations of all pairs, read around where the flow points, and a gated update."""

    def __init__(self):
        super().__init__()
        self.features, self.motion = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(11, 8, 3, padding=1)
        self.update, self.move = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, first, second):
        a, b = self.features(first), self.features(second)
        n, c, h, w = a.shape
        pairs = (a.flatten(2).transpose(1, 2) @ b.flatten(2) / math.sqrt(c)).view(n * h * w, 1, h, w)
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        start = torch.stack([xs, ys]).float().expand(n, 2, h, w).to(a.device)
        near = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 3)] * 2, indexing="xy"), -1).to(a.device)
        place, state = start, torch.tanh(a)
        for _ in range(2):
            place = place.detach()
            around = place.permute(0, 2, 3, 1).reshape(n * h * w, 1, 1, 2) + near
            grid = 2 * around / torch.tensor([w - 1, h - 1], device=a.device) - 1
            read = F.grid_sample(pairs, grid, align_corners=True).view(n, h, w, 9).permute(0, 3, 1, 2)
            moved = F.relu(self.motion(torch.cat([read, place - start], 1)))
            z, new = self.update(torch.cat([moved, state], 1)).chunk(2, 1)
            state = (1 - z.sigmoid()) * state + z.sigmoid() * new.tanh()
            place = place + self.move(state)
        return F.interpolate(2 * (place - start), scale_factor=2, mode="bilinear", align_corners=True)


@written("slot attention", sequences)
class SlotAttention(nn.Module):
    """Locatello et al.'s, from slots that are learned: a softmax over the slots, and then means by its weights."""

    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 3, 16))
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.update, self.mlp = nn.GRUCell(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.norm_inputs, self.norm_slots, self.norm_mlp = (nn.LayerNorm(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, slots = self.norm_inputs(x), self.slots.expand(len(x), -1, -1)
        key, value = self.key(x), self.value(x)
        for _ in range(3):
            before = slots
            weights = torch.softmax(self.query(self.norm_slots(slots)) @ key.mT / 4, dim=1) + 1e-8
            weights = weights / weights.sum(-1, keepdim=True)
            updates = torch.einsum("bij,bjd->bid", weights, value)
            slots = self.update(updates.flatten(0, 1), before.flatten(0, 1)).view_as(before)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


class GraphAttentionLayer(nn.Module):
    """Velickovic et al.'s, as PyG writes it: a softmax over the edges at each node, by an index."""

    def __init__(self, width: int, heads: int, out: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, heads * out, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(1, heads, out) / out**0.5) for _ in range(2))

    def forward(self, x, edges):
        source, target = edges
        z = self.project(x).view(-1, *self.of_source.shape[1:])
        scores = (z * self.of_source).sum(-1)[source] + (z * self.of_target).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        at = target.view(-1, 1).expand_as(scores)
        largest = scores.new_zeros(len(x), scores.shape[1]).scatter_reduce_(0, at, scores.detach(), "amax", include_self=False)
        weights = (scores - largest.index_select(0, target)).exp()
        weights = weights / (torch.zeros_like(largest).scatter_add_(0, at, weights) + 1e-16).index_select(0, target)
        return torch.zeros_like(z).index_add_(0, target, z[source] * weights.unsqueeze(-1)).flatten(1)


@written("graph attention", lambda: torch.randn(6, 8), edges)
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphAttentionLayer(8, 2, 8), GraphAttentionLayer(16, 1, 4)

    def forward(self, x, edges):
        return self.second(F.elu(self.first(x, edges)), edges)
