"""A wrapper subclass that knows nothing of norms: torch's own TwoTensor through an MLP.

Eager dispatch, SubclassTransform with Thunder's executors and with that of torch.compile, and torch.compile's own handling of
subclasses; and the same aten operations written by hand on two plain tensors under ``thunder.jit``, which is what a call is meant to
cost: at most 1.1 times that.  With a backward pass the input and the parameters require grad; by hand the two paths share their
weights' gradients, which for TwoTensor are TwoTensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks import models, timing
from thunder_norm.transforms import SubclassTransform

EAGER, OURS, COMPILED = "eager dispatch", "SubclassTransform", "SubclassTransform, torch.compile executor"
HAND, PLAIN, ONE = "thunder.jit, by hand", "eager, one plain tensor", "thunder.jit, one plain tensor"


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
    return [
        row for depth in options.wrapper_depths for width in options.wrapper_widths for row in _case(depth, width, options.rounds)
    ]


def _case(depth: int, width: int, rounds: int) -> list[dict[str, Any]]:
    """The first calls, calls without gradients, and calls with a backward pass, of one size."""
    model = models.mlp(depth, width)
    torch.manual_seed(1)
    a, b = torch.randn(16, width), torch.randn(16, width)
    x = TwoTensor(a, b)
    torch._dynamo.reset()
    on_wrappers = {
        EAGER: model,
        OURS: thunder.jit(model, transforms=[SubclassTransform()]),
        COMPILED: thunder.jit(model, transforms=[SubclassTransform()], executors=["torchcompile"]),
        "torch.compile(aot_eager)": torch.compile(model, backend="aot_eager", fullgraph=True),
        "torch.compile(inductor)": torch.compile(model, backend="inductor", fullgraph=True),
    }
    by_hand, one = thunder.jit(ByHand(model)), thunder.jit(model)
    with torch.no_grad():
        calls = {name: lambda f=f: f(x) for name, f in on_wrappers.items()}
        calls |= {HAND: lambda: by_hand(a, b), ONE: lambda: one(a)}
        first = timing.Measured({name: [_first_call(call)] for name, call in calls.items()})
        check_equal({name: call() for name, call in calls.items() if name != ONE})
        calls[PLAIN] = lambda: model(a)
        forward = timing.in_turns(calls, rounds)

    own, ones = TwoTensor(a, b).requires_grad_(), TwoTensor(torch.ones_like(a), torch.ones_like(b))
    own_a, own_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    steps = {name: lambda f=f: _step(model, (own,), f, (ones,)) for name, f in on_wrappers.items()}
    steps[HAND] = lambda: _step(model, (own_a, own_b), by_hand, (ones.a, ones.b))
    steps[PLAIN] = lambda: _step(model, (own_a,), model, (ones.a,))
    grads = {
        name: _gradients(model, own if name != HAND else (own_a, own_b), step) for name, step in steps.items() if name != PLAIN
    }
    check_equal(grads)
    both = timing.in_turns(steps, rounds)
    what = f"TwoTensor, MLP of {depth} layers, width {width}"
    return [
        *timing.rows(f"{what}: first call", first, ONE),
        *timing.rows(f"{what}: forward", forward, HAND, operations=2 * depth),
        *timing.rows(f"{what}: forward and backward", both, HAND, operations=2 * depth),
    ]


def _step(model: nn.Module, inputs: tuple, f: Callable, gradients: tuple) -> None:
    for t in (*model.parameters(), *inputs):
        t.grad = None
    outputs = f(*inputs)
    torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), gradients)


def _gradients(model: nn.Module, inputs: Any, step: Callable) -> Any:
    """The gradient of the input, and the sum of those of the weights."""
    step()
    total = sum((p.grad.a + p.grad.b if isinstance(p.grad, TwoTensor) else p.grad).sum() for p in model.parameters())
    found = inputs.grad if isinstance(inputs, TwoTensor) else TwoTensor(*(t.grad for t in inputs))
    return found.a + total, found.b + total


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
