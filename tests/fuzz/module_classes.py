"""Modules as users write them, which random modules are made of; the source of those that a program uses is part of what is printed.

Each takes tensors and submodules of one argument, `body`, so that they nest; `c` is the size of the last dimension.
"""

from __future__ import annotations

import collections
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# -- modules of torch.nn with one argument ----------------------------------------------------------------------------------


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


# -- containers -------------------------------------------------------------------------------------------------------------


class Each(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        for body in self.bodies:
            x = body(x)
        return x


class Named(nn.Module):
    def __init__(self, first, then):
        super().__init__()
        self.bodies = nn.ModuleDict({"first": first, "skipped": nn.Linear(1, 1), "then": then})

    def forward(self, x):
        for name, body in self.bodies.items():
            x = body(x) if name != "skipped" else x
        return x


class InContainer(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.parts = nn.Container(inner=body)

    def forward(self, x):
        return self.parts.inner(x)


class Mean(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return torch.stack([body(x) for body in self.bodies]).mean(0)


class Side(nn.Module):
    """Two modules on the two halves."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([self.first(a), self.second(b)], -1)


class Concat(nn.Module):
    def __init__(self, *bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return torch.cat([body(x) for body in self.bodies], -1)


# -- wiring -----------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, body, scale=1.0):
        super().__init__()
        self.body, self.scale = body, scale

    def forward(self, x):
        return x + self.scale * self.body(x)


class ResidualInPlace(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        y += x
        return y


class LayerScale(nn.Module):
    def __init__(self, body, c):
        super().__init__()
        self.body, self.gain = body, nn.Parameter(0.1 * torch.ones(c))

    def forward(self, x):
        return x + self.gain * self.body(x)


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self.body(x))


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self, body):
        super().__init__()
        self.first = self.second = body

    def forward(self, x):
        return self.first(x) - self.second(2 * x)


class Copied(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.second = body, copy.deepcopy(body)

    def forward(self, x):
        return self.first(x) + self.second(x)


class Gated(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x * torch.sigmoid(self.body(x))


class SqueezeExcite(nn.Module):
    """A gate for each channel, for [n, c, *places]."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x):
        s = x.flatten(2).mean(-1)
        s = torch.sigmoid(self.up(F.relu(self.down(s), inplace=True)))
        return x * s.reshape(*s.shape, *[1] * (x.dim() - 2))


class Experts(nn.Module):
    def __init__(self, c, *bodies):
        super().__init__()
        self.router, self.bodies = nn.Linear(c, len(bodies)), nn.ModuleList(bodies)

    def forward(self, x):
        weights = F.softmax(self.router(x), -1)
        return sum(weights[..., i : i + 1] * body(x) for i, body in enumerate(self.bodies))


class TopGate(nn.Module):
    """The largest entries, the others 0."""

    def __init__(self, k=2):
        super().__init__()
        self.k = k

    def forward(self, x):
        threshold = x.topk(self.k, -1).values[..., -1:]
        return torch.where(x >= threshold, x, torch.zeros_like(x))


class TrainBranch(nn.Module):
    def __init__(self, training, otherwise):
        super().__init__()
        self.in_training, self.otherwise = training, otherwise

    def forward(self, x):
        return self.in_training(x) if self.training else self.otherwise(x)


class Alternating(nn.Module):
    """Something else in each call: it counts them."""

    def __init__(self, even, odd):
        super().__init__()
        self.even, self.odd, self.calls = even, odd, 0

    def forward(self, x):
        self.calls += 1
        return self.odd(x) if self.calls % 2 else self.even(x)


class ByKeyword(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, *, scale=0.5):
        return self.body(input=x) * scale


class StochasticDepth(nn.Module):
    def __init__(self, body, p=0.5):
        super().__init__()
        self.body, self.p = body, p

    def forward(self, x):
        y = self.body(x)
        if not self.training:
            return x + y
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype) > self.p
        return x + y * keep / (1 - self.p)


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


# -- where no gradients are wanted -------------------------------------------------------------------------------------------


class NoGrad(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            y = self.body(x)
        return 2 * y


class NoGradDecorated(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    @torch.no_grad()
    def forward(self, x):
        return self.body(x)


class InferenceRegion(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.inference_mode():
            y = self.body(x)
        return x + y.clone()


class GradAgain(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            y = 2 * x
            with torch.enable_grad():
                return self.body(y)


class Detached(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).detach()


class StopGradient(nn.Module):
    """Half of the value has a gradient."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        return y + y.detach()


class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (x.sign() - x).detach()


class Frozen(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body.requires_grad_(False)

    def forward(self, x):
        return self.body(x)


class Checkpointed(nn.Module):
    def __init__(self, body, reentrant=False, **options):
        super().__init__()
        self.body, self.options = body, {"use_reentrant": reentrant, **options}

    def forward(self, x):
        return checkpoint(self.body, x, **self.options)


class CheckpointedInParts(nn.Module):
    def __init__(self, *bodies, reentrant=False):
        super().__init__()
        self.bodies, self.reentrant = nn.Sequential(*bodies), reentrant

    def forward(self, x):
        return checkpoint_sequential(self.bodies, len(self.bodies), x, use_reentrant=self.reentrant)


class CheckpointedFunction(nn.Module):
    """A checkpoint around a function of several arguments."""

    def __init__(self, body, reentrant=False):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        def run(a, scale, b=None):
            y = self.body(a) * scale
            return y, (y if b is None else y + b)

        first, second = checkpoint(run, x, 0.5, x, use_reentrant=self.reentrant)
        return first + second


class InAutocast(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return self.body(x)


# -- parameters ---------------------------------------------------------------------------------------------------------------


class Affine(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.randn(c)), nn.Parameter(torch.randn(c))

    def forward(self, x):
        return x * self.gain + self.bias


class AffineInPlace(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.randn(c)), nn.Parameter(torch.randn(c))

    def forward(self, x):
        y = x * self.gain
        y += self.bias
        y.mul_(0.5).clamp_(-3, 3)
        return y


class Sliced(nn.Module):
    """Products with parts of one matrix, [3 c, c]."""

    def __init__(self, c, how="slice"):
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.randn(3 * c, c)), nn.Parameter(torch.randn(3 * c)), how

    def forward(self, x):
        c = x.shape[-1]
        if self.how == "slice":
            return F.linear(x, self.weight[c : 2 * c], self.bias[c : 2 * c])
        if self.how == "chunk":
            q, k, v = (F.linear(x, w, b) for w, b in zip(self.weight.chunk(3), self.bias.chunk(3), strict=True))
            return q * torch.tanh(k) + v
        if self.how == "split":
            a, b = self.weight.split([c, 2 * c])
            return F.linear(F.linear(x, b), b.t()) + F.linear(x, a)
        if self.how == "view":
            return torch.einsum("...i,hoi->...o", x, self.weight.view(3, c, c))
        if self.how == "unbind":
            return sum(F.linear(x, w) for w in self.weight.view(3, c, c).unbind(0))
        if self.how == "index":
            return x @ self.weight[torch.arange(c)].t()
        if self.how == "select":
            return x * self.weight[0] + self.bias[0]
        if self.how == "flat":
            return F.linear(x, self.weight.flatten()[: c * c].view(c, c))
        if self.how == "stack":
            return F.linear(x, torch.stack([self.weight[0], self.weight[1]]))
        return F.linear(x, torch.cat([self.weight[:1], self.weight[-1:]]), self.bias[:2])


class Tied(nn.Module):
    """One matrix, there and back."""

    def __init__(self, c, h=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(h, c))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


class TiedLayers(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Linear(c, c), nn.Linear(c, c)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class TiedEmbedding(nn.Module):
    def __init__(self, n, c):
        super().__init__()
        self.embedding, self.head = nn.Embedding(n, c), nn.Linear(c, n, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class TwiceUsed(nn.Module):
    """A parameter used as a matrix and as a table of gains."""

    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, c))

    def forward(self, x):
        return F.linear(x, self.weight) * self.weight.view(-1)[: x.shape[-1]]


class ListOfParameters(nn.Module):
    def __init__(self, c, n=2):
        super().__init__()
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(c)) for _ in range(n)])
        self.by_name = nn.ParameterDict({"gain": nn.Parameter(torch.ones(c)), "unused": nn.Parameter(torch.ones(1))})

    def forward(self, x):
        for bias in self.biases:
            x = x + bias
        return x * self.by_name["gain"]


class Positions(nn.Module):
    """Learned positions, and a token before the others."""

    def __init__(self, c, n=16):
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.randn(1, n, c)), nn.Parameter(torch.randn(1, 1, c))

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions[:, : x.shape[1]]


class LowRank(nn.Module):
    def __init__(self, c, rank=2):
        super().__init__()
        self.base = nn.Linear(c, c).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, c)), nn.Parameter(torch.randn(c, rank))

    def forward(self, x):
        return self.base(x) + 0.5 * (x @ self.a.t() @ self.b.t())


class MergedLowRank(nn.Module):
    def __init__(self, c, rank=2):
        super().__init__()
        self.base = nn.Parameter(torch.randn(c, c), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, c)), nn.Parameter(torch.randn(c, rank))

    def forward(self, x):
        return F.linear(x, self.base + self.b @ self.a)


class StandardizedWeight(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, c))

    def forward(self, x):
        w = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, w / (w.std(1, keepdim=True) + 1e-2))


class EqualizedWeight(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(c, c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), (self.weight * 0.5).t()).view_as(x)


class Functional(nn.Module):
    """The module called with other parameters than its own."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        scaled = {name: 0.5 * p for name, p in self.body.named_parameters()}
        return torch.func.functional_call(self.body, scaled, (x,))


class Penalty(nn.Module):
    """The module's result, and the size of its weights."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x), sum(p.square().sum() for p in self.body.parameters())


class ReturnsParameter(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c))

    def forward(self, x):
        return x + self.weight, self.weight


def with_parametrization(module, name, parametrization):
    parametrize.register_parametrization(module, name, parametrization)
    return module


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, w):
        return (w + w.t()) / 2


class Bounded(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, w):
        return self.scale * torch.tanh(w)


# -- what a module keeps --------------------------------------------------------------------------------------------------------


class CachedTable(nn.Module):
    """A table made of a parameter in the first call."""

    def __init__(self, c):
        super().__init__()
        self.bias, self.table = nn.Parameter(torch.randn(c)), None

    def forward(self, x):
        if self.table is None:
            self.table = self.bias * 2
        return x + self.table


class CachedBySize(nn.Module):
    """Tables by the length of the input, in a dictionary."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        n = x.shape[-1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n, dtype=x.dtype, device=x.device).cos() * x.new_ones(n)
        return x * self.tables[n]


class Remembers(nn.Module):
    """The last input, all outputs, and how many there were."""

    def __init__(self, body):
        super().__init__()
        self.body, self.last, self.outputs, self.calls = body, None, [], 0

    def forward(self, x):
        y = self.body(x)
        self.last, self.calls = x, self.calls + 1
        self.outputs.append(y.detach())
        return y


class UsesLast(nn.Module):
    """A recurrent state that is kept between calls."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        self.state = x if self.state is None else 0.5 * (self.state.detach() + x)
        return self.state + x


class EmaInPlace(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.register_buffer("mean", torch.zeros(c))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0))
        return x - self.mean


class EmaReassigned(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.register_buffer("mean", torch.zeros(c), persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0)
        return x - self.mean


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x * 0.5


class Constants(nn.Module):
    """Tensors that are buffers, attributes, and made on the way."""

    def __init__(self, c):
        super().__init__()
        self.register_buffer("mask", torch.arange(c) % 2 == 0)
        self.register_buffer("order", torch.arange(c).flip(0))
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        x = x.masked_fill(self.mask, 0.5).index_select(-1, self.order)
        return torch.where(self.mask, x, -x) * self.scale + torch.ones(x.shape[-1], dtype=x.dtype)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.cos = self.sin = None

    def forward(self, x):
        if self.cos is None:
            t = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
            self.cos, self.sin = torch.cat([t, t], -1).cos(), torch.cat([t, t], -1).sin()
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin


# -- hooks ----------------------------------------------------------------------------------------------------------------------


def _halved(module, args):
    return (args[0] * 0.5,)


def _doubled(module, args, output):
    return output * 2


class Hooked(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        body.register_forward_pre_hook(_halved)
        body.register_forward_hook(_doubled)

    def forward(self, x):
        return self.body(x)


class Watched(nn.Module):
    """A hook keeps what a submodule makes."""

    def __init__(self, body):
        super().__init__()
        self.body, self.seen = body, {}
        body.register_forward_hook(lambda module, args, output: self.seen.__setitem__("out", output.detach()))

    def forward(self, x):
        return self.body(x) + self.seen["out"].mean() if "out" in self.seen else self.body(x)


# -- functions ------------------------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x**2 * g, None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g * w + h, (g * x).flatten(0, -2).sum(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Cubed(nn.Module):
    def forward(self, x):
        return Cube.apply(x, 0.5)


class ScaledBy(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(c))

    def forward(self, x):
        return Scaled.apply(x, self.gain)[0]


class ReversedGradient(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return Reversed.apply(self.body(x))


# -- written out ------------------------------------------------------------------------------------------------------------------


class WrittenRMSNorm(nn.Module):
    def __init__(self, c, how="rsqrt"):
        super().__init__()
        self.gain, self.how = nn.Parameter(torch.ones(c)), how

    def forward(self, x):
        if self.how == "rsqrt":
            return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2))
        if self.how == "divided":
            return self.gain * (x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt())
        if self.how == "layer":
            centered = x - x.mean(-1, keepdim=True)
            return self.gain * centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-2)
        return self.gain * F.normalize(x, dim=-1)


class WrittenAttention(nn.Module):
    """[n, t, c], with heads."""

    def __init__(self, c, heads=2, how="sdpa"):
        super().__init__()
        self.qkv, self.out, self.heads, self.how = nn.Linear(c, 3 * c), nn.Linear(c, c), heads, how

    def forward(self, x):
        n, t, c = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
            y = F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Mixer(nn.Module):
    """[n, t, c], across tokens and then channels."""

    def __init__(self, t, c):
        super().__init__()
        self.tokens, self.channels = nn.Linear(t, t), nn.Linear(c, c)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x).permute(0, 1, 2).contiguous()


class SetsItems(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[..., 0] = 0.0
        y[:, -1:] = y[:, -1:] * 2
        return y


class Preallocated(nn.Module):
    def forward(self, x):
        out = torch.zeros_like(x)
        for i in range(x.shape[-1]):
            out[..., i] = x[..., : i + 1].sum(-1)
        return out


class Pairs(nn.Module):
    """Products of pairs, by Bilinear."""

    def __init__(self, bilinear, body):
        super().__init__()
        self.bilinear, self.body = bilinear, body

    def forward(self, x):
        return self.bilinear(x, self.body(x))


# -- more than one argument and result ------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self, first, second, how="add"):
        super().__init__()
        self.first, self.second, self.how = first, second, how

    def forward(self, x, y):
        a, b = self.first(x), self.second(y)
        if self.how == "add":
            return a + b
        if self.how == "mul":
            return a * b
        if self.how == "cat":
            return torch.cat([a, b], -1)
        return a @ b.transpose(-1, -2)


class Translated(nn.Module):
    """Something of two arguments, such as nn.Transformer, on both inputs."""

    def __init__(self, body, first, second):
        super().__init__()
        self.body, self.first, self.second = body, first, second

    def forward(self, x, y):
        return self.body(self.first(x), self.second(y))


class Both(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x), self.second(x)


class AsDict(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        y = self.first(x)
        return {"first": y, "rest": [self.second(x), y.argmax(-1)], "size": x.shape[-1], "none": None}


Result = collections.namedtuple("Result", ["value", "same"])


class AsNamedTuple(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        return Result(y, y)
