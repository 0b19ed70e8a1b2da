"""A process that runs one program under ``thunder.jit`` when it is asked to, with NormTransform or where nothing of ours was imported.

``python -m benchmarks.real_mode_worker plain|ours mlp|gpt2 LAYERS`` reads requests, a JSON list of a name and arguments a line, and
writes each answer as a line of JSON; `real_mode` asks.
"""

from __future__ import annotations

import json
import os
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

from benchmarks import models, timing  # noqa: E402

# As our import does it, which a torch that came after Thunder needs; the file is run without its package.
runpy.run_path(str(Path(__file__).parents[1] / "thunder_norm" / "_thunder.py"))["import_thunder"]()

import thunder  # noqa: E402 - the environment comes first


class Program:
    """A model and its input, and what may be asked of them."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, loss: Callable[[Any], torch.Tensor], transforms: list):
        self.f, self.x, self.loss = thunder.jit(model, transforms=transforms), x, loss

    def first_call(self) -> dict[str, float]:
        """Seconds that the acquisition took, and the whole call of the processor's time."""
        started = time.process_time()
        with torch.no_grad():
            self.f(self.x)
        cpu = time.process_time() - started
        stats = thunder.compile_stats(self.f)
        return {"acquisition": (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9, "CPU time": cpu}

    def program(self) -> list[str]:
        """The program that runs."""
        return [str(bsym) for bsym in thunder.last_traces(self.f)[-1].bound_symbols]

    def calls(self, what: str, count: int) -> float:
        """Seconds that each of `count` calls took; `what` is "forward" or "forward and backward"."""
        with timing.no_garbage_collection(), torch.set_grad_enabled(what != "forward"):
            return timing.seconds_a_call(self._forward if what == "forward" else self._both, count)

    def imported(self) -> list[str]:
        """What there is of ours in this process."""
        return sorted(name for name in sys.modules if name.partition(".")[0] == "thunder_norm")

    def _forward(self) -> None:
        self.f(self.x)

    def _both(self) -> None:
        self.loss(self.f(self.x)).backward()


def _transforms(which: str) -> list:
    if which == "plain":
        return []
    from thunder_norm.transforms import NormTransform

    return [NormTransform()]


def main() -> None:
    which, name, layers = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    torch.set_num_threads(1)
    thunder.jit(lambda x: x * 2)(torch.randn(2))  # Thunder itself is loaded and warm
    if name == "mlp":
        program = Program(models.mlp(int(layers)), torch.randn(16, 64), torch.sum, _transforms(which))
    else:
        program = Program(models.gpt2(int(layers)), models.tokens(), lambda y: y.logits.sum(), _transforms(which))
    for line in sys.stdin:
        request, *arguments = json.loads(line)
        print(json.dumps(getattr(program, request)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
