"""The random programs in real mode: what their generator covers, and that what differs from eager mode is found and shrunk."""

from __future__ import annotations

import random

import pytest
import torch

from tests.fuzz import real
from tests.fuzz.program import shrunk
from tests.fuzz.real import FORMS, HOW, Real, draw
from tests.fuzz.real_contexts import CONTEXTS
from tests.fuzz.real_parts import PARTS
from tests.seeds import named_seed


def test_statements_are_different_and_drawn():
    assert len({p.name for p in PARTS}) > 10_000
    numbers = random.Random(named_seed("real"))
    drawn = [draw(numbers) for _ in range(200)]
    assert {p.how for p in drawn} == set(HOW) and {p.form for p in drawn} == set(FORMS)


@pytest.mark.filterwarnings("ignore")
def test_contexts_are_right_or_refused():
    part = next(p for p in CONTEXTS if "autocast" in p.text and "no_grad" not in p.text)
    outcome = Real((part,), "x, r", "leaf", ("a['x'] = a['x'].detach()",), "NormTransform").run()
    assert outcome.kind in ("right", "refused"), outcome.detail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda f, given: (f(**given), torch.rand(1))[0], "the state of the process"),
        (lambda f, given: f(**{**given, "y": given["y"].clone()}), "arguments"),
    ],
    ids=["random numbers", "a write"],
)
def test_a_difference_is_found_and_shrunk(monkeypatch, does, says):
    monkeypatch.setitem(real.HOW, "NormTransform", lambda f: lambda **given: does(f, given))
    writes, other = (real.Statement(t) for t in ("y.add_(1)", "r.append(x * 2)"))
    program = Real((writes, other), "x, r", "leaf", ("pass",), "NormTransform")
    outcome = program.run()
    assert outcome.kind == "wrong" and says in outcome.detail
    smallest = shrunk(program, outcome)
    assert len(smallest.statements) <= 1 and not smallest.changes
