"""One variable shifts every seed of the suite."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import ROOT

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


# What takes seconds to import is imported once; conftest.py, and what it shifts before it is imported, by each run of its own.
RUNS = """
import os, sys
import hypothesis, numpy, pytest, thunder_norm, thunder, torch
from torch.testing._internal import common_utils

for seed in ("0", "1", "1"):
    if not (child := os.fork()):
        os.environ["THUNDER_NORM_SEED"] = seed
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
def test_the_variable_shifts_every_stream_and_each_value_repeats(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_draws.py").write_text(DRAWS)
    command = [sys.executable, "-c", RUNS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    zero, one, again = (line.split("DRAWN")[1].split() for line in run.stdout.splitlines() if "DRAWN" in line)
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
