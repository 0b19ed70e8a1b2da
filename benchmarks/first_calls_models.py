"""The models whose first calls are timed: transformers', unchanged, of small width, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import models

_SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """A model and what it is called with, by name."""

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]


def _gpt2(layers: int) -> Any:
    return models.gpt2(layers), {"input_ids": models.tokens()}


def _llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 512}
    config = LlamaConfig(**_SIZE, **heads, num_hidden_layers=layers, use_cache=False)
    return LlamaForCausalLM(config), {"input_ids": models.tokens()}


def _bert(layers: int) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        **_SIZE, num_hidden_layers=layers, max_position_embeddings=64, vocab_size=512, attn_implementation="eager"
    )
    return BertModel(config), {"input_ids": models.tokens()}


def _vit(layers: int) -> Any:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(**_SIZE, num_hidden_layers=layers, image_size=32, patch_size=8)
    return ViTModel(config), {"pixel_values": _pixels()}


def _resnet(depths: tuple[int, ...]) -> Any:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=list(depths), layer_type="basic")
    return ResNetModel(config), {"pixel_values": _pixels()}


def _pixels() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


CASES = {
    case.name: case
    for case in (
        Case("GPT-2, 2 layers", lambda: _gpt2(2)),
        Case("GPT-2, 8 layers", lambda: _gpt2(8)),
        Case("GPT-2, 12 layers", lambda: _gpt2(12)),
        Case("Llama, 4 layers", lambda: _llama(4)),
        Case("BERT, 4 layers", lambda: _bert(4)),
        Case("ViT, 4 layers", lambda: _vit(4)),
        Case("ResNet-18", lambda: _resnet((2, 2, 2, 2))),
    )
}


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its arguments."""
    torch.manual_seed(0)
    model, inputs = CASES[name].make()
    return model.eval(), inputs
