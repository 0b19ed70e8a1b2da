"""``python -m benchmarks.gpu``: what thunder_norm costs on a GPU, as ratios between peers in one process, and what it predicts of one.

Every case times its candidates in turns with CUDA events, after warm-up, over several sets of inputs.  A candidate that cannot run on
a machine (no nvFuser, no fp8) is reported with its reason.  ``--device cpu --quick`` runs every case in a small form anywhere;
``--together`` compiles all cases at the same time, each in a process of its own, before one after the other is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # Thunder's and torch's own, on import and on calls

import torch  # noqa: E402 - the environment comes first

from benchmarks import gpu_cases, gpu_predictions, machine, timing  # noqa: E402
from benchmarks.devices import Device  # noqa: E402
from thunder_norm.transforms import NormTransform  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CASES = (*gpu_predictions.CASES, *gpu_cases.CASES)

Found = tuple[list[dict[str, Any]], dict[str, str]]
"""The rows of a case, and what of it did not run with the reasons."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)} (all if none is named)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds: to see that everything runs")
    parser.add_argument("--rounds", type=int, help="how often each candidate is timed")
    parser.add_argument(
        "--together", type=float, metavar="SECONDS", help="compile all cases at once, and time those that are ready by then"
    )
    parser.add_argument(
        "--into", type=Path, help=f"a file for the results (default: gpu.json in {RESULTS.name}; on CPU or with --quick none)"
    )
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")

    device = Device(options.device)
    amount = gpu_cases.Amount(device, is_quick=options.quick, rounds=options.rounds or (3 if options.quick else 15))
    into = options.into or (RESULTS / "gpu.json" if device.is_cuda and not options.quick else None)
    described = machine.describe() | device.describe()
    print(json.dumps(described, indent=1), flush=True)
    places = {str(options.into): "FILE"}
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *(places.get(a, a) for a in sys.argv[1:])]),
        "machine": described,
        "rows": [],
        "predictions": [],
        "failed": {},
    }

    def note(name: str, found: Found, seconds: float) -> None:
        rows, failed = found
        is_timed = name in gpu_cases.CASES
        result["rows" if is_timed else "predictions"] += rows
        result["failed"] |= failed
        print(f"\n== {name} ({seconds:.0f} s)\n", flush=True)
        if rows:
            print((timing if is_timed else gpu_predictions).table(rows), flush=True)
        for what, why in failed.items():
            print(f"did not run: {what}: {why}", flush=True)
        if into is not None:  # after each case: a machine may be taken away
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(json.dumps(result, indent=1) + "\n")

    names = options.cases or CASES
    if options.together is not None:
        together(names, amount, options.together, note)
    else:
        for name in names:
            started = time.perf_counter()
            note(name, run_case(name, amount), time.perf_counter() - started)
    if into is not None:
        print(f"\nwritten to {into}")


def together(names: list[str], amount: gpu_cases.Amount, seconds: float, note: Callable[[str, Found, float], None]) -> None:
    """Cases made ready at the same time, in processes, and timed one after the other; what is not ready in time is left out."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    cases: dict[str, tuple[Any, Connection]] = {}
    for name in names:
        here, there = context.Pipe()
        process = context.Process(target=_in_a_process, args=(name, amount, there), daemon=True)
        process.start()
        there.close()
        cases[name] = process, here
    late = {name for name, (_, end) in cases.items() if not end.poll(max(0.0, deadline - time.monotonic()))}
    for name in late:
        cases[name][0].kill()
        note(name, ([], {name: f"not ready after {seconds:.0f} s"}), seconds)
    for name, (process, end) in cases.items():
        if name in late:
            continue
        started = time.perf_counter()
        try:
            found = end.recv()
            if found == _READY:  # and not a result, of a case that failed before
                end.send("go")
                found = end.recv()
        except EOFError:
            process.join()
            found = [], {name: f"its process ended with {process.exitcode}"}
        note(name, found, time.perf_counter() - started)


_READY = "ready"


def _in_a_process(name: str, amount: gpu_cases.Amount, end: Connection) -> None:
    def wait() -> None:
        end.send(_READY)
        end.recv()

    end.send(run_case(name, amount, wait))


def run_case(name: str, amount: gpu_cases.Amount, wait: Callable[[], None] = lambda: None) -> Found:
    """A case's comparisons made ready, and timed after `wait`; or what it predicts."""
    NormTransform()  # with nvFuser for torch 2.10 plain Thunder, the peer, needs a hook of ours (thunder_norm/tracing/hooks/nvfuser.py)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    try:
        if name in gpu_predictions.CASES:
            wait()
            rows += (p.row() for p in gpu_predictions.CASES[name](amount))
            return rows, failed
        ready = [made_ready(comparison, amount, failed) for comparison in gpu_cases.CASES[name](amount)]
        wait()
        for comparison, calls, kernels in ready:
            rows += timed(comparison, calls, kernels, amount, failed)
    except Exception as e:  # noqa: BLE001 - the other cases are worth having
        failed[name] = _reason(e)
    return rows, failed


Calls = dict[str, Callable[[], Any]]


def made_ready(
    comparison: gpu_cases.Comparison, amount: gpu_cases.Amount, failed: dict[str, str]
) -> tuple[gpu_cases.Comparison, Calls, dict[str, int | None]]:
    """The candidates that run, each called once, and how many kernels a call launches."""
    calls, kernels = {}, {}
    for candidate, make in comparison.candidates.items():
        try:
            calls[candidate] = make()
            calls[candidate]()
            kernels[candidate] = amount.device.kernels(calls[candidate])
        except Exception as e:  # noqa: BLE001 - what does not run is a result
            calls.pop(candidate, None)
            failed[f"{comparison.name}: {candidate}"] = _reason(e)
    return comparison, calls, kernels


def timed(
    comparison: gpu_cases.Comparison,
    calls: Calls,
    kernels: dict[str, int | None],
    amount: gpu_cases.Amount,
    failed: dict[str, str],
) -> list[dict[str, Any]]:
    """The rows of one comparison."""
    if comparison.peer not in calls:
        failed[comparison.name] = f"the peer, {comparison.peer}, did not run"
        return []
    rows = timing.rows(
        comparison.name, timing.in_turns(calls, amount.rounds, seconds=0.05, clock=amount.device.clock), comparison.peer
    )
    for row in rows:
        row["kernels"] = kernels[row["candidate"]]
    return rows


def _reason(e: Exception) -> str:
    where = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''} ({Path(where.filename).name}:{where.lineno})"


if __name__ == "__main__":
    main()
