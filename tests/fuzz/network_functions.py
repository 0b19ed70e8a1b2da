"""More parts of random networks: branches that meet, quotients, orders, transforms, kernels, more attention and recurrence (see `network_parts`)."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from .network_parts import PARTS as FIRST
from .network_parts import Make, Of, activation


def _constant(pick: random.Random, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(pick.randrange(10**6)))


def _two(d: int, h: int | None = None) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(d, h or d), nn.Linear(d, h or d)


def _quotient(pick: random.Random, d: int) -> nn.Module:
    by = pick.choice(
        [
            lambda b: F.softplus(b) + 0.1,
            lambda b: 1 + b.abs(),
            lambda b: 1 + b * b,
            lambda b: b.exp() + 1,
            lambda b: (1 + b * b).sqrt(),
            lambda b: 1 + b.pow(2).sum(-1, keepdim=True),
            lambda b: b.norm(dim=-1, keepdim=True).clamp(min=0.2),
            lambda b: b.abs().amax(-1, keepdim=True) + 0.3,
            lambda b: torch.sigmoid(b) + 0.2,
        ]
    )
    is_own = pick.random() < 0.4
    return Of(lambda x, a, b: (x if is_own else a(x)) / by(x if is_own else b(x)), *_two(d))


def _joined(pick: random.Random, d: int) -> nn.Module:
    of = pick.choice(
        [
            torch.mul,
            torch.sub,
            torch.maximum,
            torch.minimum,
            lambda a, b: torch.atan(a / (1 + b * b)),
            lambda a, b: torch.hypot(a, b),
            lambda a, b: torch.logaddexp(a, b),
            lambda a, b: torch.where(torch.arange(a.shape[-1]) % 2 == 0, a, b),
            lambda a, b: a.tanh() * b.exp().clamp(max=3.0),
            lambda a, b: torch.lerp(a, b, torch.sigmoid(a)),
            lambda a, b: -2.5 * a + 0.3 * b.sin(),
            lambda a, b: torch.addcmul(a, a, b, value=-0.5),
        ]
    )
    return Of(lambda x, a, b: of(a(x), b(x)), *_two(d))


def _ordered(pick: random.Random, d: int) -> nn.Module:
    index = torch.randperm(d, generator=torch.Generator().manual_seed(pick.randrange(10**6)))
    of = pick.choice(
        [
            lambda x: x[..., index],
            lambda x: x.gather(-1, index.expand(x.shape)),
            lambda x: x.index_select(-1, index) - x,
            lambda x: x.flip(-1) * -1.5,
            lambda x: x.roll(1, -1) + 0.5 * x,
            lambda x: x.sort(-1).values,
            lambda x: x - x.topk(2, -1).values.mean(-1, keepdim=True),
            lambda x: x - x.amax(-1, keepdim=True),
            lambda x: x.clamp(-0.7, 0.4),
            lambda x: F.pad(x.diff(dim=-1), (1, 0)),
            lambda x: x.cumsum(-1),
            lambda x: x.flip(-1).cumsum(-1).flip(-1) / x.shape[-1],
            lambda x: torch.sigmoid(x).cumprod(-1),
            lambda x: x.logcumsumexp(-1),
            lambda x: x.cummax(-1).values,
            lambda x: x.unflatten(-1, (2, -1)).amax(-2).repeat_interleave(2, -1),
            lambda x: x - x.logsumexp(-1, keepdim=True),
            lambda x: x - x.mean(-1, keepdim=True),
            lambda x: x * x.std(-1, keepdim=True),
            lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 1, 0.5),
        ]
    )
    return Of(of)


def _entrywise(pick: random.Random, d: int) -> nn.Module:
    of = pick.choice(
        [
            lambda x: x**3 / 5,
            lambda x: x * x * 0.3,
            lambda x: torch.exp(-x * x),
            lambda x: torch.exp(-x.abs()),
            lambda x: (x * x + 0.1).sqrt(),
            lambda x: torch.rsqrt(x * x + 0.5) * x,
            lambda x: torch.log1p(x.exp()),
            lambda x: torch.log1p(x * x),
            lambda x: x.sign() * torch.log1p(x.abs()),
            lambda x: torch.sin(3 * x) / 3,
            lambda x: x.cos() * x,
            lambda x: x * torch.tanh(F.softplus(x)),
            lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: F.relu(x) ** 2,
            lambda x: x * torch.erf(x),
            lambda x: torch.expm1(x.clamp(max=1.0)),
            lambda x: torch.where(x > 0, x, torch.expm1(x)),
            lambda x: (x.abs() + 1e-2).pow(0.5),
            lambda x: F.relu(x) - 0.25 * F.relu(-x),
            lambda x: 1 / (1 + torch.exp(-2 * x)),
            lambda x: x.clamp(min=-0.3) + x.clamp(max=0.3),
            lambda x: F.celu(x, 0.5) * -2,
            lambda x: F.threshold(x, 0.0, 0.0),
            lambda x: torch.asinh(x) + torch.atan(x),
            lambda x: torch.cosh(x.clamp(-1, 1)),
            lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
            lambda x: F.smooth_l1_loss(x, torch.ones_like(x), reduction="none"),
        ]
    )
    return Of(of)


def _transformed(pick: random.Random, d: int) -> nn.Module:
    w = _constant(pick, d // 2 + 1)
    of = pick.choice(
        [
            lambda x: torch.fft.irfft(torch.fft.rfft(x) * w.to(x.dtype), n=x.shape[-1]),
            lambda x: torch.fft.fft(x, norm="ortho").real,
            lambda x: torch.fft.fft(x).imag / 2,
            lambda x: torch.fft.fft(x, norm="ortho").abs(),
            lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real / 3,
        ]
    )
    return Of(of)


def _kernel(pick: random.Random, d: int) -> nn.Module:
    c, w = _constant(pick, 3, d), _constant(pick, 3, d)
    of = pick.choice(
        [
            lambda x: torch.exp(-(x[..., None, :] - c.to(x.dtype)).square().sum(-1)) @ w.to(x.dtype),
            lambda x: F.cosine_similarity(x[..., None, :], c.to(x.dtype), dim=-1) @ w.to(x.dtype),
            lambda x: torch.cdist(x, c.to(x.dtype)) @ w.to(x.dtype),
            lambda x: (x[..., None, :] - c.to(x.dtype)).norm(dim=-1) @ w.to(x.dtype),
            lambda x: torch.softmax(-(x[..., None, :] - c.to(x.dtype)).square().sum(-1), -1) @ w.to(x.dtype),
            lambda x: F.normalize(x, dim=-1) @ F.normalize(c.to(x.dtype), dim=-1).T @ w.to(x.dtype),
            lambda x: torch.einsum("...i,ki->...k", x, c.to(x.dtype)).relu() @ w.to(x.dtype),
            lambda x: F.softmax(x @ c.to(x.dtype).T / 0.3, -1) @ w.to(x.dtype),
            lambda x: F.log_softmax(x @ c.to(x.dtype).T, -1) @ w.to(x.dtype),
            lambda x: F.sigmoid(x @ c.to(x.dtype).T) @ w.to(x.dtype) * 3,
        ]
    )
    return Of(of)


def _bilinear(pick: random.Random, d: int) -> nn.Module:
    return Of(lambda x, m: m(x, x), nn.Bilinear(d, d, d))


def _tied_negative(pick: random.Random, d: int) -> nn.Module:
    return Of(lambda x, m, act: -F.linear(act(m(x)), m.weight) + x @ m.weight.mT, nn.Linear(d, d), activation(pick))


def _normed_weights(pick: random.Random, d: int) -> nn.Module:
    of = pick.choice(
        [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal]
    )
    return nn.Sequential(of(nn.Linear(d, d)), activation(pick))


def _highway(pick: random.Random, d: int) -> nn.Module:
    return Of(lambda x, t, h: torch.sigmoid(t(x)) * h(x).relu() + (1 - torch.sigmoid(t(x))) * x, *_two(d))


def _dense_block(pick: random.Random, d: int) -> nn.Module:
    def f(x: torch.Tensor, a: nn.Module, b: nn.Module, act: nn.Module, c: nn.Module) -> torch.Tensor:
        y = torch.cat([x, act(a(x))], -1)
        return c(torch.cat([y, act(b(y))], -1))

    return Of(f, nn.Linear(d, 3), nn.Linear(d + 3, 3), activation(pick), nn.Linear(d + 6, d))


def _mixture(pick: random.Random, d: int) -> nn.Module:
    def f(x: torch.Tensor, gate: nn.Module, a: nn.Module, b: nn.Module) -> torch.Tensor:
        w = torch.softmax(gate(x), -1)
        return w[..., :1] * a(x).relu() + w[..., 1:] * b(x).tanh()

    return Of(f, nn.Linear(d, 2), *_two(d))


def _fixed_point(pick: random.Random, d: int) -> nn.Module:
    """A few steps of a fixed-point iteration."""

    def f(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        z = torch.zeros_like(x)
        for _ in range(3):
            z = torch.tanh(0.4 * a(z) + b(x))
        return z

    return Of(f, *_two(d))


ROWS: dict[str, Make] = {
    "quotient": _quotient,
    "two joined": _joined,
    "ordered": _ordered,
    "entrywise": _entrywise,
    "transformed": _transformed,
    "kernel": _kernel,
    "bilinear": _bilinear,
    "tied, negative": _tied_negative,
    "normed weights": _normed_weights,
    "highway": _highway,
    "dense block": _dense_block,
    "mixture": _mixture,
    "fixed point": _fixed_point,
}


def _multihead(pick: random.Random, d: int) -> nn.Module:
    def f(x: torch.Tensor, m: nn.Module, n: nn.Module) -> torch.Tensor:
        t = x.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1) if kind == "causal" else None
        bias = _bias(t).to(x.dtype) if kind == "bias" else mask
        y = n(x) if is_normed else x
        return x * scale + m(y, y, y, attn_mask=bias, need_weights=False)[0]

    kind, is_normed, scale, seed = (
        pick.choice(["", "causal", "bias"]),
        pick.random() < 0.5,
        pick.choice([0.0, 1.0, -0.5]),
        pick.randrange(1000),
    )

    def _bias(t: int) -> torch.Tensor:
        return torch.randn(t, t, generator=torch.Generator().manual_seed(seed))

    return Of(f, nn.MultiheadAttention(d, pick.choice([1, 2]), batch_first=True), nn.LayerNorm(d))


def _linear_attention(pick: random.Random, d: int) -> nn.Module:
    def f(x: torch.Tensor, qk: nn.Module, v: nn.Module) -> torch.Tensor:
        q, k = (F.elu(t) + 1 for t in qk(x).chunk(2, -1))
        return (q @ (k.mT @ v(x))) / (q @ k.sum(-2)[..., None] + 1e-2)

    return Of(f, nn.Linear(d, 2 * d), nn.Linear(d, d))


def _cross(pick: random.Random, d: int) -> nn.Module:
    tokens = _constant(pick, 3, d)
    is_query = pick.random() < 0.5

    def f(x: torch.Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> torch.Tensor:
        c = tokens.to(x.dtype).expand(len(x), -1, -1)
        if is_query:
            return F.scaled_dot_product_attention(q(x), k(c), v(c))
        return x + F.scaled_dot_product_attention(q(c), k(x), v(x)).mean(1, keepdim=True)

    return Of(f, *_two(d), nn.Linear(d, d))


def _pooled(pick: random.Random, d: int) -> nn.Module:
    of = pick.choice(
        [
            lambda x, a: x + a(x.mean(1, keepdim=True)),
            lambda x, a: x - a(x.amax(1, keepdim=True)),
            lambda x, a: (torch.softmax(a(x), 1) * x).sum(1, keepdim=True) + x,
            lambda x, a: x * torch.sigmoid(a(x.mean(1, keepdim=True))),
            lambda x, a: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None] - a(x),
            lambda x, a: a(x).flip(1) + x,
            lambda x, a: x - x.mean((1, 2), keepdim=True),
            lambda x, a: F.layer_norm(a(x), x.shape[1:]),
            lambda x, a: a(x[:, [0]]) + x,
            lambda x, a: torch.cat([x[:, 1:], a(x[:, :1])], 1),
            lambda x, a: x @ x.mT @ a(x) / 8,
            lambda x, a: torch.einsum("btd,bsd->bts", x.tanh(), x) @ a(x) / 5,
            lambda x, a: torch.softmax(x @ x.mT, -1) @ x - a(x),
            lambda x, a: F.conv1d(F.pad(x.mT, (1, 0)), a.weight[:, :, None].expand(-1, -1, 2)).mT,
            lambda x, a: F.interpolate(F.avg_pool1d(a(x).mT, 2, 1, 1), size=x.shape[1], mode="linear").mT,
            lambda x, a: torch.fft.fft(torch.fft.fft(a(x), dim=-1), dim=1).real / 4,
        ]
    )
    return Of(of, nn.Linear(d, d))


def _mixer(pick: random.Random, d: int) -> nn.Module:
    seed, act = pick.randrange(1000), activation(pick)

    def f(x: torch.Tensor, norm: nn.Module, act: nn.Module) -> torch.Tensor:
        w = torch.randn(x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(seed)).to(x.dtype)
        return x + act(norm(x).mT @ w).mT

    return Of(f, nn.LayerNorm(d), act)


def _rotated(pick: random.Random, d: int) -> nn.Module:
    def turned(t: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(t.shape[1], dtype=t.dtype)[:, None] * 0.7 / torch.arange(1, d // 2 + 1, dtype=t.dtype)
        a, b = t.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def f(x: torch.Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> torch.Tensor:
        return F.scaled_dot_product_attention(turned(q(x)), turned(k(x)), v(x), is_causal=True)

    return Of(f, *_two(d), nn.Linear(d, d))


def _scan(pick: random.Random, d: int) -> nn.Module:
    """A selective state space, step by step."""

    def f(x: torch.Tensor, dt: nn.Module, b: nn.Module, act: nn.Module) -> torch.Tensor:
        step, into = F.softplus(dt(x)), b(x)
        h, out = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            h = h * torch.exp(-step[:, i]) + step[:, i] * into[:, i]
            out.append(h)
        return torch.stack(out, 1) * torch.sigmoid(x) if is_gated else torch.stack(out, 1)

    is_gated = pick.random() < 0.5
    return Of(f, *_two(d), activation(pick))


TOKENS: dict[str, Make] = {
    "multihead": _multihead,
    "linear attention": _linear_attention,
    "cross attention": _cross,
    "pooled": _pooled,
    "mixer": _mixer,
    "rotated attention": _rotated,
    "scan": _scan,
}


def _both_ways(pick: random.Random, d: int) -> nn.Module:
    kind = pick.choice([nn.GRU, nn.LSTM, nn.RNN])
    made = kind(d, d // 2, pick.choice([1, 2]), batch_first=True, bidirectional=True)
    return Of(lambda x, r: r(x)[0], made)


def _last_state(pick: random.Random, d: int) -> nn.Module:
    kind = pick.choice([nn.GRU, nn.LSTM])

    def f(x: torch.Tensor, r: nn.Module) -> torch.Tensor:
        state = r(x)[1]
        state = state[1] if isinstance(state, tuple) else state
        return x + state[-1][:, None]

    return Of(f, kind(d, d, batch_first=True))


def _cells(pick: random.Random, d: int) -> nn.Module:
    kind = pick.choice([nn.GRUCell, nn.LSTMCell, nn.RNNCell])

    def f(x: torch.Tensor, cell: nn.Module) -> torch.Tensor:
        state, out = None, []
        for step in x.unbind(1):
            state = cell(step, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)

    return Of(f, kind(d, d))


SEQUENCES: dict[str, Make] = {"both ways": _both_ways, "last state": _last_state, "cells": _cells}


def _images(pick: random.Random, d: int) -> nn.Module:
    of = pick.choice(
        [
            lambda x, a, b: x + b(a(x).relu()),
            lambda x, a, b: x * torch.sigmoid(b(a(x.mean((2, 3), keepdim=True)).relu())[..., :1, :1]),
            lambda x, a, b: F.interpolate(F.max_pool2d(a(x), 2, ceil_mode=True), x.shape[2:], mode="bilinear") - b(x),
            lambda x, a, b: F.interpolate(F.avg_pool2d(a(x), 2, ceil_mode=True), x.shape[2:]) * b(x).tanh(),
            lambda x, a, b: F.conv2d(a(x), b.weight[:, :1], padding=1, groups=2),
            lambda x, a, b: F.conv2d(a(x).relu(), b.weight, padding=2, dilation=2),
            lambda x, a, b: F.conv_transpose2d(F.silu(a(x)), b.weight, padding=1),
            lambda x, a, b: x - F.adaptive_avg_pool2d(a(x), 1) * torch.sigmoid(F.adaptive_max_pool2d(b(x), 1)),
            lambda x, a, b: F.lp_pool2d(a(x).abs() + 0.1, 2, 2, 1).mean((2, 3), keepdim=True) + b(x),
            lambda x, a, b: F.layer_norm(a(x).movedim(1, -1), x.shape[1:2]).movedim(-1, 1) + F.gelu(b(x)),
            lambda x, a, b: F.local_response_norm(a(x), 2) + x,
            lambda x, a, b: torch.cat([a(x)[:, :1], -b(x)[:, 1:]], 1),
            lambda x, a, b: a(x).flatten(1).softmax(-1).reshape(x.shape) * b(x),
            lambda x, a, b: x + F.pad(a(x), (1, 1, 1, 1), mode="reflect")[..., 1:-1, :-2],
            lambda x, a, b: F.pixel_shuffle(torch.cat([a(x), b(x)], 1).repeat(1, 2, 1, 1), 2)[..., : x.shape[2], : x.shape[3]],
            lambda x, a, b: F.unfold(a(x), 3, padding=1).unflatten(1, (x.shape[1], 9)).amax(2).reshape(x.shape) + x,
        ]
    )
    return Of(of, *(nn.Conv2d(d, d, 3, padding=1) for _ in range(2)))


IMAGES: dict[str, Make] = {
    "two convolutions": _images,
    "convolution of 5": lambda pick, d: nn.Conv2d(
        d, d, 5, padding=2, padding_mode=pick.choice(["zeros", "circular", "replicate"])
    ),
}
PARTS = ROWS | TOKENS | SEQUENCES | IMAGES


def network_part(name: str, number: int, width: int) -> nn.Module:
    """The part of that name, for an input of this width; `number` decides what is random in its form."""
    return (FIRST | PARTS)[name](random.Random(number), width)
