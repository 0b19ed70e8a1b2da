"""A process that makes the first call of one model once, and says what of the processor's time it took.

``python -m benchmarks.first_calls_worker CANDIDATE MODEL`` writes one line of JSON; `first_calls` asks.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # Thunder's and torch's own, on import and on calls

import torch  # noqa: E402

from benchmarks import first_calls_models  # noqa: E402

# As our import does it, which a torch that came after Thunder needs; the file is run without its package.
runpy.run_path(str(Path(__file__).parents[1] / "thunder_norm" / "_thunder.py"))["import_thunder"]()

import thunder  # noqa: E402 - the environment comes first


def _small(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _jitted(transforms: Callable[[], list]) -> Callable:
    thunder.jit(_small)(torch.randn(2))  # Thunder itself is loaded and warm
    made = transforms()
    return lambda model: thunder.jit(model, transforms=made)


def _real_mode() -> list:
    from thunder_norm.transforms import NormTransform

    return [NormTransform()]


def _normed() -> Callable:
    import thunder_norm

    jit = _jitted(_real_mode)
    return lambda model: thunder_norm.normed(jit(model))


def _compiled(backend: str) -> Callable:
    torch.compile(_small, backend=backend)(torch.randn(2))
    return lambda model: torch.compile(model, backend=backend)


PLAIN = "thunder.jit"
CANDIDATES: dict[str, Callable[[], Callable]] = {
    PLAIN: lambda: _jitted(list),
    "real mode": lambda: _jitted(_real_mode),
    "normed mode": _normed,
    "torch.compile(aot_eager)": lambda: _compiled("aot_eager"),
    "torch.compile(inductor)": lambda: _compiled("inductor"),
}


def processor_time() -> float:
    """Of this process and the compilers that it started and that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


def first_call(candidate: str, name: str) -> dict[str, Any]:
    """Seconds of the processor's time from making the function that is compiled to its first result, and of the acquisition."""
    model, inputs = first_calls_models.made(name)
    compiled = CANDIDATES[candidate]()
    acquisitions = timed_acquisitions()
    started = processor_time()
    function = compiled(model)
    with torch.no_grad():
        function(**inputs)
    seconds = processor_time() - started
    is_ours_imported = any(module.partition(".")[0] == "thunder_norm" for module in sys.modules)
    return {"seconds": seconds, "acquisition": sum(acquisitions) or None, "is_ours_imported": is_ours_imported}


def timed_acquisitions() -> list[float]:
    """The seconds that each acquisition of a trace takes from here on."""
    found = []
    acquire = thunder.thunder_general_jit

    @functools.wraps(acquire)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return acquire(*args, **kwargs)
        finally:
            found.append(time.process_time() - started)

    thunder.thunder_general_jit = timed
    return found


def main() -> None:
    candidate, name = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    torch.set_num_threads(1)
    print(json.dumps(first_call(candidate, name)), file=answers, flush=True)


if __name__ == "__main__":
    main()
