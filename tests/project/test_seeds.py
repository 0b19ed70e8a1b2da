"""One variable shifts every seed of the suite."""

from __future__ import annotations

import os
import re
import sys

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


def _run(seed: str, folder: str, printed: str) -> None:
    """In a process that has imported what takes seconds: tests/surroundings.py, and what it shifts before it is imported, are its own."""
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
    os.environ["THUNDER_NORM_SEED"] = seed
    for name in [n for n in sys.modules if n == "tests.seeds" or n.startswith("torch.testing._internal.opinfo")]:
        del sys.modules[name]
    os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", folder]))


@pytest.mark.slow
def test_the_variable_shifts_every_stream_and_each_value_repeats(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_draws.py").write_text(DRAWS)
    drawn = []
    for seed in ("0", "1", "1"):
        process = FORKS.Process(target=_run, args=(seed, str(tmp_path), str(tmp_path / "printed")))
        process.start()
        process.join()
        printed = (tmp_path / "printed").read_text()
        assert process.exitcode == 0, printed
        drawn += [line.split("DRAWN")[1].split() for line in printed.splitlines() if "DRAWN" in line]
    zero, one, again = drawn
    assert one == again
    assert len(one) == 6 and not set(zero) & set(one)


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
