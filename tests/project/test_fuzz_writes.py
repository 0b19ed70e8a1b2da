"""The random programs that write into what they read: some of them, and that a write that is lost is found and shrunk."""

from __future__ import annotations

import pytest

from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.fuzz.writes import NAMES, TARGETS, USES, WRITES, Writing
from tests.seeds import SHIFT
from thunder_norm.subclass.acquiring.writes import Writes
from thunder_norm.tracing.shared_memory import aliases

SLICE = 40


def test_every_statement_can_be_run_or_is_an_error_of_eager_mode():
    writes = [w.format(t=t, k=0.5) for w in WRITES for t in dict.fromkeys(TARGETS)]
    outcomes = [Writing((s, "x = x @ self.w"), False, False, "eager", 0).run().kind for s in (*USES, *NAMES, *writes)]
    assert outcomes.count("right") > len(outcomes) // 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("writes", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("owner", "name", "lost", "program"),
    [
        (
            aliases,
            "with_last_writes",
            lambda trace: trace,
            Writing(
                (
                    "v = c * 2",
                    "y = self.r * self.w",
                    "self.w[1:].copy_(self.r.sum() * -2.0)",
                    "self.r.fill_(-2.0)",
                    "self.w.view(-1)[:1].mul_(3.0)",
                ),
                False,
                False,
                "real, with gradients",
                0,
            ),
        ),
        (
            Writes,
            "into",
            lambda self, t: 0,
            Writing(("x = x @ self.w", "x = x + self.b", "self.w.mul_(10.0)", "x = x @ self.w"), False, False, "normed", 0),
        ),
    ],
    ids=["into a view", "measured before"],
)
def test_a_write_that_is_lost_is_found_and_shrunk(monkeypatch, owner, name, lost, program):
    assert run(program).kind == "right"
    monkeypatch.setattr(owner, name, lost)
    found = run(program)
    assert found.kind == "wrong"
    small = shrunk(program, found)
    assert len(small.statements) < len(program.statements)
    assert any("mul_" in s for s in small.statements)
