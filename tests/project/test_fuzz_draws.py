"""The random programs that draw numbers: that a draw too many, one too few and others in another order are found and shrunk."""

from __future__ import annotations

import random

import pytest
import torch

from tests.fuzz import draws
from tests.fuzz.draws import HOW, NESTS, Draws, draw
from tests.fuzz.program import shrunk
from tests.seeds import named_seed


def test_programs_are_different_and_under_all_transforms():
    numbers = random.Random(named_seed("draws"))
    drawn = [draw(numbers) for _ in range(200)]
    assert len({p.text() for p in drawn}) > 150 and {p.how for p in drawn} == set(HOW)
    assert {n.partition("(")[0] for p in drawn for n in p.nests} == {n.partition("(")[0] for n in NESTS.values()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "grad",
    [
        lambda f: lambda x: (torch.func.grad(f)(x), torch.rand(1))[0],
        lambda f: lambda x: torch.func.grad(lambda x: f(x) * 1)(x) if torch.initial_seed() != 3 else torch.zeros(4),
    ],
    ids=["a draw too many", "other results"],
)
def test_a_difference_is_found_and_shrunk(monkeypatch, grad):
    monkeypatch.setattr(draws.ours, "grad", grad)
    program = Draws(("x = x.sin()", "x = x * torch.randn(4)"), (NESTS["grad"], NESTS["vjp"]), "ours")
    outcome = program.run()
    assert outcome.kind == "wrong"
    smallest = shrunk(program, outcome)
    assert smallest.nests == (NESTS["grad"],) and len(smallest.statements) <= 1


@pytest.mark.filterwarnings("ignore")
def test_what_is_drawn_for_nobody_is_drawn():
    for how in HOW[1:]:
        program = Draws(("x = x + torch.randn(4)", "x = x * torch.randint(0, 9, (4,))"), (NESTS["jvp"], NESTS["grad"]), how)
        assert program.run().kind == "right"
    assert "torch.func" in program.source()
