"""Calls with another batch size: what they take of the processor's time, to the first call; and how much of both is the acquisition.

Each pair of calls is made in a process of its own, where a first call of something small has been made before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")  # Thunder's and torch's own, on import and on calls

import torch

from benchmarks import models, timing

FIRST, OTHER = "first call", "another batch size"
MODES = ("real mode", "normed mode")
GRADIENTS = ("without gradients", "with gradients")
_MLP = "MLP, 12 layers"
CASES = (_MLP, "GPT-2, 2 layers", "Llama, 4 layers", "ResNet-18")

METHOD = "Each pair of calls in a process of its own; time of the processor, without the backward."


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    found = []
    for case in (_MLP, *options.first_call_models) if options.first_call_models else CASES:
        for mode in MODES:
            for gradients in GRADIENTS:
                found += _rows(f"{case}, {mode}, {gradients}", options.first_call_rounds)
    return found


def _rows(case: str, rounds: int) -> list[dict[str, Any]]:
    answers = [calls(case) for _ in range(rounds)]
    measured = timing.Measured({name: [answer[name]["seconds"] for answer in answers] for name in (FIRST, OTHER)})
    rows = timing.rows(case, measured, FIRST)
    for row in rows:
        acquisitions = timing.Measured({"": [answer[row["candidate"]]["acquisition"] for answer in answers]})
        row["acquisition_us"] = acquisitions.median("") * 1e6
    return rows


def calls(case: str) -> dict[str, dict[str, float]]:
    """What one process measured of both calls.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.other_sizes", case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _measured(case: str) -> dict[str, dict[str, float]]:
    import thunder_norm
    from benchmarks import first_calls_models, first_calls_worker
    from thunder_norm.transforms import NormTransform
    import thunder

    name, mode, gradients = case.rsplit(", ", 2)
    model, inputs = (models.mlp(12), {"input": torch.randn(8, 64)}) if name == _MLP else first_calls_models.made(name)
    thunder.jit(lambda x: x * 2, transforms=[NormTransform()])(torch.randn(2))
    jitted = thunder.jit(model, transforms=[NormTransform()])
    function = thunder_norm.normed(jitted) if mode == "normed mode" else jitted
    acquisitions = first_calls_worker.timed_acquisitions()
    found = {}
    for n, call in enumerate((FIRST, OTHER)):
        given = {key: torch.cat([t] * (n + 1)) for key, t in inputs.items()}
        started = first_calls_worker.processor_time()
        with torch.set_grad_enabled(gradients == "with gradients"):
            function(**given)
        found[call] = {"seconds": first_calls_worker.processor_time() - started, "acquisition": acquisitions[n]}
    return found


def main() -> None:
    """Answer `calls`: one line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    torch.set_num_threads(1)
    print(json.dumps(_measured(sys.argv[1])), file=answers, flush=True)


if __name__ == "__main__":
    main()
