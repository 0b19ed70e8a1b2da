"""What is imported once, and not by the process of each family."""

from __future__ import annotations

import importlib

from tests.models_zoo.case import TIMM, TORCHVISION


def warm(source: str) -> None:
    """Import what the models of a library import when the first of them is made."""
    importlib.import_module("torch._dynamo")
    if source in (TIMM, TORCHVISION):
        importlib.import_module(source)
        return
    from transformers import AutoModel, LlamaConfig

    size = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
    AutoModel.from_config(LlamaConfig(**size))
