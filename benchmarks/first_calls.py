"""First calls: the processor's time of everything up to the first result, to that of plain ``thunder.jit``; and of imports.

Each first call is made in a process of its own, the peer's without anything of ours imported; ``torch.compile`` with empty caches, its
compilers counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models, timing
from benchmarks.first_calls_models import CASES
from benchmarks.first_calls_worker import CANDIDATES, PLAIN

IMPORTS = "imports"
_LAUNCHER = "import runpy, time; started = time.process_time(); {}; print(time.process_time() - started)"
# As our import does it, which a torch that came after Thunder needs.
_THUNDER = f"runpy.run_path({str(Path(__file__).parents[1] / 'thunder_norm' / '_thunder.py')!r})['import_thunder']()"
_IMPORTED = {"thunder": _THUNDER, "thunder_norm and thunder": f"import thunder_norm; {_THUNDER}"}

METHOD = "Each first call in a process of its own, the peer's without anything of ours imported; time of the processor."


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    first_calls = [row for case in options.first_call_models or CASES for row in _case(case, options.first_call_rounds)]
    return [*_imports(2 * options.first_call_rounds + 1), *first_calls]


def _imports(rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {name: [] for name in _IMPORTED}
    for _ in range(rounds):
        for name, code in _IMPORTED.items():
            command = [sys.executable, "-W", "ignore", "-c", _LAUNCHER.format(code)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
            found[name].append(float(done.stdout))
    return timing.rows(IMPORTS, timing.Measured(found), "thunder")


def _case(case: str, rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CANDIDATES}
    names = list(CANDIDATES)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(first_call(name, case))
    measured = timing.Measured({name: [answer["seconds"] for answer in answers] for name, answers in found.items()})
    rows = timing.rows(case, measured, PLAIN)
    for row in rows:
        acquisitions = [answer["acquisition"] for answer in found[row["candidate"]]]
        if None not in acquisitions:
            row["acquisition_us"] = timing.Measured({"acquisition": acquisitions}).median("acquisition") * 1e6
    return rows


def first_call(candidate: str, case: str) -> dict[str, Any]:
    """What one process of `first_calls_worker` measured.

    Raises:
        RuntimeError: it failed.
        AssertionError: the peer is not Thunder alone.
    """
    command = [sys.executable, "-m", "benchmarks.first_calls_worker", candidate, case]
    with tempfile.TemporaryDirectory() as cache:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONHASHSEED": "0"}
        root = Path(__file__).parents[1]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | fresh, check=False)
    if done.returncode:
        raise RuntimeError(f"{candidate} of {case} failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    if answer["is_ours_imported"] != (candidate in ("real mode", "normed mode")):
        raise AssertionError(f"what {candidate} has imported of ours is not what it is to have")
    return answer
