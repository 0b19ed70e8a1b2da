"""Models in forms that programs take and that are easy to leave out: recurrences, reparametrizations, writes in place, containers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

SEQUENCE, ROWS, IMAGE = (2, 5, 6), (4, 6), (2, 4, 6, 6)


@dataclass(frozen=True)
class Program:
    """A model, and what one input of it looks like."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = ROWS
    dtype: torch.dtype = torch.float32


class Of(nn.Module):
    """A function of x and of submodules, as a module."""

    def __init__(self, forward: Callable, **children: Any):
        super().__init__()
        self.body = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.body(self, x)


def of(body: Callable, shape: tuple[int, ...] = ROWS, dtype: torch.dtype = torch.float32, **makers: Callable) -> Program:
    """A program with submodules made by `makers`."""
    return Program(lambda: Of(body, **{name: make() for name, make in makers.items()}), shape, dtype)


def linear(inputs: int = 6, outputs: int = 6, **options: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inputs, outputs, **options)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape, dtype=dtype) / shape[-1])


# -- recurrences -------------------------------------------------------------------------------------------------------------


def lstm_cells(m, x):
    h = x.new_zeros(x.shape[0], 6)
    c = x.new_zeros(x.shape[0], 6)
    for t in range(x.shape[1]):
        h, c = m.cell(x[:, t], (h, c))
    return m.head(h)


def cells(m, x):
    h = torch.zeros(x.shape[0], 6, device=x.device)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return m.head(h)


def packed(m, x):
    lengths = torch.tensor([5, 3])
    out, _ = m.lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


def selective_scan(m, x):
    a = torch.exp(-F.softplus(m.decay(x)))
    b, h, out = m.into(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + b[:, t] * x[:, t]
        out.append(h)
    return m.out(torch.stack(out, 1))


RECURRENT = {
    "LSTM": of(lambda m, x: m.lstm(x)[0], SEQUENCE, lstm=lambda: nn.LSTM(6, 5, batch_first=True)),
    "LSTM, two layers, both directions": of(
        lambda m, x: m.lstm(x)[0], SEQUENCE, lstm=lambda: nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True)
    ),
    "LSTM, time first": of(lambda m, x: m.lstm(x)[0], SEQUENCE, lstm=lambda: nn.LSTM(6, 5)),
    "LSTM, without a batch": of(lambda m, x: m.lstm(x[0])[0], SEQUENCE, lstm=lambda: nn.LSTM(6, 5, bias=False)),
    "LSTM, projected": of(lambda m, x: m.lstm(x)[0], SEQUENCE, lstm=lambda: nn.LSTM(6, 5, proj_size=3, batch_first=True)),
    "LSTM, its last state": of(
        lambda m, x: m.head(m.lstm(x)[1][0][-1]), SEQUENCE, lstm=lambda: nn.LSTM(6, 6, batch_first=True), head=linear()
    ),
    "LSTM, a state given": of(
        lambda m, x: m.lstm(x, (x[:1].mean(1)[None].expand(1, 2, 6).contiguous(), torch.zeros(1, 2, 6, device=x.device)))[0],
        SEQUENCE, lstm=lambda: nn.LSTM(6, 6, batch_first=True),
    ),
    "GRU": of(lambda m, x: m.gru(x)[0], SEQUENCE, gru=lambda: nn.GRU(6, 5, batch_first=True)),
    "GRU, two layers, both directions": of(
        lambda m, x: m.gru(x)[0], SEQUENCE, gru=lambda: nn.GRU(6, 5, 2, bidirectional=True, dropout=0.0)
    ),
    "RNN": of(lambda m, x: m.rnn(x)[0], SEQUENCE, rnn=lambda: nn.RNN(6, 5, batch_first=True)),
    "RNN, relu": of(lambda m, x: m.rnn(x)[0], SEQUENCE, rnn=lambda: nn.RNN(6, 5, nonlinearity="relu")),
    "LSTMCell": of(lstm_cells, SEQUENCE, cell=lambda: nn.LSTMCell(6, 6), head=linear()),
    "GRUCell": of(cells, SEQUENCE, cell=lambda: nn.GRUCell(6, 6), head=linear()),
    "RNNCell": of(cells, SEQUENCE, cell=lambda: nn.RNNCell(6, 6), head=linear()),
    "selective scan": of(selective_scan, SEQUENCE, decay=linear(), into=linear(), out=linear()),
    "packed sequence": of(packed, SEQUENCE, lstm=lambda: nn.LSTM(6, 5, batch_first=True)),
}  # fmt: skip


