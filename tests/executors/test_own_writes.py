"""Writes into what a program has made itself, under the executor `inductor`: compiled with the rest, and what eager gives all the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.executors.test_calls import OneByOne, jit
from tests.seeds import crossed, seeded
from thunder_norm import executors
from thunder_norm.errors import TransformError
import thunder


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
    jitted = jit(model)
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
    jitted = jit(program)
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


def _a_row(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    row = y[0]
    row.add_(1)
    return y, row


def _a_part_of_a_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    part = y.t()[1:]
    row = part[0]
    row.copy_(x[:, 0])
    before = part * 1
    part.mul_(2)
    return y, part, row, before


def _all_of_a_transpose(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin().t()
    y.copy_(x)
    return y, y[0]


def _a_row_after_the_whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.zeros(4, 4)
    row = y[1]
    row.copy_(x[0])
    y.mul_(2)
    return row, y, row + 1


def _items(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 1
    flat = y.view(-1)
    flat[3] = 7.0
    y[0] = flat[:4] * 2
    return y, flat


def _a_loop(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, states = x.clone(), torch.zeros(4, 4)
    for i in range(1, 4):
        y[i] = y[i - 1].sin()
        states[:, i].copy_(y[i] + x[:, i])
    return y, states


@pytest.mark.parametrize("f", [_a_row, _a_part_of_a_part, _all_of_a_transpose, _a_row_after_the_whole, _items, _a_loop])
def test_writes_into_parts_are_compiled_with_the_rest_where_nobody_differentiates(f: Callable):
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4, requires_grad=True)
    jitted = jit(f)
    with torch.no_grad():
        for _ in range(2):
            with OneByOne():
                found = jitted(x)
            expected = f(x)
            assert_close(found, expected)
            assert _places([*found, x]) == _places([*expected, x])
    names = _names(jitted)
    assert "inductor0" in names and not {"copy_", "update_aliases", "inductor1"} & set(names), names


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda t: t[1:],
    "row": lambda t: t[0],
    "adjoint": lambda t: t.adjoint(),
    "moveaxis": lambda t: torch.moveaxis(t, 0, 1),
    "movedim": lambda t: t.movedim(0, 1),
    "ravel": lambda t: t.ravel(),
    "reshape_as": lambda t: t.reshape_as(torch.empty(2, 8)),
    "view_as": lambda t: t.view_as(torch.empty(2, 8)),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, torch.empty(4))[0],
    "split_with_sizes": lambda t: t.split([1, 3])[1],
    "hsplit": lambda t: t.hsplit(2)[1],
    "vsplit": lambda t: torch.vsplit(t, 2)[0],
    "dsplit": lambda t: t.view(2, 2, 4).dsplit(2)[0],
    "positive": lambda t: torch.positive(t),
    "float": lambda t: t.float(),
    "type_as": lambda t: t.type_as(torch.empty(1)),
    "data": lambda t: t.data,
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "squeeze": lambda t: t[None].squeeze(0),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "conj": lambda t: t.conj(),
    "real": lambda t: t.real,
}


@pytest.mark.parametrize(
    ("of", "view", "is_differentiated"),
    [
        (of, view, is_differentiated)
        for of, several in (("argument", [False, True]), ("result", [True, False]))
        for view, is_differentiated in crossed(VIEWS, several)
    ],
)
def test_writes_into_what_a_view_gives_are_seen(of: str, view: str, is_differentiated: bool):
    """Of an argument, and of what the program has made: whether it is written by another name is read off the operation."""

    def f(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        y = buffer if of == "argument" else (x.detach() + buffer).sin()
        y.data[...] = -2.0
        VIEWS[view](y).sub_(1.5)
        return x * y.cos()

    torch.manual_seed(seeded(0))
    x, jitted = torch.randn(4, 4, requires_grad=is_differentiated), thunder.jit(f, executors=[executors.inductor])
    mine, theirs = torch.ones(4, 4), torch.ones(4, 4)
    try:
        with OneByOne():
            found = jitted(x, mine)
    except TransformError as e:
        assert of == "result" and is_differentiated and "may share memory" in str(e)
        return
    assert_close([found, mine], [f(x, theirs), theirs])
