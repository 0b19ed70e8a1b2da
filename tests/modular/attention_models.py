"""Attentions in many spellings, and their logits seen from outside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SOFTMAXES = (torch.softmax, nn.functional.softmax, torch.Tensor.softmax)


class Logits(TorchFunctionMode):
    """What softmaxes get, and what torch's attention would give its own."""

    def __init__(self):
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SOFTMAXES:
            self.seen.append(args[0].detach().clone())
        if func is nn.functional.scaled_dot_product_attention:
            q, k = args[:2]
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if kwargs.get("enable_gqa") else k
            scale = kwargs.get("scale") or q.shape[-1] ** -0.5
            logits = (q @ k.mT * scale).detach()
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            self.seen.append(
                logits if mask is None else torch.where(mask if mask.dtype == torch.bool else mask == 0, logits, -math.inf)
            )
        return func(*args, **kwargs)


def logits_of(model: nn.Module, *args: Any, heads: int = 1) -> torch.Tensor:
    """Logits [heads, batch, tokens, keys] of the one attention, whose heads are in a dimension; -inf where a mask hides them."""
    with torch.no_grad(), Logits() as seen:
        if isinstance(model, Torch | WrittenOut):
            seen.seen.append(model.logits(*args))  # torch does not tell what it calls inside, nor is there a softmax to see
        else:
            model(*args)
    found = next(t for t in seen.seen if t.ndim > 2)  # others are of routers
    found = found.unflatten(0, (len(args[0]), -1)) if found.ndim == 3 else found
    return torch.where(found < -1e30, -math.inf, found).movedim(heads, 0)


class ByHand(nn.Module):
    """Four heads of queries, two of keys; biases, a rotation of two entries by place, logits written out."""

    def __init__(self, fused=True, heads=4, groups=2, width=3):
        super().__init__()
        self.sizes = [heads * 2 * width, groups * 2 * width, groups * 2 * width]
        self.width, self.fused = 2 * width, fused
        self.qkv = nn.Linear(6, sum(self.sizes)) if fused else nn.ModuleList(nn.Linear(6, n) for n in self.sizes)

    def rotated(self, t):
        angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None]
        a, b = t.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x):
        parts = self.qkv(x).split(self.sizes, -1) if self.fused else [layer(x) for layer in self.qkv]
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        y = (self.rotated(q) @ self.rotated(k).mT / self.width**0.5).softmax(-1) @ v
        return y.transpose(1, 2).flatten(-2)


class WrittenOut(ByHand):
    """A softmax as exponentials over their sum.

    Args:
        is_shifted: by the largest logit of each row, as who fears overflows does.
        is_late: divided by the sums after the values.
        is_log: the exponential of a logarithm.
    """

    def __init__(self, is_shifted=True, is_late=False, is_log=False):
        super().__init__()
        self.is_shifted, self.is_late, self.is_log = is_shifted, is_late, is_log

    def logits(self, x):
        q, k, _ = self.qkv(x).split(self.sizes, -1)
        q, k = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in (q, k))
        logits = self.rotated(q) @ self.rotated(k).repeat_interleave(2, 1).mT / self.width**0.5
        return logits.masked_fill(torch.ones(logits.shape[-2:], device=x.device).triu(1).bool(), -math.inf)

    def forward(self, x):
        logits, v = self.logits(x), self.qkv(x).split(self.sizes, -1)[2].unflatten(-1, (-1, self.width)).transpose(1, 2)
        v = v.repeat_interleave(2, 1)
        if self.is_log:
            return (logits - logits.logsumexp(-1, keepdim=True)).exp() @ v
        e = torch.exp(logits - logits.amax(-1, keepdim=True) if self.is_shifted else logits)
        sums = e.sum(-1, keepdim=True)
        return (e @ v) / sums if self.is_late else (e / sums) @ v


class KeysAreValues(ByHand):
    """What gives the keys gives the values as well."""

    def forward(self, x):
        q, k, _ = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        k = k.repeat_interleave(2, 1)
        return (q @ k.mT).softmax(-1) @ k


