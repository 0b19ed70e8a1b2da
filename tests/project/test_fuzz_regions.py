"""The random programs with regions: what they have in them, that other numbers and what is written twice are found, and some of them."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.program import run, shrunk
from tests.fuzz.regions import CALLS, DRAWING, STATEMENTS, TRANSFORMS, WRITING, Region, Regions, draw
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT, named_seed
from thunder_norm.checkpointing import replays
from thunder_norm.functions.registry import decomposed

SLICE = 8


def test_programs_have_everything_in_them() -> None:
    numbers = random.Random(named_seed("regions"))
    drawn = [draw(numbers) for _ in range(900)]
    assert len({p.text() for p in drawn}) > 600 and {p.transforms for p in drawn} == set(TRANSFORMS)
    used = {label for p in drawn for label in p.labels()}
    assert used == {*TRANSFORMS, *(" / ".join(s.splitlines()) for s in (*CALLS, *STATEMENTS, *DRAWING, *WRITING))}


@pytest.mark.filterwarnings("ignore")
def test_other_numbers_are_found_and_shrunk(monkeypatch) -> None:
    monkeypatch.setattr(replays, "decomposed", lambda bsym: None if bsym.sym.name == "dropout" else decomposed(bsym))
    dropped = "x = F.dropout(x, 0.4, self.training)"
    inner = Region(CALLS[1], (dropped, STATEMENTS[3]))
    program = Regions((STATEMENTS[0], Region(CALLS[0], (inner, STATEMENTS[2]))), "CheckpointTransform()", True, True)
    found = run(program)
    assert found.kind == "wrong"
    smallest = shrunk(program, found)
    assert len(smallest.body) == 1 and isinstance(smallest.body[0], Region) and smallest.body[0].body == (dropped,)
    assert "thunder.jit" in smallest.source()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int) -> None:
    result = run_job(Job("regions", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"
