"""Modules of torch.nn made to take one argument."""

from __future__ import annotations

import torch
from torch import nn


class Part(nn.Module):
    """One of several results."""

    def __init__(self, body, index=0):
        super().__init__()
        self.body, self.index = body, index

    def forward(self, x):
        return self.body(x)[self.index]


class State(nn.Module):
    """The last state of a recurrent module."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        state = self.body(x)[1]
        return state[1] if isinstance(state, tuple) else state


class FromState(nn.Module):
    """A recurrent module that starts from learned states."""

    def __init__(self, body, *shapes):
        super().__init__()
        self.body = body
        self.starts = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x):
        starts = tuple(self.starts)
        return self.body(x, starts if len(starts) > 1 else starts[0])[0]


class OverTime(nn.Module):
    """A cell applied to one item of a sequence after the other."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, seen = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen, 1)


class SelfAttention(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


class AttentionWeights(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[1]


class CausalAttention(nn.Module):
    def __init__(self, attention, is_causal=False):
        super().__init__()
        self.attention, self.is_causal = attention, is_causal

    def forward(self, x):
        n = x.shape[1] if self.attention.batch_first else x.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.attention(x, x, x, attn_mask=mask, is_causal=self.is_causal, need_weights=False)[0]


class PaddedAttention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        padded = torch.zeros(x.shape[:2] if self.attention.batch_first else x.shape[1::-1], dtype=torch.bool)
        padded[:, -1] = True
        return self.attention(x, x, x, key_padding_mask=padded, need_weights=False)[0]


class CrossAttention(nn.Module):
    """Attention from one thing to another, made of it."""

    def __init__(self, attention, how="half", **options):
        super().__init__()
        self.attention, self.how, self.options = attention, how, options
        k, v = attention.kdim, attention.vdim
        self.to_key, self.to_value = nn.Linear(attention.embed_dim, k), nn.Linear(attention.embed_dim, v)
        self.memory = nn.Parameter(torch.randn(3, k)) if how == "learned" else None

    def forward(self, x):
        if self.how == "learned":
            memory = (
                self.memory.expand(len(x), -1, -1)
                if self.attention.batch_first
                else self.memory[:, None].expand(-1, x.shape[1], -1)
            )
            return self.attention(x, memory, memory, **self.options)[0]
        if self.how == "same key":
            return self.attention(x, x, 2 * x, **self.options)[0]
        if self.how == "same query and value":
            return self.attention(x, 2 * x, x, **self.options)[0]
        other = x[:, :2] if self.attention.batch_first else x[:2]
        if self.how == "half":
            return self.attention(x, other, other, **self.options)[0]
        return self.attention(x, self.to_key(other), self.to_value(other), **self.options)[0]


class Masked(nn.Module):
    """An encoder with a causal mask, or a mask of padding."""

    def __init__(self, encoder, how="src_mask"):
        super().__init__()
        self.encoder, self.how = encoder, how

    def forward(self, x):
        if self.how == "src_key_padding_mask":
            padded = torch.zeros(2, x.shape[1], dtype=torch.bool)[: x.shape[0]]
            padded[:, -1] = True
            return self.encoder(x, src_key_padding_mask=padded)
        return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=self.how == "is_causal")


class Decode(nn.Module):
    """Something of two arguments, the second made of the first."""

    def __init__(self, decoder, body):
        super().__init__()
        self.decoder, self.body = decoder, body

    def forward(self, x):
        return self.decoder(x, self.body(x))


class PoolAndUnpool(nn.Module):
    def __init__(self, pool, unpool):
        super().__init__()
        self.pool, self.unpool = pool, unpool

    def forward(self, x):
        y, indices = self.pool(x)
        return self.unpool(y, indices, output_size=x.shape)


class WithTarget(nn.Module):
    """A loss, its target a buffer."""

    def __init__(self, loss, *targets):
        super().__init__()
        self.loss = loss
        self.count = len(targets)
        for i, target in enumerate(targets):
            self.register_buffer(f"target{i}", target)

    def forward(self, x):
        return self.loss(x, *(getattr(self, f"target{i}") for i in range(self.count)))


class WithOther(nn.Module):
    """A loss or distance between something and what `body` makes of it."""

    def __init__(self, loss, body, *targets):
        super().__init__()
        self.loss, self.body, self.targets = loss, body, targets

    def forward(self, x):
        return self.loss(x, self.body(x), *self.targets)


class WithOthers(nn.Module):
    def __init__(self, loss, positive, negative):
        super().__init__()
        self.loss, self.positive, self.negative = loss, positive, negative

    def forward(self, x):
        return self.loss(x, self.positive(x), self.negative(x))


class Bags(nn.Module):
    """An embedding bag with offsets or learned weights."""

    def __init__(self, bag, n, how="offsets"):
        super().__init__()
        self.bag, self.how = bag, how
        self.weights = nn.Parameter(torch.rand(n)) if how == "weights" else None

    def forward(self, ids):
        flat = ids.flatten()
        offsets = torch.arange(0, len(flat), ids.shape[-1])
        if self.how == "weights":
            return self.bag(flat, offsets, per_sample_weights=self.weights)
        return self.bag(flat, offsets)
