"""The generator of programs with drawn wrapper classes: a slice of them, that classes are as they say, and that what is lost is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.fuzz import made_classes
from tests.fuzz.made_wrappers import MadeProgram
from tests.fuzz.program import run
from tests.fuzz.runner import Job, run_job
from tests.fuzz.wrappers import Input, Statement
from tests.seeds import SHIFT, seeded
from thunder_norm.subclass.backward import users_attributes

SLICE = 24


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int):
    result = run_job(Job("made_wrappers", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused"), f"{result.detail}\n{result.source}"


@pytest.mark.parametrize("storage", made_classes.STORAGE)
def test_what_a_class_stands_for_is_what_it_was_made_of(storage: str):
    for n in range(200):
        form = made_classes.drawn(random.Random(seeded(n)))  # noqa: S311 - no secret
        if form.storage == storage:
            break
    else:
        raise AssertionError("no class keeps its tensor so")
    names: dict[str, Any] = {"__name__": __name__}
    exec(made_classes.HEADER + form.text(), names)  # noqa: S102 - a class of ours
    x = torch.tensor([[0.5, -1.0, 1.5, 0.0], [1.0, 0.25, -0.5, 1.25]], dtype=torch.float64)  # which all storages can hold
    made = names["Made"].of(x)
    assert made.shape == x.shape and made.dtype == x.dtype
    torch.testing.assert_close(made.plain(), x)


@pytest.mark.filterwarnings("ignore")
def test_what_a_class_leaves_out_and_is_lost_is_found(monkeypatch):
    form = made_classes.Form("same", (), "none", "map", "plain", "inner", "none", False, True, "no", False, False)
    given = Input("x0", "Made.of(torch.randn(4, 4, dtype=torch.float64), notes=Notes(names=('x', 'y')))", False)
    statement = Statement("v0", "x0 * len(x0.notes.names)", "members")
    program = MadeProgram((given,), (statement,), "v0", 0, 1.0, form, "size")
    assert run(program).kind == "right"
    monkeypatch.setattr(users_attributes, "take_over", lambda acquisition, fake, real, history: None)
    monkeypatch.setattr(users_attributes, "of_user", lambda acquisition, obj, name: None)
    assert run(program).kind == "wrong"
