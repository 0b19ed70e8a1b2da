"""The generator of programs that write into wrappers: a slice of them, and that a write which is lost is found and shrunk."""

from __future__ import annotations

import pytest

from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.fuzz.wrapper_writes import Written
from tests.seeds import SHIFT
from thunder_norm.subclass.recording.writing import Writing

SLICE = 24


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("wrapper_writes", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused"), f"{result.detail}\n{result.source}"


@pytest.mark.filterwarnings("ignore")
def test_a_write_that_is_lost_is_found_and_shrunk(monkeypatch):
    inputs = (("x0", "TwoTensor(r(), r())"), ("x1", "TwoTensor(x0.b, r())"))
    program = Written(inputs, ("v0 = x1 * 2", "v1 = x0[0]", "x0.mul_(2.0)", "v2 = v1 * x1[0]"), ("v0", "v2"), False, 0)
    assert run(program).kind == "right"
    monkeypatch.setattr(Writing, "_renew", lambda self, aliases, target: None)
    found = run(program)
    assert found.kind == "wrong"
    small = shrunk(program, found)
    assert len(small.statements) < len(program.statements)
    assert any("mul_" in s for s in small.statements)
