"""The random models that know what their parameters are: what is in them, that a fault in each of the things checked is found, and some of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz.optimizers import CHECKS, Trained, draw
from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT, named_seed
from thunder_norm.modular import ModularNorm, leaves, optimizer, qk_clip
from thunder_norm.modular.following import entries
from thunder_norm.modular.monitoring import monitor

SLICE = 12


def test_programs_are_different_and_have_every_check_and_part_in_them():
    numbers = random.Random(named_seed("optimizers"))
    drawn = [draw(numbers) for _ in range(400)]
    assert len({p.text() for p in drawn}) > 380 and {p.check for p in drawn} == set(CHECKS)
    labels = {label.partition(",")[0].partition(":")[0] for p in drawn for label in p.labels()}
    assert {
        "attention",
        "gated",
        "experts",
        "convolution",
        "plain",
        "modulated",
        "mixed",
        "selective",
        "head",
        "tied",
        "tokens",
    } <= labels


def of(check: str, has: str, number: int = 0) -> Trained:
    """The first program that has a part, with this check, and is right."""
    for i in range(number, number + 200):
        program = replace(draw(random.Random(named_seed(f"optimizers {i}"))), check=check)
        if any(has in label for label in program.labels()) and len(program.parts) > 3 and run(program).kind == "right":
            return program
    raise AssertionError(f"there is none with {has}")


def _wrapped(owner: Any, name: str, around: Callable) -> tuple[Any, str, Any]:
    return owner, name, around(getattr(owner, name))


FAULTS = {
    "roles": ("gated, halves", lambda: _wrapped(entries, "_as_factors", lambda f: lambda notes, call, states: [call.name] * len(states))),
    "groups": ("gated, halves", lambda: _wrapped(leaves._HandsOn, "_hand_on", lambda f: lambda self, grad: f(self, grad.flip(0)))),
    "bound": ("plain", lambda: _wrapped(ModularNorm, "_target", lambda f: lambda self, name: 100 * f(self, name))),
    "steps": ("gated", lambda: _wrapped(optimizer, "steepest_batch", lambda f: lambda *a: [1.01 * t for t in f(*a)])),
    "saved": ("plain", lambda: _wrapped(optimizer, "restore_momentum", lambda f: lambda state, saved, p: state.pop("momentum_buffer", None))),
    "inexact": ("plain", lambda: _wrapped(optimizer, "steepest_batch", lambda f: lambda *a: [1.05 * t for t in f(*a)])),
    "clip": ("attention, blocks, plain", lambda: _wrapped(qk_clip, "_multiply", lambda f: lambda p, factors, made: f(p, {e: x**1.1 for e, x in factors.items()}, made))),
    "monitor": ("plain", lambda: _wrapped(monitor, "norm_of", lambda f: lambda spec, t: f(spec, t) + 0 * torch.rand(()).item())),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, check: str):
    assert FAULTS.keys() == CHECKS.keys()
    has, planted = FAULTS[check]
    candidates = [of(check, has, 200 * i) for i in range(5)]  # of those in which the fault shows, the first
    monkeypatch.setattr(*planted())
    program, found = next((p, found) for p in candidates if (found := run(p)).kind == "wrong")
    smallest = shrunk(program, found, most=12)
    assert len(smallest.parts) < len(program.parts) and "find_roles" in smallest.source()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("optimizers", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"
