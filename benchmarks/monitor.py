"""What a training monitor costs: steps that are sampled and steps that are not, against the loop without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import models, timing
from thunder_norm.modular import TrainingMonitor

METHOD = (
    "One process, the loops in turns, each with a model and an AdamW of its own. A step is zero_grad, forward, backward and the optimizer's "
    "step. Sampled: a monitor with everything it has, every=1. Not sampled: a monitor between two samples. The cost of sampling every 50 "
    "steps is the first ratio less 1, over 50."
)
PEER = "without"
EVERY = 50


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    cases: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor]]]] = {
        "GPT-2, width 128, 4 blocks, 16 x 128 tokens": lambda: _gpt2(128, 16),
        "perceptron, 784-512-512-10, 256 samples": _perceptron,
    }
    if options.rounds >= 10:
        cases |= {
            "GPT-2, width 256, 4 blocks, 8 x 128 tokens": lambda: _gpt2(256, 8),
            "GPT-2, width 256, 4 blocks, 32 x 128 tokens": lambda: _gpt2(256, 32),
        }
    return [row for name, make in cases.items() for row in _rows(name, make)]


def _rows(case: str, make: Callable[[], Any]) -> list[dict[str, Any]]:
    candidates = {PEER: _loop(make, None), "sampled": _loop(make, 1), "not sampled": _loop(make, 1_000_000)}
    measured = timing.in_turns(candidates, 5, seconds=0, warm_up=1)
    rows = timing.rows(case, measured, PEER)
    return [{**row, "cost": (row["ratio"] - 1) / EVERY} if row["candidate"] == "sampled" else row for row in rows]


def _loop(make: Callable[[], Any], every: int | None) -> Callable[[], None]:
    """One step of a loop, watched if `every` says how often."""
    torch.manual_seed(0)
    model, batch, loss = make()
    optimizer = torch.optim.AdamW(model.parameters())
    if every is not None:
        TrainingMonitor(model, batch, every=every, optimizer=optimizer, warn=False)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()

    return step


def _gpt2(width: int, samples: int) -> tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=512, n_positions=128, n_embd=width, n_layer=4, n_head=8, use_cache=False)
    tokens = torch.randint(512, (samples, 128))

    def loss(result: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return GPT2LMHeadModel(config), tokens, loss


def _perceptron() -> tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(256, 784), _square


def _square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()
