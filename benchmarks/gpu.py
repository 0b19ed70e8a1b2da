"""``python -m benchmarks.gpu``: what thunder_norm costs on a GPU, as ratios between peers in one process.

Every case times its candidates in turns with CUDA events, after warm-up, over several sets of inputs.  A candidate that cannot run on
a machine (no nvFuser, no fp8) is reported with its reason.  ``--device cpu --quick`` runs every case in a small form anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # Thunder's and torch's own, on import and on calls

import torch  # noqa: E402 - the environment comes first

from benchmarks import gpu_cases, machine, timing  # noqa: E402
from benchmarks.devices import Device  # noqa: E402

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(gpu_cases.CASES)} (all if none is named)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: to see that everything runs")
    parser.add_argument("--rounds", type=int, help="how often each candidate is timed")
    parser.add_argument(
        "--into", type=Path, help=f"a file for the results (default: gpu.json in {RESULTS.name}; on CPU or with --quick none)"
    )
    options = parser.parse_args()
    unknown = set(options.cases) - set(gpu_cases.CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(gpu_cases.CASES)}")

    device = Device(options.device)
    amount = gpu_cases.Amount(device, is_quick=options.quick, rounds=options.rounds or (3 if options.quick else 15))
    into = options.into or (RESULTS / "gpu.json" if device.is_cuda and not options.quick else None)
    described = machine.describe() | device.describe()
    print(json.dumps(described, indent=1), flush=True)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "machine": described,
        "rows": [],
        "failed": {},
    }
    for name in options.cases or gpu_cases.CASES:
        started = time.perf_counter()
        rows, failed = run_case(name, amount)
        result["rows"] += rows
        result["failed"] |= failed
        print(f"\n== {name} ({time.perf_counter() - started:.0f} s)\n", flush=True)
        if rows:
            print(timing.table(rows), flush=True)
        for what, why in failed.items():
            print(f"did not run: {what}: {why}", flush=True)
        if into is not None:  # after each case: a machine may be taken away
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(json.dumps(result, indent=1) + "\n")
    if into is not None:
        print(f"\nwritten to {into}")


def run_case(name: str, amount: gpu_cases.Amount) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a case, and the candidates that did not run with their reasons."""
    rows, failed = [], {}
    try:
        for comparison in gpu_cases.CASES[name](amount):
            found, reasons = measure(comparison, amount)
            rows += found
            failed |= reasons
    except Exception as e:  # noqa: BLE001 - the other cases are worth having
        failed[name] = _reason(e)
    return rows, failed


def measure(comparison: gpu_cases.Comparison, amount: gpu_cases.Amount) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One comparison: its candidates made, called once each, then timed in turns."""
    calls, kernels, failed = {}, {}, {}
    for candidate, make in comparison.candidates.items():
        try:
            calls[candidate] = make()
            calls[candidate]()
            kernels[candidate] = amount.device.kernels(calls[candidate])
        except Exception as e:  # noqa: BLE001 - what does not run is a result
            calls.pop(candidate, None)
            failed[f"{comparison.name}: {candidate}"] = _reason(e)
    if comparison.peer not in calls:
        return [], failed | {comparison.name: f"the peer, {comparison.peer}, did not run"}
    measured = timing.in_turns(calls, amount.rounds, seconds=0.05, clock=amount.device.clock)
    rows = timing.rows(comparison.name, measured, comparison.peer)
    for row in rows:
        row["kernels"] = kernels[row["candidate"]]
    return rows, failed


def _reason(e: Exception) -> str:
    where = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''} ({Path(where.filename).name}:{where.lineno})"


if __name__ == "__main__":
    main()
