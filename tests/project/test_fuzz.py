"""The tester of random programs: what it finds, shrinks and counts; and a slice of each of its subjects."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fuzz.planted import WORDS, Sentence
from tests.fuzz.program import Outcome, beside_compile, run, shrunk
from tests.fuzz.results import together
from tests.fuzz.runner import Job, of_ranges, run_job, run_many

KIND_OF = {"right": "right", "wrong": "wrong", "raises": "error", "refused": "refused", "unknown": "no oracle"}


@pytest.mark.parametrize("word, kind", KIND_OF.items())
def test_an_outcome_is_what_the_program_came_to(word: str, kind: str):
    assert run(Sentence(("right", word))).kind == kind


@pytest.mark.parametrize("word", ["wrong", "raises"])
def test_what_is_wrong_is_shrunk_to_what_is_needed(word: str):
    program = Sentence(("right", "right", word, "right"))
    seen = []
    assert shrunk(program, run(program), lambda smaller, _: seen.append(smaller.source())) == Sentence((word,))
    assert seen[-1] == word and len(seen) == 3


def test_an_error_is_not_shrunk_to_another():
    found = Outcome("error", "AttributeError: 'NoneType' object has no attribute 'shape'")
    assert found.is_like(Outcome("error", "AttributeError: x"))
    assert not found.is_like(Outcome("error", "TypeError: x"))
    assert not found.is_like(Outcome("refused", "AttributeError: x"))


def word_of(index: int) -> str:
    return next((w for w in Job("planted", 0, index).program().words if w != "right"), "right")


def index_of(word: str) -> int:
    return next(i for i in range(1000) if word_of(i) == word)


def test_a_refusal_says_whether_torch_compiles_the_program():
    found = Outcome("refused", "UnsupportedOpError: sizes")

    def runs_as_eager(f):
        return lambda jit: torch.equal(jit(f)(torch.arange(3.0)), f(torch.arange(3.0)))

    assert beside_compile(found, runs_as_eager(lambda x: x * 2)).detail == "torch.compile runs it: UnsupportedOpError: sizes"
    assert beside_compile(found, runs_as_eager(lambda x: torch._dynamo.graph_break() or x)) == found
    assert beside_compile(found, lambda jit: False) == found
    assert beside_compile(Outcome("right"), lambda jit: True) == Outcome("right")


def test_programs_are_run_in_processes_and_counted():
    shown: list[str] = []
    indices = [i for i in range(60) if word_of(i) in KIND_OF]
    report = run_many("planted", indices, jobs=2, show=shown.append)
    expected = {kind: sum(KIND_OF[word_of(i)] == kind for i in indices) for kind in KIND_OF.values()}
    assert report.counts == expected and all(expected.values())
    assert [r.index for r in report.results] == indices
    assert {r.source for r in report.bad} == {"wrong", "raises"}
    assert "refused" in report.table() and "TransformError: not this one" in report.refusals
    assert json.loads(json.dumps(report.as_json()))["programs"] == len(indices)
    assert sum("wrong: 1 is not 2" in line for line in shown) == expected["wrong"]


def test_a_program_without_end_is_an_error():
    (result,) = run_many("planted", [index_of("endless")], jobs=1, limit=0.5, show=lambda _: None).results
    assert (result.kind, result.detail) == ("error", "time: no result within 0.5 s")


def test_a_program_that_ends_its_process_is_an_error():
    first, last = run_many("planted", [index_of("dies"), index_of("right")], jobs=1, show=lambda _: None).results
    by_word = {word_of(r.index): r for r in (first, last)}
    assert (by_word["dies"].kind, by_word["dies"].detail) == ("error", "the process died")
    assert by_word["right"].kind == "right"


def test_a_program_is_drawn_again_from_its_number():
    assert run_job(Job("planted", 3, 5)).source == run_job(Job("planted", 3, 5)).source
    assert len({Job("planted", 0, i).program() for i in range(50)}) > 20
    assert {word_of(i) for i in range(200)} == set(WORDS)


def test_results_of_two_runs_together():
    def of(indices: str, found: list[int]) -> dict:
        number = len(of_ranges(indices))
        return {
            "subject": "derivatives",
            "seed": 0,
            "indices": indices,
            "programs": number,
            "seconds": 1,
            "counts": {"right": number - len(found), "wrong": len(found), "error": 0, "refused": 0, "no oracle": 0},
            "operations": {"sin": {"right": number - len(found), "wrong": len(found)}},
            "refusals": {},
            "found": [{"index": i, "kind": "wrong", "detail": "", "source": "", "labels": ["sin"]} for i in found],
        }

    both = together(of("0-9", [3, 4]), of("20-24,30", []))
    assert (both["programs"], both["indices"], both["counts"]["wrong"]) == (16, "0-9,20-24,30", 2)
    mended = together(both, of("3-4", [4]))
    assert (mended["programs"], mended["counts"]["right"], mended["counts"]["wrong"]) == (16, 15, 1)
    assert mended["operations"] == {"sin": {"right": 15, "wrong": 1}} and [f["index"] for f in mended["found"]] == [4]
    with pytest.raises(ValueError, match="5"):
        together(both, of("5-6", []))
