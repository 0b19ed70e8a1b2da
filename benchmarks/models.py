"""The models that are timed, and how much of them; without anything of ours, so that a process which has none can make them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTShape:
    """A GPT-2 with the usual vocabulary."""

    layers: int
    width: int
    is_tied: bool = True

    @property
    def name(self) -> str:
        return f"{self.layers} layers of width {self.width}, {'tied' if self.is_tied else 'with a head of its own'}"


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    rounds: int = 15
    first_calls: int = 3  # of the MLP; of GPT-2 one fewer; in real mode pairs of processes
    mlp_layers: int = 12
    gpt2_layers: int = 4
    depths: tuple[int, ...] = (4, 16, 64)
    wrapper_depths: tuple[int, ...] = (4, 16)
    wrapper_widths: tuple[int, ...] = (64, 512)
    sample_batches: tuple[int, ...] = (1, 8, 64, 256)  # of per-sample gradients
    gpts: tuple[GPTShape, ...] = (
        GPTShape(4, 256),
        GPTShape(4, 256, is_tied=False),
        GPTShape(12, 768),
        GPTShape(12, 768, is_tied=False),
    )
    matrices: tuple[tuple[int, int], ...] = ((768, 3072), (768, 2304), (768, 768), (256, 1024), (256, 768), (256, 256))
    rounds_of_steps: int = 7  # of width 256; wider ones three, of many seconds each
    first_call_models: tuple[str, ...] = ()  # all
    first_call_rounds: int = 3
    modula_python: Path | None = None  # an interpreter that has JAX and Modula
    modula_gpts: tuple[tuple[int, int], ...] = ((4, 128), (4, 256), (12, 256))  # layers, width

    @property
    def first_calls_of_gpt2(self) -> int:
        return max(1, self.first_calls - 1)


def mlp(depth: int, width: int = 64) -> nn.Sequential:
    """`depth` times linear + relu."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def gpt2(layers: int) -> nn.Module:
    """GPT-2 from transformers, unchanged: random weights, 4 heads, width 128, 512 tokens, 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": layers, "n_head": 4, "n_embd": 128, "vocab_size": 512, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, use_cache=False)).eval()


def gpt2_of(shape: GPTShape, device: str = "cpu") -> nn.Module:
    """GPT-2 from transformers, unchanged, of any size."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_layer": shape.layers, "n_head": shape.width // 64, "n_embd": shape.width, "tie_word_embeddings": shape.is_tied}
    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(**size, **no_dropout, use_cache=False)).eval()


class ModulaGPT(nn.Module):
    """The parameters of the GPT that Modula builds, vocabulary 65, in a graph as near to its own as matters for a norm."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(65, width), nn.Linear(width, 65, bias=False)
        self.blocks = nn.Sequential(*(_ModulaBlock(width, 1 / (2 * layers)) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


class _ModulaBlock(nn.Module):
    def __init__(self, width: int, share: float):
        super().__init__()
        self.heads, self.share = max(1, width // 64), share
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (m(x).view(batch, length, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.heads / width) / 3
        x = (1 - self.share) * x + self.share * self.out(y.transpose(1, 2).reshape(batch, length, width))
        return (1 - self.share) * x + self.share * self.down(F.gelu(self.up(x)) / 1.1289)


def tokens() -> torch.Tensor:
    """Two rows of 64 tokens for `gpt2`."""
    return torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
