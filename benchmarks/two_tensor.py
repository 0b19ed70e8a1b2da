"""A wrapper subclass that knows nothing of norms: torch's own TwoTensor through an MLP.

Eager dispatch, SubclassTransform, and torch.compile's handling of subclasses; and the same aten operations written by hand on
two plain tensors under ``thunder.jit``, which is what a call is meant to cost: at most 1.1 times that.
"""

from __future__ import annotations

import time
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks import models, timing
from thunder_norm.transforms import SubclassTransform

EAGER, OURS, HAND = "eager dispatch", "SubclassTransform", "thunder.jit, by hand"


class ByHand(nn.Module):
    """What TwoTensor's dispatch makes of an MLP: t, addmm and relu, the latter two on both tensors."""

    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.model = model

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                weight = layer.weight.t()
                a, b = torch.addmm(layer.bias, a, weight), torch.addmm(layer.bias, b, weight)
            else:
                a, b = F.relu(a, layer.inplace), F.relu(b, layer.inplace)
        return a, b


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    model = models.mlp(options.mlp_layers)
    torch.manual_seed(1)
    a, b = torch.randn(16, 64), torch.randn(16, 64)
    x = TwoTensor(a, b)
    ours, by_hand = thunder.jit(model, transforms=[SubclassTransform()]), thunder.jit(ByHand(model))
    calls = {EAGER: lambda: model(x), OURS: lambda: ours(x), HAND: lambda: by_hand(a, b)}
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        calls[f"torch.compile({backend})"] = lambda f=compiled: f(x)
    with torch.no_grad():
        first = timing.Measured({name: [_first_call(call)] for name, call in calls.items()})
        check_equal({name: call() for name, call in calls.items()})
        measured = timing.in_turns(calls, options.rounds)
    what = f"TwoTensor, MLP of {options.mlp_layers} layers"
    return [
        *timing.rows(f"{what}: first call", first, HAND),
        *timing.rows(f"{what}: forward", measured, HAND, operations=2 * options.mlp_layers),
    ]


def _first_call(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def check_equal(results: dict[str, Any]) -> None:
    """All candidates compute the same two tensors.

    Raises:
        AssertionError: they do not.
    """
    pairs = {name: (y.a, y.b) if isinstance(y, TwoTensor) else y for name, y in results.items()}
    for pair in pairs.values():
        torch.testing.assert_close(pair, pairs[EAGER])
