"""One variable shifts every seed of the suite, and a whole run has a part of its cases."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.forks import FORKS

TESTS = ROOT / "tests"
SEEDS = re.compile(r"manual_seed\(|random\.Random\(|default_rng\(|\bRandomState\(")
SHIFTED = re.compile(r"seeded\(|named_seed\(|\{seed\}")
DRAWS = """
import hypothesis, numpy, random, torch
from hypothesis import strategies as st
from torch.testing._internal.opinfo.definitions.fft import op_db

AT_IMPORT = torch.rand(()).item()
seen = []

@hypothesis.given(st.integers(0, 10**9))
def test_hypothesis(n):
    seen.append(n)

def test_draws(capsys):
    sample = next(iter(op_db[0].sample_inputs("cpu", torch.float64))).input.sum().item()
    with capsys.disabled():
        print("DRAWN", AT_IMPORT, torch.rand(()).item(), random.random(), numpy.random.rand(), sample, sum(seen))
"""


def _run(variables: dict[str, str], folder: str, printed: str, *arguments: str) -> None:
    """In a process that has imported what takes seconds: tests/surroundings.py, and what it shifts before it is imported, are its own."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
    os.environ.update(variables)
    os.chdir(folder)
    for name in [n for n in sys.modules if n == "tests.seeds" or n.startswith("torch.testing._internal.opinfo")]:
        del sys.modules[name]
    os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]))


@pytest.mark.slow
def test_the_variable_shifts_every_stream_and_each_value_repeats(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_draws.py").write_text(DRAWS)
    zero, one, again = (_printed(tmp_path, {"THUNDER_NORM_SEED": seed}) for seed in ("0", "1", "1"))
    assert one == again
    (zero,), (one,) = zero, one
    assert len(one) == 6 and not set(zero) & set(one)


def _printed(folder: Path, variables: dict[str, str], *arguments: str) -> list[list[str]]:
    """What the tests of a folder print after DRAWN."""
    process = FORKS.Process(target=_run, args=(variables, str(folder), str(folder / "printed"), *arguments))
    process.start()
    process.join()
    printed = (folder / "printed").read_text()
    assert process.exitcode == 0, printed
    return [line.split("DRAWN")[1].split() for line in printed.splitlines() if "DRAWN" in line]


MANY = """
import pytest

@pytest.mark.parametrize("n", range(100))
def test_many(n, capsys):
    with capsys.disabled():
        print("DRAWN", "many", n)

@pytest.mark.parametrize("n", range(3))
def test_few(n, capsys):
    with capsys.disabled():
        print("DRAWN", "few", n)
"""


@pytest.mark.slow
def test_a_whole_run_has_a_part_of_many_cases_and_all_of_few(tmp_path):
    """Another part with another seed; all where a file or a part is named, or nothing is left out."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers =\n    drawn: none is left out")
    (tmp_path / "test_draws.py").write_text(MANY)
    short = {"THUNDER_NORM_LONG": "0", "THUNDER_NORM_SEED": "0", "THUNDER_NORM_PART": ""}
    others = {"THUNDER_NORM_SEED": "1"}, {"THUNDER_NORM_LONG": "1"}, {"THUNDER_NORM_PART": "0/1"}
    ways = [(short, ()), *((short | other, ()) for other in others), (short, ("test_draws.py",))]
    parts = [_printed(tmp_path, variables, *arguments) for variables, arguments in ways]
    many = [{n for name, n in found if name == "many"} for found in parts]
    assert [len(found) for found in many] == [20, 20, 100, 100, 100] and many[0] != many[1]
    assert all(sum(name == "few" for name, _ in found) == 3 for found in parts)


def test_no_test_has_a_seed_that_is_not_shifted():
    """But for random programs, which hold their seeds to be pasted: they are drawn from one that is."""
    found = [
        f"{path.relative_to(TESTS)}:{n}: {line.strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name not in ("test_seeds.py", "seeds.py") and path.parent.name != "fuzz"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if SEEDS.search(line) and not SHIFTED.search(line)
    ]
    assert not found, "use tests.seeds.seeded: " + "\n".join(found)
