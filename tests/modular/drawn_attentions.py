"""Attentions drawn at random, which know by construction what rows of their parameters make the queries, keys and values of each head."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.modular.modular_models import D
from tests.seeds import seeded

TORCHS = ("repeated", "grouped", "scaled", "expanded")  # spellings of torch's own attention


class Projection(nn.Module):
    """A matrix of the inputs, kept and multiplied in one of many ways."""

    def __init__(self, rows: int, kept: str, bias: bool):
        super().__init__()
        self.kept, self.axis = kept, int(kept in ("in, out", "einsum", "addmm", "baddbmm"))
        self.down = nn.Linear(6, 3, bias=False, dtype=D) if kept == "two" else None
        shape = [rows, 3 if kept == "two" else 6, *[1] * {"conv1d": 1, "conv2d": 2}.get(kept, 0)]
        self.weight = nn.Parameter(torch.randn(shape[::-1] if self.axis else shape, dtype=D))
        self.bias = nn.Parameter(torch.randn(rows, dtype=D)) if bias else None

    def forward(self, x):
        if self.kept == "conv1d":
            return F.conv1d(x.mT, self.weight, self.bias).mT
        if self.kept == "conv2d":
            return F.conv2d(x.mT[..., None], self.weight, self.bias).squeeze(-1).mT
        if self.kept == "addmm" and self.bias is not None:
            return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])
        if self.kept == "baddbmm" and self.bias is not None:
            return torch.baddbmm(self.bias, x, self.weight.expand(len(x), -1, -1))
        if self.axis:
            y = torch.einsum("bti,io->bto", x, self.weight) if self.kept == "einsum" else x @ self.weight
            return y if self.bias is None else y + self.bias
        x = x if self.down is None else F.rms_norm(self.down(x), (3,))
        return F.linear(F.layer_norm(x, (6,)) if self.kept == "normed" else x, self.weight, self.bias)


class DrawnAttention(nn.Module):
    """An attention with queries, keys and values of one input, or keys and values of another one.

    Attributes:
        seen: if it is to look, its logits [batch, heads, tokens, keys], -inf where they are masked, and its values.
    """

    def __init__(self, number: int):
        super().__init__()
        draw = random.Random(seeded(number))
        self.how = how = {name: draw.choice(options) for name, options in CHOICES.items()}
        self.heads, self.width, self.value_width = how["heads"], how["width"], draw.choice([how["width"], 3])
        self.groups = draw.choice([g for g in range(1, self.heads + 1) if self.heads % g == 0])
        self.torchs = draw.choice(TORCHS) if draw.random() < 0.3 else ""
        self.is_cross = len(how["fused"]) > 1 and how["fused"][0] == "q" and draw.random() < 0.4
        self.num = {"q": self.heads, "k": self.groups, "v": self.groups}
        self.widths = {"q": self.width, "k": self.width, "v": self.value_width}
        self.of = ["".join(part for part in how["order"] if part in some) for some in how["fused"]]
        sizes = [sum(self.num[part] * self.widths[part] for part in some) for some in self.of]
        self.layers = nn.ModuleList(Projection(size, how["kept"], how["bias"]) for size in sizes)
        self.out = nn.Linear(self.heads * self.value_width, 6, dtype=D)
        self.looks, self.seen = False, ()
        self.keys = draw.choice([4, 5, 7])

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, n, 6, dtype=D) for n in ((5, self.keys) if self.is_cross else (5,)))

    def parts(self, y: torch.Tensor, of: str) -> dict[str, torch.Tensor]:
        """Queries, keys and values [..., heads, width] in a product [..., rows]; or their numbers in those of the rows."""
        by_groups = self.how["layout"] == "by groups"
        num = {part: self.num[part] // self.groups if by_groups else self.num[part] for part in of}
        y = y.unflatten(-1, (self.groups, -1)) if by_groups else y
        sizes = [num[part] * self.widths[part] for part in of]
        if self.how["parts"] == "split":
            some = y.split(sizes, -1)
        else:
            some = [y[..., sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        found = dict(zip(of, some, strict=True))
        if self.how["layout"] == "in turn":
            return {part: t.unflatten(-1, (-1, num[part])).mT for part, t in found.items()}
        found = {part: t.unflatten(-1, (num[part], -1)) for part, t in found.items()}
        return {part: t.flatten(-3, -2) for part, t in found.items()} if by_groups else found

    def rows(self) -> dict[str, tuple[int, Mapping[str, torch.Tensor]]]:
        """Of each parameter the axis, and the rows of queries, keys and values [heads, width]."""
        found = {}
        for i, (layer, of) in enumerate(zip(self.layers, self.of, strict=True)):
            parts = self.parts(torch.arange(layer.weight.shape[layer.axis]), of)
            found[f"layers.{i}.weight"] = layer.axis, parts
            if layer.bias is not None:
                found[f"layers.{i}.bias"] = 0, parts
        return found

    def rotated(self, t: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(t.shape[-2], dtype=D)[:, None] * torch.arange(1, t.shape[-1] // 2 + 1, dtype=D)
        return ROTATIONS[self.how["rotation"]](t, angle.cos(), angle.sin())

    def forward(self, x, other=None):
        found: dict[str, torch.Tensor] = {}
        for layer, of in zip(self.layers, self.of, strict=True):
            found |= self.parts(layer(x if other is None or "q" in of else other), of)
        q, k, v = (found[part].transpose(1, 2) for part in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        keep = keep if self.how["mask"] == "none" else keep.tril()
        y = self.of_torch(q, k, v, keep) if self.torchs else self.by_hand(q, k, v, keep)
        return self.out(y.transpose(1, 2).flatten(2))

    def look(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float) -> None:
        if self.looks:
            logits = (q @ k.repeat_interleave(self.heads // self.groups, 1).mT) * scale
            self.seen = torch.where(keep, logits, -math.inf).detach(), v.detach().clone()

    def of_torch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        more, scale = self.heads // self.groups, 0.3 if self.torchs == "scaled" else None
        self.look(q, k, v, keep, self.width**-0.5 if scale is None else scale)
        if self.torchs == "expanded":
            k, v = (t[:, :, None].expand(-1, -1, more, -1, -1).flatten(1, 2) for t in (k, v))
        elif self.torchs != "grouped":
            k, v = (t.repeat_interleave(more, 1) for t in (k, v))
        mask = {"none": None, "added": torch.zeros(keep.shape, dtype=D).masked_fill(~keep, -math.inf)}.get(self.how["mask"], keep)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=self.torchs == "grouped")

    def by_hand(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scale, of = self.width**-0.5, self.how["scale"]
        q = q * {"query": scale, "both": scale**0.5}.get(of, 1.0)
        k = k * {"key": scale, "both": scale**0.5}.get(of, 1.0)
        more = self.heads // self.groups
        self.look(q, k, v, keep, scale if of in ("after", "divided") else 1.0)
        logits = LOGITS[self.how["logits"]](q, k, more)
        logits = logits * scale if of == "after" else logits / self.width**0.5 if of == "divided" else logits
        if self.how["mask"] == "filled":
            logits = logits.masked_fill(~keep, -math.inf)
        elif self.how["mask"] == "added":
            logits = logits + torch.zeros(keep.shape, dtype=D).masked_fill(~keep, torch.finfo(torch.float32).min)
        elif self.how["mask"] == "where":
            logits = torch.where(keep, logits, torch.tensor(-math.inf, dtype=D))
        p, v = SOFTMAXES[self.how["softmax"]](logits), v.repeat_interleave(more, 1)
        if self.how["values"] == "einsum":
            return torch.einsum("bhts,bhsd->bhtd", p, v)
        if self.how["values"] == "entries":
            return (p[..., None] * v[..., None, :, :]).sum(-2)
        return (v.mT @ p.mT).mT if self.how["values"] == "values first" else p @ v


def _halves(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = t.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _pairs(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = t[..., ::2], t[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def _by_shift(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = t.chunk(2, -1)
    return t * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def _written(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(t)
    out[..., ::2] = t[..., ::2] * cos - t[..., 1::2] * sin
    out[..., 1::2] = t[..., ::2] * sin + t[..., 1::2] * cos
    return out


def _complex(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)).flatten(-2)


ROTATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda t, cos, sin: t,
    "halves": _halves,
    "pairs": _pairs,
    "partial": lambda t, cos, sin: torch.cat([_halves(t[..., :2], cos[:, :1], sin[:, :1]), t[..., 2:]], -1),
    "complex": _complex,
    "by shift": _by_shift,
    "written": _written,
}


def _baddbmm(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    return torch.baddbmm(q.new_empty(len(q), q.shape[1], k.shape[1]), q, k.mT, beta=0)


# of queries, keys and how many queries share each of them
LOGITS: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda q, k, more: q @ k.repeat_interleave(more, 1).mT,
    "einsum": lambda q, k, more: torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(more, 1)),
    "bmm": lambda q, k, more: torch.bmm(q.flatten(0, 1), k.repeat_interleave(more, 1).flatten(0, 1).mT).unflatten(0, q.shape[:2]),
    "baddbmm": lambda q, k, more: _baddbmm(q, k.repeat_interleave(more, 1)).unflatten(0, q.shape[:2]),
    "grouped": lambda q, k, more: (q.unflatten(1, (-1, more)) @ k[:, :, None].mT).flatten(1, 2),
    "heads apart": lambda q, k, more: torch.stack([q[:, h] @ k[:, h // more].mT for h in range(q.shape[1])], 1),
    "tokens first": lambda q, k, more: torch.einsum("bthd,bshd->bhts", q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(more, 2)),
    "keys first": lambda q, k, more: (k.repeat_interleave(more, 1) @ q.mT).mT,
    "entries": lambda q, k, more: (q[..., None, :] * k.repeat_interleave(more, 1)[..., None, :, :]).sum(-1),
    "entries of keys first": lambda q, k, more: (k.repeat_interleave(more, 1)[..., None, :, :] * q[..., None, :]).sum(-1),
}  # fmt: skip


def _written_out(logits: torch.Tensor) -> torch.Tensor:
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _in_place(logits: torch.Tensor) -> torch.Tensor:
    e = logits.clone().sub_(logits.amax(-1, keepdim=True)).exp_()
    return e.div_(e.sum(-1, keepdim=True))


SOFTMAXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "method": lambda logits: logits.softmax(-1),
    "log": lambda logits: F.log_softmax(logits, -1).exp(),
    "written out": _written_out,
    "in place": _in_place,
    "out": lambda logits: torch.softmax(logits, -1, out=logits),
    "over rows": lambda logits: logits.mT.softmax(-2).mT,
}


CHOICES: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2, 3, 4, 6),
    "width": (2, 4, 6),
    "fused": (("qkv",), ("q", "kv"), ("q", "k", "v"), ("qk", "v")),
    "order": ("qkv", "qvk", "kqv", "kvq", "vqk", "vkq"),
    "layout": ("blocks", "by groups", "in turn"),
    "kept": ("out, in", "in, out", "einsum", "conv1d", "conv2d", "addmm", "baddbmm", "two", "normed"),
    "bias": (True, False),
    "parts": ("split", "slices"),
    "rotation": tuple(ROTATIONS),
    "scale": ("after", "query", "key", "both", "divided"),
    "logits": tuple(LOGITS),
    "mask": ("none", "filled", "added", "where"),
    "softmax": tuple(SOFTMAXES),
    "values": ("matmul", "einsum", "values first", "entries"),
}
