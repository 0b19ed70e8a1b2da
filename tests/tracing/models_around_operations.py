"""Models that keep tables, choose modules, take and give containers: what is around their operations."""

from __future__ import annotations

import dataclasses

import einops
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from tests.tracing.models_as_written import ROWS, SEQUENCE, Program, linear, of, parameter


class Cached(nn.Module):
    """A table made at the first call and kept on self."""

    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(6, 6), None

    def forward(self, x):
        if self.table is None or self.table.shape != x.shape[-1:]:
            self.table = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) / 6
        return self.head(x * self.table.cos())


class KeepsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        self.hidden = self.a(x)
        return self.b(self.hidden.relu())


def constants(m, x):
    scale = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0], device=x.device)
    mask = torch.ones(x.shape[0], x.shape[0], device=x.device).tril().bool()
    s = (m.q(x * scale) @ x.T).masked_fill(~mask, float("-inf"))
    return s.softmax(-1) @ x


def under_no_grad(m, x):
    with torch.no_grad():
        y = m.a(x)
    return m.b(y)


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(m.a(x).relu())


def from_dict(m, x):
    return m.inner({"x": x, "scale": 2.0})


class TakesDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, inputs):
        return {"y": self.head(inputs["x"]) * inputs["scale"], "none": None}


@dataclasses.dataclass
class Features:
    first: torch.Tensor
    second: torch.Tensor | None = None


class GivesDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, *, mask=None):
        y = self.a(x)
        return Features(first=y if mask is None else y * mask, second=self.b(y))


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"small": nn.Linear(6, 2), "large": nn.Linear(6, 8)})

    def forward(self, x, head: str = "large"):
        return self.heads[head](x)


AROUND = {
    "constants on x.device": of(constants, q=linear()),
    "a table kept on self": Program(Cached),
    "an output kept on self": Program(KeepsOutput),
    "checkpoint, not reentrant": of(
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).relu()), a=linear(), b=linear()
    ),
    "checkpoint, reentrant": of(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True).relu()), a=linear(), b=linear()),
    "a part under no_grad": of(under_no_grad, a=linear(), b=linear()),
    "autocast": of(autocast, a=linear(), b=linear()),
    "bfloat16": Program(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)).bfloat16(), ROWS, torch.bfloat16),
    "float16": Program(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)).half(), ROWS, torch.float16),
    "bfloat16, normalized": Program(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Softmax(-1)).bfloat16(), ROWS, torch.bfloat16
    ),
    "einops.rearrange": of(
        lambda m, x: einops.rearrange(m.head(einops.rearrange(x, "b (h w) c -> b h w c", h=1)), "b h w c -> b c (h w)"),
        SEQUENCE, head=linear(),
    ),
    "einops.reduce mean": of(lambda m, x: m.head(einops.reduce(x, "b t c -> b c", "mean")), SEQUENCE, head=linear()),
    "einops.reduce max": of(lambda m, x: m.head(einops.reduce(x, "b t c -> b c", "max")), SEQUENCE, head=linear()),
    "einops.reduce sum": of(lambda m, x: m.head(einops.reduce(x, "b t c -> b c", "sum")), SEQUENCE, head=linear()),
    "einops.repeat": of(lambda m, x: m.head(einops.repeat(x, "b c -> b k c", k=3)), head=linear()),
    "einops.einsum": of(lambda m, x: einops.einsum(x, m.w, "b i, o i -> b o"), w=parameter(3, 6)),
    "einops.pack": of(lambda m, x: m.head(einops.pack([x, x * 2], "b * c")[0]), head=linear()),
    "a dict in and out": of(from_dict, inner=TakesDict),
    "a dataclass out, keyword None": Program(GivesDataclass),
    "a ModelOutput out": of(lambda m, x: BaseModelOutput(last_hidden_state=m.head(x)), head=linear()),
    "several outputs": of(lambda m, x: (m.a(x), [m.b(x), None], 3), a=linear(), b=linear(6, 2)),
    "a module chosen by a string": Program(Chosen),
}  # fmt: skip
