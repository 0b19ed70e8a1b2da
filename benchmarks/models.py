"""The models that are timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from thunder_norm import LinfTensor, NormedTensor, RMSTensor, RMSToRMSTensor


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    rounds: int = 15
    first_calls: int = 5  # of the MLP; of GPT-2 one fewer
    mlp_layers: int = 12
    gpt2_layers: int = 4
    depths: tuple[int, ...] = (4, 16, 64)
    wrapper_depths: tuple[int, ...] = (4, 16)
    wrapper_widths: tuple[int, ...] = (64, 512)

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


def tokens() -> torch.Tensor:
    """Two rows of 64 tokens for `gpt2`."""
    return torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))


def given_norms(model: nn.Module) -> dict[str, NormedTensor]:
    """A norm that requires grad for each parameter, in the kind the rules for `mlp` and `gpt2` take it for."""
    return {name: _given(name, parameter) for name, parameter in model.named_parameters()}


def _given(name: str, parameter: torch.Tensor) -> NormedTensor:
    if "wte" in name or "wpe" in name or name.endswith("bias"):
        return RMSTensor(1.01, norm_size_requires_grad=True)
    if parameter.ndim == 1:
        return LinfTensor(1.01, norm_size_requires_grad=True)
    in_last = not name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))  # transformers' Conv1D is [in, out]
    return RMSToRMSTensor(1.01, elem_dims=(-2, -1) if in_last else (-1, -2), norm_size_requires_grad=True)
