"""Real mode: what a program on plain tensors pays for having NormTransform in its list.

Nothing, is the claim: the same operations, call time 1.00 and acquisition at most 1.02 times that of ``thunder.jit`` alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import thunder
import torch
from thunder.core import jit_ext

from benchmarks import models, timing
from thunder_norm.tracing import hooks
from thunder_norm.transforms import NormTransform

PLAIN, OURS = "thunder.jit", "with NormTransform"
TRANSFORMS: dict[str, Callable[[], list]] = {PLAIN: list, OURS: lambda: [NormTransform()]}


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    thunder.jit(lambda x: x * 2)(torch.randn(2))  # Thunder itself is loaded and warm
    gpt2 = models.gpt2(options.gpt2_layers)
    return [
        *_model(
            f"MLP, {options.mlp_layers} layers",
            models.mlp(options.mlp_layers),
            torch.randn(16, 64),
            torch.sum,
            options.first_calls,
            options.rounds,
        ),
        *_model(
            f"GPT-2, {options.gpt2_layers} layers",
            gpt2,
            models.tokens(),
            lambda y: y.logits.sum(),
            options.first_calls_of_gpt2,
            options.rounds,
        ),
    ]


@contextlib.contextmanager
def _thunder_as_it_is(name: str) -> Iterator[None]:
    """For the peer, Thunder without the two functions that our transforms put in place once one of them was made."""
    with contextlib.ExitStack() as stack:
        if name == PLAIN:
            stack.enter_context(mock.patch.object(jit_ext, "proxy", hooks._original_proxy))
            stack.enter_context(mock.patch.object(jit_ext, "general_jit_lookaside", hooks._original_lookaside))
        yield


def _model(
    what: str,
    model: torch.nn.Module,
    x: torch.Tensor,
    loss: Callable[[Any], torch.Tensor],
    first_calls: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """First calls, then calls without and with a backward pass."""
    jitted: dict[str, Any] = {}
    cpu: dict[str, list[float]] = {name: [] for name in TRANSFORMS}

    def first_call(name: str) -> float:
        f = jitted[name] = thunder.jit(model, transforms=TRANSFORMS[name]())
        started = time.process_time()
        with torch.no_grad(), _thunder_as_it_is(name):
            f(x)
        cpu[name].append(time.process_time() - started)
        stats = thunder.compile_stats(f)
        return (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9

    tracing = timing.once_in_turns({name: lambda name=name: first_call(name) for name in TRANSFORMS}, first_calls)
    check_same_program(*(thunder.last_traces(f)[-1] for f in jitted.values()))
    with torch.no_grad():
        forward = timing.in_turns({name: lambda f=f: f(x) for name, f in jitted.items()}, rounds)
    for name, f in jitted.items():
        with _thunder_as_it_is(name):
            f(x)  # traced again, now with a backward pass
    both = timing.in_turns({name: lambda f=f: loss(f(x)).backward() for name, f in jitted.items()}, rounds)
    model.zero_grad()
    return [
        *timing.rows(f"{what}: acquisition", tracing, PLAIN),
        *timing.rows(f"{what}: first call, CPU time", timing.Measured(cpu), PLAIN),
        *timing.rows(f"{what}: forward", forward, PLAIN),
        *timing.rows(f"{what}: forward and backward", both, PLAIN),
    ]


def check_same_program(plain: Any, ours: Any) -> None:
    """The ratio is one between equal programs.

    Raises:
        AssertionError: they are not equal.
    """
    a, b = ([str(bsym) for bsym in trace.bound_symbols] for trace in (plain, ours))
    if a != b:
        raise AssertionError("the program with NormTransform differs from the one without")
