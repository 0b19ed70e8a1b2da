"""Whole steps of small models: ModularOptimizer in both precisions, and torch.optim.Muon as it is shipped, with AdamW for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import models, timing
from thunder_norm.modular import ModularOptimizer, param_groups

METHOD = (
    "Time of the thread, so that other programs matter less. Momentum 0.95 with Nesterov for all. Muon moves the matrices between "
    "activations and the first, AdamW the rest (`param_groups`). The bfloat16 of torch.optim.Muon is that of this processor, which has "
    "instructions for it; elsewhere it takes many times as long."
)
PEER = "torch.optim.Muon + AdamW"


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    return [row for case, made in _cases().items() for row in _steps(case, *made(), options.rounds)]


def _mlp(width: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers), torch.randn(8, 64)


def _gpt2(width: int) -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=width, n_layer=4, n_head=4, vocab_size=65, n_positions=64)
    return GPT2LMHeadModel(config), torch.randint(65, (2, 32))


def _vit(width: int) -> tuple[nn.Module, torch.Tensor]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "image_size": 16, "patch_size": 4}
    config = ViTConfig(num_hidden_layers=4, num_attention_heads=4, num_labels=10, **sizes)
    return ViTForImageClassification(config), torch.randn(4, 3, 16, 16)


def _cases() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    return {
        "MLP, 3 layers of width 256": lambda: _mlp(256),
        "MLP, 3 layers of width 512": lambda: _mlp(512),
        "GPT-2, 4 layers of width 64": lambda: _gpt2(64),
        "GPT-2, 4 layers of width 256": lambda: _gpt2(256),
        "ViT, 4 layers of width 64": lambda: _vit(64),
    }


def _steps(case: str, model: nn.Module, x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    options = {"lr": 1e-5, "momentum": 0.95, "nesterov": True}
    in_float32 = ModularOptimizer(model, x, **options)
    in_bfloat16 = ModularOptimizer(model, x, method="newton_schulz_bf16", **options)
    adapted = ModularOptimizer(model, x, noise_adaptation=0.95, **options)
    groups = param_groups(model, x)
    muon = torch.optim.Muon([g for g in groups if g["algorithm"] == "muon"], lr=1e-5)
    adamw = torch.optim.AdamW([g for g in groups if g["algorithm"] == "adamw"], lr=1e-5)

    def of_both() -> None:
        muon.step()
        adamw.step()

    candidates = {
        "ModularOptimizer": in_float32.step,
        "ModularOptimizer, newton_schulz_bf16": in_bfloat16.step,
        "ModularOptimizer, noise adaptation": adapted.step,
        PEER: of_both,
    }
    return timing.rows(case, timing.in_turns(candidates, rounds, seconds=0.1, clock=_thread_seconds), PEER)


def _thread_seconds(call: Callable[[], Any], repeats: int) -> float:
    started = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - started) / repeats
