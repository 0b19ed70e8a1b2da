"""The random programs that change between calls: what their generator covers, that a missing guard is found and shrunk, and some of them."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.changes import PARTS, Changing
from tests.fuzz.changing_lookups import LOOKUPS
from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.seeds import LONG, SHIFT, crossed, named_seed
from thunder_norm.tracing.guarding import guards

SLICE = 6
DRAWN = PARTS if LONG else random.Random(named_seed("changes")).sample(PARTS, 45)


def all_changes(part) -> tuple[str, ...]:
    return tuple(change.replace("{n}", "0") for change in part.changes)


def test_parts_have_names_of_their_own_and_change():
    assert len({p.name for p in PARTS}) == len(PARTS)
    assert all(p.changes for p in PARTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", DRAWN, ids=lambda p: p.name)
def test_what_a_program_reads_may_change(part):
    changes = all_changes(part)
    outcome = Changing((part,), (*changes, *changes), "NormTransform()").run()
    assert outcome.kind in ("right", "refused"), outcome.detail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "transform"), crossed(LOOKUPS, ["NormTransform()", "SubclassTransform()"]), ids=lambda v: getattr(v, "name", v)
)
def test_every_way_of_looking_up_is_guarded(part, transform):
    outcome = Changing((part,), all_changes(part), transform).run()
    assert outcome.kind == "right", outcome.detail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("changes", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused"), f"{result.detail}\n{result.source}"


@pytest.mark.filterwarnings("ignore")
def test_a_missing_guard_is_found_and_shrunk(monkeypatch):
    monkeypatch.setattr(guards, "note", lambda *_: None)
    part = next(p for p in PARTS if p.name == "a set, in place")
    other = next(p for p in PARTS if p.name == "a float")
    changes = ("m.a1 = 3.0", "m.a0.add(3)", "m.a1 = 2")
    program = Changing((part, other), changes, "SubclassTransform()")
    found = run(program)
    assert found.kind == "wrong"
    small = shrunk(program, found)
    assert small.changes == ("m.a0.add(3)",)
    assert [name for name in small.labels() if name != "nothing"] == [part.name]
    assert "m.a0.add(3)" in small.source()
