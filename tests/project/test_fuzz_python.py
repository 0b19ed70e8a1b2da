"""The structured programs of Python: what they have in them, that faults are found and shrunk, and some of them."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fuzz.program import run, shrunk
from tests.fuzz.python import Structured, arguments, called, draw, executed
from tests.fuzz.python_comparison import Difference, differing
from tests.fuzz.python_definitions import CHANGES, DEFINITIONS
from tests.fuzz.python_statements import COMPOUND, OF_GENERATORS, OF_LOOPS, SIMPLE
from tests.fuzz.runner import Job, run_job
from tests.seeds import SHIFT, named_seed
from thunder_norm.tracing.python import raised

SLICE = 8
TEXT = """\
def f(x, y, n, k, s, l, d, o):
    global r
    r = []
    for n in range(2):
        with Ctx(s):
            r.append(x * n)
    try:
        try:
            raise KeyError(1)
        finally:
            l[9]
    except Exception as e:
        r.append(e.__context__ is None)
    for n in range(2):
        d['a'] = n
    return r, n, x, l, d
"""


def test_programs_have_everything_in_them() -> None:
    numbers = random.Random(named_seed("python"))
    drawn = [draw(numbers) for _ in range(300)]
    assert len({p.text for p in drawn}) == 300
    assert {c for p in drawn for c in p.changes} == set(CHANGES)
    used = {label for p in drawn for label in p.labels()}
    first_lines = {t.split("\n")[0] for t in (*SIMPLE, *COMPOUND, *OF_LOOPS, *OF_GENERATORS)}
    assert len(first_lines & used) > 0.9 * len(first_lines)
    assert {d.name for d in DEFINITIONS} <= used


def test_most_programs_run_to_their_end() -> None:
    numbers = random.Random(named_seed("python"))
    errors = 0
    for _ in range(60):
        scope = executed(draw(numbers).text)
        errors += called(scope["f"], arguments(scope["Box"])).error is not None
    assert errors < 45


def test_a_program_is_that_of_its_number() -> None:
    programs = [Job("python", 5, 17).program() for _ in range(2)]
    assert programs[0] == programs[1] != Job("python", 5, 18).program()


@pytest.mark.filterwarnings("ignore")
def test_contexts_that_are_lost_are_found_and_shrunk(monkeypatch) -> None:
    program = Structured(TEXT, ("a['n'] += 1", "G = 5"))
    assert run(program).kind == "right"
    monkeypatch.setattr(raised, "_put_into_context", lambda e, outer: None)
    found = run(program)
    assert found.kind == "wrong" and "[0][0][" in found.detail
    smallest = shrunk(program, found)
    assert isinstance(smallest, Structured) and smallest.changes == ("pass", "pass")
    assert "__context__" in smallest.text and "Ctx" not in smallest.text and "d['a']" not in smallest.text
    assert "thunder.jit" in smallest.source()


@pytest.mark.parametrize(
    "found, expected",
    [
        (1, True),
        ([1, 2], (1, 2)),
        ([1.0], [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2) * 2),
        ({1, 2}, {1, 3}),
        (ValueError(1), ValueError(2)),
        (ValueError(1), KeyError(1)),
        (lambda a=1: a, lambda a=2: a),
        ((v := [1], v), ([1], [1])),
        (([1], [1]), (v := [1], v)),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ],
)
def test_what_differs_is_seen(found: Any, expected: Any) -> None:
    with pytest.raises(Difference):
        differing(found, expected)
    differing(found, found)
    differing(copy.deepcopy(expected), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(SLICE))
def test_a_slice_of_the_programs(index: int) -> None:
    result = run_job(Job("python", SHIFT, index), shrink=False)
    assert result.kind in ("right", "refused", "no oracle"), f"{result.detail}\n{result.source}"