# -- parameters made of parameters -------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

    def forward(self, w):
        return w + self.b @ self.a


def with_lora():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", LoRA())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2))


class StandardizedConv(nn.Conv2d):
    """Weight standardization (big transfer, NFNet)."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=1)


def tied():
    m = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    m[2].weight = m[0].weight
    return m


def frozen():
    m = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    m[0].requires_grad_(False)
    return m


REPARAMETRIZED = {
    "weight_norm, old": Program(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 2))),
    "weight_norm": Program(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.ReLU())),
    "weight_norm of a convolution": Program(lambda: parametrizations.weight_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "weight_norm, dim None": Program(lambda: parametrizations.weight_norm(nn.Linear(6, 6), dim=None)),
    "_weight_norm": of(lambda m, x: F.linear(x, torch._weight_norm(m.v, m.g)), v=parameter(3, 6), g=parameter(3, 1)),
    "spectral_norm": Program(lambda: parametrizations.spectral_norm(nn.Linear(6, 6))),
    "spectral_norm, old": Program(lambda: nn.utils.spectral_norm(nn.Linear(6, 6))),
    "orthogonal": Program(lambda: parametrizations.orthogonal(nn.Linear(6, 6))),
    "weight standardization": Program(lambda: StandardizedConv(4, 3, 3), IMAGE),
    "LoRA by parametrize": Program(with_lora),
    "tied": Program(tied),
    "frozen": Program(frozen),
}


# -- operators ------------------------------------------------------------------------------------------------------------------


def fourier(m, x):
    z = torch.fft.rfft(x, dim=1)
    z = torch.einsum("bkc,kcd->bkd", z, m.w)
    return torch.fft.irfft(z, n=x.shape[1], dim=1)


def fourier_2d(m, x):
    z = torch.fft.rfft2(x, norm="ortho")
    return torch.fft.irfft2(z * m.w, s=x.shape[-2:], norm="ortho")


def fourier_real_weight(m, x):
    z = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(m.w)
    return torch.fft.irfft(z, n=x.shape[1], dim=1, norm="ortho")


def experts(m, x):
    weight, chosen = m.router(x).softmax(-1).topk(2)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for i, e in enumerate(m.experts):
        out = out + (weight * (chosen == i)).sum(-1, keepdim=True) * e(x)
    return out


def autoencoder(m, x):
    mu, logvar = m.encode(x).chunk(2, -1)
    return m.decode(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar))


def autoencoder_mean(m, x):
    mu, logvar = m.encode(x).chunk(2, -1)
    std = torch.exp(logvar / 2)
    return m.decode(mu + torch.ones_like(std) * std)


OPERATORS = {
    "FFT operator": of(fourier, SEQUENCE, w=parameter(3, 6, 6, dtype=torch.complex64)),
    "FFT operator, 2D": of(fourier_2d, IMAGE, w=parameter(4, 6, 4, dtype=torch.complex64)),
    "FFT operator, a real weight": of(fourier_real_weight, SEQUENCE, w=parameter(3, 6, 2)),
    "FNet": of(lambda m, x: m.head(torch.fft.fft2(x).real), SEQUENCE, head=linear()),
    "mixture of experts": of(
        experts, router=linear(6, 4), experts=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    ),
    "VAE": of(autoencoder, encode=linear(6, 8), decode=linear(4, 6)),
    "VAE, noise of ones": of(autoencoder_mean, encode=linear(6, 8), decode=linear(4, 6)),
    "fold of unfold": of(
        lambda m, x: F.fold(m.head(F.unfold(x, 2, stride=2).transpose(1, 2)).transpose(1, 2), (6, 6), 2, stride=2),
        IMAGE, head=linear(16, 16),
    ),
    "nn.Unfold, nn.Fold": Program(lambda: nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((6, 6), 3, padding=1)), IMAGE),
    "Tensor.unfold": of(lambda m, x: m.head(x.unfold(1, 2, 1).flatten(2)), SEQUENCE, head=linear(12, 3)),
    "multihead attention": of(
        lambda m, x: m.a(x, x, x)[0], SEQUENCE, a=lambda: nn.MultiheadAttention(6, 2, batch_first=True)
    ),
    "multihead attention, k and v apart": of(
        lambda m, x: m.a(x, x[:, :3], x[:, 1:4])[0], SEQUENCE, a=lambda: nn.MultiheadAttention(6, 2, batch_first=True)
    ),
    "multihead attention, memory": of(
        lambda m, x: m.a(x, x[:, :3], x[:, :3])[0], SEQUENCE, a=lambda: nn.MultiheadAttention(6, 2, batch_first=True)
    ),
    "transformer": of(
        lambda m, x: m.t(x, x[:, :3]), SEQUENCE,
        t=lambda: nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True),
    ),
}  # fmt: skip


# -- writing in place ---------------------------------------------------------------------------------------------------------


def sliced(m, x):
    y = torch.zeros_like(x)
    y[:, :3] = m.a(x)
    y[:, 3:] = m.b(x)
    return m.head(y)


def written(m, x):
    y = m.head(x)
    y[..., 0] = 0.0
    y[:2, 1:-1] = m.head(x)[2:, 1:-1] * 2
    return y.relu()


def masked(m, x):
    y = m.head(x)
    y[x > 0] = 0.5
    return y


def empty_filled(m, x):
    y = x.new_empty(x.shape[0], 6)
    y[:, :3] = m.a(x)
    y[:, 3:] = m.b(x)
    return m.head(y)


def shifted_windows(m, x):
    mask = torch.zeros((1, 6, 1))
    count = 0
    for s in (slice(0, -4), slice(-4, -2), slice(-2, None)):
        mask[:, s, :] = count
        count += 1
    rows = mask.view(-1, 2)
    return m.head(x) + (rows[:, :1] - rows[:, 1:]).sum()


class EMA(nn.Module):
    """A running mean in a buffer, by in-place operations on it."""

    ema: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.ema.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
            return self.linear(x)
        return self.linear(x - self.ema)


class EMAUnderNoGrad(EMA):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.ema.copy_(self.ema * 0.9 + 0.1 * y.mean(0))
        return y


class EMAAssigned(EMA):
    def forward(self, x):
        self.ema = self.ema * 0.9 + 0.1 * x.mean(0).detach()
        return self.linear(x) + self.ema


IN_PLACE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.0, inplace=True),
    "Dropout2d": lambda: nn.Dropout2d(0.0, inplace=True),
    "AlphaDropout": lambda: nn.AlphaDropout(0.0, inplace=True),
    "ReLU": lambda: nn.ReLU(inplace=True),
    "ReLU6": lambda: nn.ReLU6(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.1, inplace=True),
    "Hardswish": lambda: nn.Hardswish(inplace=True),
    "Hardsigmoid": lambda: nn.Hardsigmoid(inplace=True),
    "Hardtanh": lambda: nn.Hardtanh(inplace=True),
    "SiLU": lambda: nn.SiLU(inplace=True),
    "Mish": lambda: nn.Mish(inplace=True),
    "ELU": lambda: nn.ELU(inplace=True),
    "SELU": lambda: nn.SELU(inplace=True),
    "CELU": lambda: nn.CELU(inplace=True),
    "RReLU": lambda: nn.RReLU(inplace=True).eval(),
    "Threshold": lambda: nn.Threshold(0.1, 0.1, inplace=True),
}

WRITING = {
    "zeros_like filled by slices": of(sliced, a=linear(6, 3), b=linear(6, 3), head=linear()),
    "new_empty filled by slices": of(empty_filled, a=linear(6, 3), b=linear(6, 3), head=linear()),
    "entries written": of(written, head=linear()),
    "entries written by a mask": of(masked, head=linear()),
    "a mask of shifted windows": of(shifted_windows, head=linear()),
    "EMA buffer": Program(EMA),
    "EMA buffer under no_grad": Program(EMAUnderNoGrad),
    "EMA buffer assigned": Program(EMAAssigned),
    **{f"in place: {n}": Program(lambda f=f: nn.Sequential(nn.Conv2d(4, 4, 1), f()), IMAGE) for n, f in IN_PLACE_LAYERS.items()},
}  # fmt: skip