class Gained(ByHand):
    """Normalized queries and keys, with gains that heads share (as Qwen3 has them), or for each head (as Cohere)."""

    def __init__(self, norm="rms", per_head=False, same=False, is_0_dim=False, bias=False, offset=0.0):
        super().__init__()
        self.norm, self.offset = norm, offset
        shapes = [() if is_0_dim else (heads, 1, self.width) if per_head else (self.width,) for heads in (4, 2)]
        self.gains = nn.ParameterList(torch.full(shape, 1.0) for shape in shapes[: 1 if same else 2])
        self.biases = nn.ParameterList(torch.zeros(shape) for shape in shapes if bias)

    def normalized(self, t, side):
        gain, bias = self.gains[side % len(self.gains)], self.biases[side] if self.biases else None
        if self.norm == "layer":
            return nn.functional.layer_norm(t, (self.width,), gain, bias)
        y = nn.functional.rms_norm(t, (self.width,)) if self.norm == "rms" else nn.functional.normalize(t, dim=-1)
        if bias is not None and not self.offset:
            return torch.addcmul(bias, gain, y)
        y = y * (self.offset + gain) if self.offset else y * gain
        return y if bias is None else y + bias

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        q, k = self.rotated(self.normalized(q, 0)), self.rotated(self.normalized(k, 1))
        return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)


class QueriesAreKeys(ByHand):
    """A multiple of one is a multiple of the other."""

    def forward(self, x):
        q, _, v = self.qkv(x).split(self.sizes, -1)
        q = q.unflatten(-1, (-1, self.width)).transpose(1, 2)
        return (q @ q.mT).softmax(-1) @ v[:, None]


class Reparametrized(ByHand):
    """The weight is a function of the parameter."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        y = nn.functional.linear(x, self.function(self.qkv.weight), self.qkv.bias)
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in y.split(self.sizes, -1))
        return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)


class ClassToken(ByHand):
    """The first token is not rotated."""

    def rotated(self, t):
        return torch.cat([t[..., :1, :], super().rotated(t[..., 1:, :])], -2)


class RotatedByTable(ByHand):
    """Sines and cosines are rows of a table (RoFormer)."""

    def __init__(self):
        super().__init__()
        self.angles = nn.Embedding(5, self.width)

    def rotated(self, t):
        sin, cos = self.angles(torch.arange(t.shape[-2])).chunk(2, -1)
        a, b = t.chunk(2, -1)
        return t * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


class RotatedBySums(ByHand):
    """A rotation is a sum over the two entries of a product with a matrix for each place."""

    def rotated(self, t):
        by = torch.arange(t.shape[-2] * self.width * 2, dtype=t.dtype).cos().view(t.shape[-2], -1, 2, 2)
        return (t.unflatten(-1, (-1, 1, 2)) * by).sum(-1).flatten(-2)


class Pooled(ByHand):
    """Queries are the largest of two tokens' (Hiera), keys are means of maps."""

    def forward(self, x):
        q, *kv = self.qkv(x).split(self.sizes, -1)
        kv = (nn.functional.avg_pool2d(t.mT[:, :, None], (1, 2)).squeeze(2).mT for t in kv)
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in (q, *kv))
        q = q[..., :4, :].unflatten(-2, (2, 2)).max(-2).values
        return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)


class Channels(nn.Module):
    """Channels attend to each other, over all tokens (DaViT); normalized, with a temperature of each head (XCiT, EdgeNeXt).

    `made` makes temperatures of a parameter: of its exponential, often with a cap (Swin v2).
    """

    def __init__(self, is_normalized=False, made=None):
        super().__init__()
        self.qkv, self.is_normalized, self.made = nn.Linear(6, 36), is_normalized, made or (lambda t: t)
        self.temperature = nn.Parameter(torch.tensor([1.0, 0.5, 2.5]).view(3, 1, 1)) if is_normalized else 0.3

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 4, 1)
        if self.is_normalized:
            q, k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
        return (q @ k.mT * self.made(self.temperature)).softmax(-1) @ v


