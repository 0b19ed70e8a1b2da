"""A few steps of training: does `ModularOptimizer` lower a loss, and how far beside AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.seeds import seeded
from thunder_norm.errors import GradientError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.modular.masses import LIGHT

from .case import Built, Model, built, floating

FIVE_STEPS_RATES = (0.1, 0.01, 1.0)
MODULAR_RATES = (0.1, 0.5, 2.0, 8.0, 30.0)
ADAMW_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


class LossDidNotFall(AssertionError):
    """Five steps that left a loss as large as it was, or larger."""


class NotInEager(Exception):
    """A model that eager PyTorch cannot train as it is: LeViT in eval mode keeps what it computed from its parameters."""


def regression(b: Built) -> Callable[[], torch.Tensor]:
    """The mean squared error of the first differentiable result to random numbers of RMS 1, which a step of norm 1 is made for."""
    results = floating(b())
    position = next(i for i, t in enumerate(results) if t.requires_grad)
    first = results[position].detach()
    target = torch.randn(first.shape, generator=torch.Generator().manual_seed(seeded(0)), dtype=torch.float64).to(first.dtype)

    def loss() -> torch.Tensor:
        return (floating(b())[position] - target).square().mean()

    try:
        for _ in range(2):
            loss().backward()
    except RuntimeError as e:
        raise NotInEager(str(e)) from None
    return loss


def losses(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Before the first step, and after each; infinite from where it diverges, which `ModularOptimizer` refuses to step on and AdamW does not."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        found.append(value.item())
        if not math.isfinite(found[-1]):
            return [*found, math.inf]
        value.backward()
        try:
            optimizer.step()
        except GradientError:
            return [*found, math.inf]
    return [*found, loss().item()]  # with gradients, which a program may take itself


def start(model: Model) -> tuple[Built, Callable[[], torch.Tensor], ModularNorm, dict[str, torch.Tensor]]:
    b = built(model)
    loss = regression(b)
    norm = ModularNorm(b.module, *b.args, mode="typical", light=LIGHT, **b.kwargs)
    return b, loss, norm, copy.deepcopy(b.module.state_dict())


def five_steps(model: Model) -> dict[str, Any]:
    """The loss after five steps over that before, at the first of three rates at which it falls."""
    b, loss, norm, state = start(model)
    ratios = []
    for rate in FIVE_STEPS_RATES:
        b.module.load_state_dict(state)
        found = losses(loss, ModularOptimizer(norm, lr=rate, missing_grads="skip"), 5)
        if found[-1] < found[0]:
            return {"rate": rate, "loss": found[-1] / found[0]}
        ratios.append(f"{found[-1] / found[0]:.4g} at {rate}")
    raise LossDidNotFall(f"after over before is {', '.join(ratios)}")


def twelve_steps(model: Model) -> dict[str, Any]:
    """The smallest loss after twelve steps over that before, of five rates each, of `ModularOptimizer` and of AdamW."""
    b, loss, norm, state = start(model)

    def best(make: Callable[[float], torch.optim.Optimizer], rates: tuple[float, ...]) -> tuple[float, float]:
        found = {}
        for rate in rates:
            b.module.load_state_dict(state)
            values = losses(loss, make(rate), 12)
            ratio = values[-1] / values[0]
            found[rate] = ratio if math.isfinite(ratio) else math.inf
        rate = min(found, key=lambda r: found[r])
        return found[rate], rate

    modular, modular_rate = best(lambda rate: ModularOptimizer(norm, lr=rate, missing_grads="skip"), MODULAR_RATES)
    adamw, adamw_rate = best(lambda rate: torch.optim.AdamW(b.module.parameters(), lr=rate, weight_decay=0.0), ADAMW_RATES)
    return {"modular": modular, "modular_rate": modular_rate, "adamw": adamw, "adamw_rate": adamw_rate}
