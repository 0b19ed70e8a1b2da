"""Wrapper subclasses that know nothing of norms: torch's own TwoTensor and WrapperSubclass through an MLP.

Eager dispatch, SubclassTransform with Thunder's executors and with that of torch.compile, and torch.compile's own handling of
subclasses; and the same aten operations written by hand on the plain tensors under ``thunder.jit``, which is what a call is meant to
cost: at most 1.1 times that.  With a backward pass the input and the parameters require grad; by hand the paths share their
weights' gradients, which for TwoTensor are TwoTensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm
from benchmarks import models, timing
from thunder_norm.transforms import SubclassTransform
import thunder

EAGER, OURS, COMPILED = "eager dispatch", "SubclassTransform", "SubclassTransform, torch.compile executor"
INDUCTOR = "SubclassTransform, inductor executor"
HAND, PLAIN, ONE = "thunder.jit, by hand", "eager, one plain tensor", "thunder.jit, one plain tensor"


class ByHand(nn.Module):
    """What the dispatch makes of an MLP: t, addmm and relu, the latter two on every inner tensor."""

    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.model = model

    def forward(self, *inner: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                weight = layer.weight.t()
                inner = tuple(torch.addmm(layer.bias, t, weight) for t in inner)
            else:
                inner = tuple(F.relu(t, layer.inplace) for t in inner)
        return inner


def inner_tensors(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors inside a wrapper, or the tensor itself."""
    return tuple(getattr(x, name) for name in x.__tensor_flatten__()[0]) if hasattr(x, "__tensor_flatten__") else (x,)


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    return [
        row
        for cls, count in ((TwoTensor, 2), (WrapperSubclass, 1))
        for depth in options.wrapper_depths
        for width in options.wrapper_widths
        for row in _case(cls, count, depth, width, options.rounds)
    ]


def _case(cls: Callable[..., torch.Tensor], count: int, depth: int, width: int, rounds: int) -> list[dict[str, Any]]:
    """The first calls, calls without gradients, and calls with a backward pass, of one size."""
    model = models.mlp(depth, width)
    torch.manual_seed(1)
    inner = tuple(torch.randn(16, width) for _ in range(count))
    x = cls(*inner)
    torch._dynamo.reset()
    on_wrappers = {
        EAGER: model,
        OURS: thunder.jit(model, transforms=[SubclassTransform()]),
        COMPILED: thunder.jit(model, transforms=[SubclassTransform()], executors=["torchcompile"]),
        INDUCTOR: thunder.jit(model, transforms=[SubclassTransform()], executors=[thunder_norm.executors.inductor]),
        "torch.compile(aot_eager)": torch.compile(model, backend="aot_eager", fullgraph=True),
        "torch.compile(inductor)": torch.compile(model, backend="inductor", fullgraph=True),
    }
    by_hand, one = thunder.jit(ByHand(model)), thunder.jit(model)
    with torch.no_grad():
        calls = {name: lambda f=f: f(x) for name, f in on_wrappers.items()}
        calls |= {HAND: lambda: by_hand(*inner), ONE: lambda: one(inner[0])}
        first = timing.Measured({name: [_first_call(call)] for name, call in calls.items()})
        check_equal({name: call() for name, call in calls.items() if name != ONE})
        calls[PLAIN] = lambda: model(inner[0])
        forward = timing.in_turns(calls, rounds)

    own, ones = cls(*inner).requires_grad_(), tuple(torch.ones_like(t) for t in inner)
    owned = tuple(t.clone().requires_grad_() for t in inner)
    steps = {name: lambda f=f: _step(model, (own,), f, (cls(*ones),)) for name, f in on_wrappers.items()}
    steps[HAND] = lambda: _step(model, owned, by_hand, ones)
    steps[PLAIN] = lambda: _step(model, owned[:1], model, ones[:1])
    grads = {name: _gradients(model, owned if name == HAND else (own,), step) for name, step in steps.items() if name != PLAIN}
    check_equal(grads)
    both = timing.in_turns(steps, rounds)
    what = f"{cls.__name__}, MLP of {depth} layers, width {width}"
    return [
        *timing.rows(f"{what}: first call", first, ONE),
        *timing.rows(f"{what}: forward", forward, HAND, operations=count * depth),
        *timing.rows(f"{what}: forward and backward", both, HAND, operations=count * depth),
    ]


def _step(model: nn.Module, inputs: tuple, f: Callable, gradients: tuple) -> None:
    for t in (*model.parameters(), *inputs):
        t.grad = None
    outputs = f(*inputs)
    torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), gradients)


def _gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...], step: Callable) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs' inner tensors, and the sum of those of the weights."""
    step()
    weights = torch.stack([t.sum() for p in model.parameters() for t in (torch.stack(inner_tensors(p.grad)).sum(0),)])
    return (*(t for x in inputs for t in inner_tensors(x.grad)), weights)


def _first_call(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def check_equal(results: dict[str, Any]) -> None:
    """All candidates compute the same tensors.

    Raises:
        AssertionError: they do not.
    """
    found = {name: y if isinstance(y, tuple) else inner_tensors(y) for name, y in results.items()}
    for tensors in found.values():
        torch.testing.assert_close(tensors, found[EAGER], rtol=1e-4, atol=1e-4)
