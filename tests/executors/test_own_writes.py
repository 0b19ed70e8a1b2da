"""Writes into what a program has made itself, under the executor `inductor`: compiled with the rest, and what eager gives all the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.seeds import seeded
from thunder_norm import executors
from thunder_norm.transforms import NormTransform
import thunder


class OneByOne(TorchDispatchMode):
    """Under a mode that listens nothing is compiled, so that programs can be looked at in little time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def _jit(f: Any) -> Any:
    return thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])


def _names(jitted: Any) -> list[str]:
    return [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]


class _Block(nn.Module):
    """Convolutions, batch norms and activations that write in place, as in torchvision's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norms, self.relu = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2)), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norms[0](self.a(x)))
        y = self.norms[1](self.b(x))
        y += x
        return self.relu(y)


def test_activations_in_place_are_compiled_with_what_they_write_into():
    torch.manual_seed(seeded(0))
    model, x = _Block().eval(), torch.randn(2, 4, 8, 8)
    jitted = _jit(model)
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
        for _ in range(2):
            assert_close(jitted(x), model(x))
    assert [name for name in _names(jitted) if name.startswith(("inductor", "copy"))] == ["inductor0"]


# From two tensors to one: what makes a new one, what may share memory with the first, and writes into the first.
_NEW: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.sin(),
    lambda a, b: a + b,
    lambda a, b: (a.t() * 2).sin(),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: torch.zeros(4, 4),
    lambda a, b: torch.full((4, 4), 0.5, dtype=torch.float64),
    lambda a, b: a[:, [1, 0, 2, 3]],
]
_SHARING: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.to(torch.float32),
    lambda a, b: a.t(),
    lambda a, b: a.reshape(4, 4),
    lambda a, b: a[:, :],
]
_WRITES: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.mul_(0.5),
    lambda a, b: a.add_(b),
    lambda a, b: a.copy_(b.t()),
    lambda a, b: torch.relu_(a),
    lambda a, b: a.clamp_(-1, 1),
]


def _drawn(seed: int) -> Callable:
    """A program of drawn operations.  It writes into no tensor that has a view at the time, which is refused."""
    draw = random.Random(seeded(seed))
    steps, memory, seen = [], [0, 1, 2], set()
    for _ in range(14):
        kind = draw.choice([_NEW, _SHARING, _WRITES, _WRITES])
        i, j = draw.randrange(len(memory)), draw.randrange(len(memory))
        if kind is _WRITES and (memory[i] in seen or memory[i] == memory[j]):
            kind = _NEW
        if kind is _SHARING:
            seen.add(memory[i])
        memory.append(len(memory) if kind is _NEW else memory[i])
        steps.append((draw.choice(kind), i, j))
    returned = [draw.randrange(len(memory)) for _ in range(4)]

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values = [inputs[0].sin() + 1, *inputs]
        for f, i, j in steps:
            values.append(f(values[i], values[j]))
        return [values[i] for i in returned]

    return program


def _places(tensors: list[torch.Tensor]) -> list[tuple]:
    """Which tensors share memory, and how each lies in it."""
    first: dict[int, int] = {}
    return [
        (first.setdefault(t.untyped_storage().data_ptr(), n), t.storage_offset(), t.stride(), t.dtype)
        for n, t in enumerate(tensors)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_programs_that_write_give_eagers_values_and_memory(seed: int):
    torch.manual_seed(seeded(seed))
    program, inputs = _drawn(seed), [torch.randn(4, 4), torch.randn(4, 4).t()]
    jitted = _jit(program)
    for _ in range(2):
        mine, theirs = ([t.clone() for t in inputs] for _ in range(2))
        with OneByOne():
            found = jitted(*mine)
        expected = program(*theirs)
        assert_close([*found, *mine], [*expected, *theirs])
        assert _places([*found, *mine]) == _places([*expected, *theirs])


def _seen_through_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin().cos()
    row = y[0]
    y.mul_(2)
    return row, y + 1


def _what_may_be_the_argument(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.to(torch.float32)
    y.add_(1)
    return y.sin().cos(), x * 1


def _what_others_are_made_of_later(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin().exp()
    y.copy_(x)
    x.add_(1)
    return y.cos().sin(), y[0], y


@pytest.mark.parametrize("f", [_seen_through_a_view, _what_may_be_the_argument, _what_others_are_made_of_later])
def test_who_else_sees_a_write_sees_it_without_transforms_too(f: Callable):
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4)
    jitted = thunder.jit(f, executors=[executors.inductor])
    for given in (x, x.double()):
        mine, theirs = given.clone(), given.clone()
        with OneByOne():
            found = jitted(mine)
        expected = f(theirs)
        assert_close([*found, mine], [*expected, theirs])
        assert _places([*found, mine]) == _places([*expected, theirs])
