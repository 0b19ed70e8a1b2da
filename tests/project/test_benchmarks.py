"""The benchmarks' page is what their results give, its text has no figures of its own, and the peer of real mode is without us."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import first_calls, other_sizes, page, real_mode
from benchmarks.parts import exchanged

TEXT = "".join(p.read_text() for p in page.PAGES)


def test_the_page_is_what_the_results_give():
    assert page.rendered(TEXT) == TEXT, "run `python -m benchmarks --tables`"


def test_every_result_is_on_the_page():
    shown = page.BEGIN.findall(TEXT)
    assert {path.stem for path in page.RESULTS.glob("*.json")} <= set(shown)
    assert len(set(shown)) == len(shown)


def test_times_and_ratios_are_in_generated_parts_only():
    by_hand = TEXT
    for begin in page.BEGIN.finditer(TEXT):
        by_hand = exchanged(by_hand, begin[0], "")
    assert re.findall(r"[\d.]+ ?(?:ms|us|s|x(?! \d)|%|GiB|MiB|GFLOPs|MFLOPs)\b", by_hand) == []


def test_results_say_what_they_were_measured_on():
    for path in page.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["command"].startswith("python -m benchmarks") and "/" not in result["command"]
        assert {"commit", "cpu", "torch", "lightning-thunder", "load_average"} <= set(result["machine"])
        assert all(row["rounds"] >= 1 and row["median_us"] > 0 for row in result["rows"])


# -- what is measured in processes: here in forks of one, which import Thunder no more ----------------------------------------------


@pytest.mark.usefixtures("without_imports")
def test_real_mode_is_measured_against_a_process_without_us():
    with real_mode.pair("mlp", 1) as workers:
        plain, ours = workers[real_mode.PLAIN], workers[real_mode.OURS]
        assert plain.ask("imported") == [] and "thunder_norm.transforms" in ours.ask("imported")
        first = plain.ask("first_call")
        assert set(first) == set(ours.ask("first_call")) and first["acquisition"] > 0
        real_mode.check_same_program(plain.ask("program"), ours.ask("program"))
        measured = real_mode.calls(workers, "forward and backward", 2)
        assert {name: len(rounds) for name, rounds in measured.rounds.items()} == {real_mode.PLAIN: 2, real_mode.OURS: 2}
        assert plain.ask("imported") == []


@pytest.mark.usefixtures("without_imports")
@pytest.mark.parametrize("candidate", ["real mode", "torch.compile(aot_eager)"])
def test_first_calls_are_measured_in_processes_of_their_own(candidate):
    answer = first_calls.first_call(candidate, "ResNet-18")
    assert answer["seconds"] > (answer["acquisition"] or 0) >= 0
    assert (answer["acquisition"] is None) == candidate.startswith("torch.compile")


@pytest.mark.usefixtures("without_imports")
def test_another_batch_size_is_a_call_with_an_acquisition_of_its_own():
    answer = other_sizes.calls(f"{other_sizes.CASES[0]}, normed mode, with gradients")
    assert list(answer) == [other_sizes.FIRST, other_sizes.OTHER]
    assert all(measured["seconds"] > measured["acquisition"] > 0 for measured in answer.values())
