"""The random programs whose bounds an adversary searches: some of them, and that a bound that is too small is found and shrunk."""

from __future__ import annotations

import pytest

from tests.fuzz.bounds import Bounded
from tests.fuzz.program import run, shrunk
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT
from thunder_norm.rules import _facts
from thunder_norm.rules.movement import movements_of_products

SLICE = 25


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("bounds", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"


@pytest.mark.parametrize(
    ("owner", "name", "broken", "scope", "dims", "factor"),
    [
        (_facts, "_converted_by", lambda x, prepared: 1.0, "global", (-3,), "x.softmax(-3)"),
        (movements_of_products, "is_fixed", lambda x: True, "composed", (-1,), "F.relu(x)"),
    ],
    ids=["a conversion is left out", "what does not move is one tensor"],
)
def test_a_bound_that_is_too_small_is_found_and_shrunk(monkeypatch, owner, name, broken, scope, dims, factor):
    values = movements_of_products.values
    program = Bounded(("x = x * 0.7", f"x = {factor} * z"), (2, 1, 4), "RMSTensor", dims, (1.0, 1.0), scope, 0)
    assert run(program).kind == "right"
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(movements_of_products, "values", lambda t: values(getattr(t, "backing", t)))
    found = run(program)
    assert found.kind == "wrong", found
    assert len(shrunk(program, found).statements) == 1