class Grouped(ByHand):
    """`einsum` puts the queries that share a key among the tokens."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.width)) for t in self.qkv(x).split(self.sizes, -1))
        logits = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (2, 2)), k).flatten(1, 2)
        return torch.einsum("bgrts,bsgd->btgrd", logits.softmax(-1).unflatten(1, (2, 2)), v)


class Bilinear(nn.Module):
    """One matrix for each head between the tokens, which `einsum` multiplies by these on either side."""

    def __init__(self):
        super().__init__()
        self.between, self.v = nn.Parameter(torch.randn(4, 6, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return torch.einsum("bti,hij,bsj->bhts", x, self.between, x).softmax(-1) @ self.v(x)[:, None]


class Apart(nn.Module):
    """A projection for each head, not all as wide, whose scores are put beside each other."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.ModuleList(nn.Linear(6, n) for n in (2, 3, 2)) for _ in range(2))

    def forward(self, x):
        return torch.stack([q(x) @ k(x).mT for q, k in zip(self.q, self.k, strict=True)], 1).softmax(-1) @ x[:, None]


class Around(ByHand):
    """Each query has keys of its own, those around it, and products are taken entry by entry (neighbourhood attention)."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        k, v = (nn.functional.pad(t.repeat_interleave(2, 1), (0, 0, 1, 1)).unfold(2, 3, 1) for t in (k, v))
        p = (q[..., None] * k).sum(-2).softmax(-1)
        return (p[..., None, :] * v).sum(-1).transpose(1, 2).flatten(-2)


class Relative(ByHand):
    """Positions relative to a query have keys of their own, shifted to their places (Transformer-XL); each term has another layout."""

    def __init__(self):
        super().__init__(groups=4)
        self.biases = nn.ParameterList(torch.randn(4, 6) for _ in range(2))
        self.positions = nn.Linear(6, 24, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.width)) for t in self.qkv(x).split(self.sizes, -1))
        places = self.positions(torch.arange(30, dtype=x.dtype).cos().view(5, 6)).unflatten(-1, (4, 6))
        by_place = torch.einsum("bthd,shd->bhts", q + self.biases[1], places)
        n = by_place.shape[-1]
        shifted = nn.functional.pad(by_place, (1, 0)).view(len(x), 4, n + 1, n)[:, :, 1:].reshape(by_place.shape).tril()
        logits = (torch.einsum("bthd,bshd->bhts", q + self.biases[0], k) + shifted) * 0.4
        return logits.softmax(-1) @ v.transpose(1, 2)


class Talking(ByHand):
    """A matrix mixes the scores of heads before their softmax, and another one the probabilities (CaiT)."""

    def __init__(self, is_convolution=False):
        super().__init__()
        make = (lambda: nn.Conv2d(4, 4, 1, bias=False)) if is_convolution else (lambda: nn.Linear(4, 4, bias=False))
        self.mixes = nn.ModuleList(make() for _ in range(2))

    def mixed(self, t, i):
        mix = self.mixes[i]
        return mix(t) if isinstance(mix, nn.Conv2d) else mix(t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        probabilities = self.mixed(q @ k.repeat_interleave(2, 1).mT, 0).softmax(-1)
        return self.mixed(probabilities, 1) @ v.repeat_interleave(2, 1)


class Latent(nn.Module):
    """Logits in two terms, of which the second has one key for all heads; a bias is added in place."""

    def __init__(self, is_by_tokens=False):
        super().__init__()
        self.is_by_tokens = is_by_tokens
        self.q, self.k, self.q_rope, self.k_rope = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k))
        q_rope = self.q_rope(x).unflatten(-1, (3, 2)).transpose(1, 2)
        k_rope = self.k_rope(x)[:, None]
        second = torch.einsum("bhtd,bsd->bhts", q_rope, k_rope[:, 0]) if self.is_by_tokens else q_rope @ k_rope.mT
        logits = 0.7 * (torch.einsum("bhtd,bhsd->bhts", q, k) + second)
        logits += torch.zeros(5, 5, dtype=x.dtype)
        return logits.softmax(-1) @ k


class Einsum(nn.Module):
    """A stack of matrices, one for each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(3, 6, 4)) for _ in range(3))

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, w) for w in (self.q, self.k, self.v))
        return torch.einsum("bhts,bhsd->bthd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v)


class Torch(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def logits(self, x):
        y = nn.functional.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)
        q, k, _ = y.chunk(3, -1)
        if self.attention.bias_k is not None:  # a last key
            k = torch.cat([k, self.attention.bias_k.expand(len(x), 1, -1)], 1)
        q, k = (t.unflatten(-1, (3, 2)).transpose(1, 2) for t in (q, k))
        return q @ k.mT / 2**0.5
