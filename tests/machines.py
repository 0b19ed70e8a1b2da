"""``python -m tests.machines``: the tests as other machines run them, and with other seeds.

A processor changes how sums are grouped and which kernels run, and with it the last bits of every result; a seed changes every number
drawn.  No verdict may hang on either.  Each row below is one run of pytest, in processes of its own, with another value of
THUNDER_NORM_SEED, another set of instructions for torch's own kernels (ATEN_CPU_CAPABILITY), for MKL (MKL_ENABLE_INSTRUCTIONS) and for
oneDNN (ONEDNN_MAX_CPU_ISA), and one or two threads.  MKL heeds MKL_ENABLE_INSTRUCTIONS on processors of Intel alone, so that rows with
SSE4_2 ask for MKL_CBWR=COMPATIBLE as well, which it follows everywhere.  What torch.compile made for other instructions is no use to a
run (its cache does not ask), so that each has a cache of its own.

    python -m tests.machines                                     # the whole suite, ten times: hours
    python -m tests.machines tests/rules/test_*.py               # arguments are pytest's
    python -m tests.machines --only 3,7 --seed 100 -- -k losses  # two of the rows, seeds from 100
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

_UNSET = ""


@dataclass(frozen=True)
class Machine:
    """What a run pretends: "" leaves the choice to the machine."""

    aten: str
    mkl: str
    onednn: str
    threads: int

    @property
    def variables(self) -> dict[str, str]:
        """The environment that makes it so."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "MKL_CBWR": "COMPATIBLE" if self.mkl == "SSE4_2" else _UNSET,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "THUNDER_NORM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take hours on cores which others use too
        }


MACHINES = (
    Machine(_UNSET, _UNSET, _UNSET, 1),
    Machine("default", "SSE4_2", "SSE41", 1),
    Machine("avx2", "AVX2", "AVX2", 2),
    Machine("default", "AVX2", _UNSET, 2),
    Machine("avx2", "SSE4_2", _UNSET, 1),
    Machine(_UNSET, "SSE4_2", "AVX2", 2),
    Machine(_UNSET, "AVX2", "SSE41", 1),
    Machine("default", _UNSET, "AVX2", 1),
    Machine("avx2", _UNSET, "SSE41", 2),
    Machine("default", "SSE4_2", _UNSET, 2),
)


@dataclass(frozen=True)
class Result:
    """One run of pytest."""

    seed: int
    machine: Machine
    status: int
    counts: dict[str, int]
    failed: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == 0


def run(machine: Machine, seed: int, arguments: Sequence[str]) -> Result:
    """The tests on that machine with that seed."""
    environment = {"THUNDER_NORM_PART": "0/1", **os.environ, **machine.variables, "THUNDER_NORM_SEED": str(seed)}
    environment = {name: value for name, value in environment.items() if value}
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryDirectory() as cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
    counts, failed = outcome(done.stdout)
    return Result(seed, machine, done.returncode, counts, failed, time.monotonic() - begin)


def outcome(printed: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """How many tests passed, failed, ..., and the names of those that did not pass, from what pytest prints with ``-q -rfE``."""
    lines = printed.splitlines()
    failed = tuple(m[1] for line in lines if (m := re.match(r"(?:FAILED|ERROR) (.*?)(?: - |$)", line)))
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error).* in ", line)), "")
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", summary)}, failed


def table(results: Sequence[Result]) -> str:
    """A row a run."""
    head = f"{'seed':>6}  {'ATen':<8} {'MKL':<7} {'oneDNN':<7} {'threads':>7}  {'verdict':<7} {'passed':>7} {'failed':>7} {'minutes':>8}"
    rows = [
        f"{r.seed:>6}  {r.machine.aten or '-':<8} {r.machine.mkl or '-':<7} {r.machine.onednn or '-':<7} {r.machine.threads:>7}  "
        f"{'pass' if r.passed else 'FAIL':<7} {r.counts.get('passed', 0):>7} "
        f"{r.counts.get('failed', 0) + r.counts.get('error', 0):>7} {r.seconds / 60:>8.1f}"
        for r in results
    ]
    names = [f"  seed {r.seed}: {name}" for r in results for name in r.failed]
    return "\n".join([head, *rows, *names])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 if every run passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="THUNDER_NORM_SEED of the first row, counted up from there")
    parser.add_argument("--only", metavar="ROWS", help="of the ten rows only these, counted from 0, separated by commas")
    options, rest = parser.parse_known_args(arguments)
    chosen = [int(n) for n in options.only.split(",")] if options.only else range(len(MACHINES))
    results = []
    for number in chosen:
        results.append(run(MACHINES[number], options.seed + number, [a for a in rest if a != "--"]))
        print(table(results[-1:]), flush=True)
    print("\n" + table(results))
    return 0 if all(r.passed for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
