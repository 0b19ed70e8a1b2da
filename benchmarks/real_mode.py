"""Real mode: what a program on plain tensors pays for having NormTransform in its list.

Nothing, is the claim: the same operations, call time 1.00 and acquisition at most 1.02 times that of ``thunder.jit`` alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import thunder
import torch

from benchmarks import models, timing
from thunder_norm.transforms import NormTransform

PLAIN, OURS = "thunder.jit", "with NormTransform"
TRANSFORMS: dict[str, Callable[[], list]] = {PLAIN: list, OURS: lambda: [NormTransform()]}


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    mlp, x = models.mlp(12), torch.randn(16, 64)
    gpt2, ids = models.gpt2(options.gpt2_layers), models.tokens()
    thunder.jit(lambda x: x * 2)(x)  # Thunder itself is loaded and warm
    return [
        *_first_calls("MLP, 12 layers", mlp, (x,), options.first_calls),
        *_calls("MLP, 12 layers", mlp, (x,), lambda y: y.sum(), options.rounds),
        *_first_calls(f"GPT-2, {options.gpt2_layers} layers", gpt2, (ids,), options.first_calls_of_gpt2),
        *_calls(f"GPT-2, {options.gpt2_layers} layers", gpt2, (ids,), lambda y: y.logits.sum(), options.rounds),
    ]


def _first_calls(what: str, model: torch.nn.Module, args: tuple, rounds: int) -> list[dict[str, Any]]:
    """Acquisition (tracing alone, as Thunder's own statistics have it) and the whole first call."""
    whole: dict[str, list[float]] = {name: [] for name in TRANSFORMS}

    def first_call(name: str) -> float:
        jitted = thunder.jit(model, transforms=TRANSFORMS[name]())
        started = time.perf_counter()
        with torch.no_grad():
            jitted(*args)
        whole[name].append(time.perf_counter() - started)
        stats = thunder.compile_stats(jitted)
        return (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9

    measured = timing.once_in_turns({name: lambda name=name: first_call(name) for name in TRANSFORMS}, rounds)
    return [
        *timing.rows(f"{what}: acquisition", measured, PLAIN),
        *timing.rows(f"{what}: first call", timing.Measured(whole), PLAIN),
    ]


def _calls(
    what: str, model: torch.nn.Module, args: tuple, loss: Callable[[Any], torch.Tensor], rounds: int
) -> list[dict[str, Any]]:
    """Calls after the first, without and with a backward pass."""
    jitted = {name: thunder.jit(model, transforms=make()) for name, make in TRANSFORMS.items()}
    found = []
    with torch.no_grad():
        measured = timing.in_turns({name: lambda f=f: f(*args) for name, f in jitted.items()}, rounds)
        check_same_program(*(thunder.last_traces(f)[-1] for f in jitted.values()))
        found += timing.rows(f"{what}: forward", measured, PLAIN)
    both = timing.in_turns({name: lambda f=f: loss(f(*args)).backward() for name, f in jitted.items()}, rounds)
    model.zero_grad()
    return found + timing.rows(f"{what}: forward and backward", both, PLAIN)


def check_same_program(plain: Any, ours: Any) -> None:
    """The ratio is one between equal programs.

    Raises:
        AssertionError: they are not equal.
    """
    a, b = ([str(bsym) for bsym in trace.bound_symbols] for trace in (plain, ours))
    if a != b:
        raise AssertionError("the program with NormTransform differs from the one without")
