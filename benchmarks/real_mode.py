"""Real mode: what a program on plain tensors pays for having NormTransform in its list.

Nothing, is the claim: the same operations, call time 1.00 and acquisition at most 1.02 times that of ``thunder.jit`` alone.  The peer is
a process that never imports anything of ours.  Several pairs of processes, because what differs between two is also where their memory
lies; those of a pair are asked in turns, for the same number of calls, and one waits while the other works.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import inductor, models, timing

PLAIN, OURS = "thunder.jit", "with NormTransform"
METHOD = "Two processes in turns, the peer without anything of ours imported."
WHAT = ("forward", "forward and backward")
SECONDS = 0.05  # of calls, in each round

Rounds = dict[str, dict[str, list[float]]]  # what is timed, candidate, seconds


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    return [
        *_model(f"MLP, {options.mlp_layers} layers", "mlp", options.mlp_layers, options.first_calls, options.rounds),
        *_model(f"GPT-2, {options.gpt2_layers} layers", "gpt2", options.gpt2_layers, options.first_calls_of_gpt2, options.rounds),
        *inductor.run(options),
    ]


class Worker:
    """A process of `real_mode_worker`."""

    def __init__(self, which: str, name: str, layers: int, hash_seed: int):
        command = [sys.executable, "-m", "benchmarks.real_mode_worker", which, name, str(layers)]
        environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
        root, pipe = Path(__file__).parents[1], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=environment)

    def ask(self, *request: Any) -> Any:
        """The answer to a request.

        Raises:
            RuntimeError: the process has ended.
        """
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended at {request}")
        return json.loads(answer)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def pair(name: str, layers: int, hash_seed: int = 0) -> Iterator[dict[str, Worker]]:
    """Both processes, ready; of one hash seed, which decides in which order Thunder puts operations that do not depend on each other."""
    workers = {PLAIN: Worker("plain", name, layers, hash_seed), OURS: Worker("ours", name, layers, hash_seed)}
    try:
        for worker in workers.values():
            worker.ask("imported")
        yield workers
        check_untouched(workers)
    finally:
        for worker in workers.values():
            worker.end()


def _model(case: str, name: str, layers: int, pairs: int, rounds: int) -> list[dict[str, Any]]:
    """First calls, then calls without and with a backward pass, of all pairs."""
    found: Rounds = {}
    for i in range(pairs):
        with pair(name, layers, hash_seed=i) as workers:
            in_order = dict(reversed(workers.items())) if i % 2 else workers
            first = {name: worker.ask("first_call") for name, worker in in_order.items()}
            _add(found, "acquisition", {name: [answer["acquisition"]] for name, answer in first.items()})
            _add(found, "first call, CPU time", {name: [answer["CPU time"]] for name, answer in first.items()})
            if (
                name != "gpt2"
            ):  # in its program attention has rows that see nothing, and a mask is written into: done as torch does it
                check_same_program(*(worker.ask("program") for worker in workers.values()))
            for what in WHAT:
                _add(found, what, calls(workers, what, rounds).rounds)
    return [row for what, measured in found.items() for row in timing.rows(f"{case}: {what}", timing.Measured(measured), PLAIN)]


def calls(workers: dict[str, Worker], what: str, rounds: int) -> timing.Measured:
    """The same number of calls of both, in turns."""
    for worker in workers.values():
        worker.ask("calls", what, 3)  # a backward pass is traced anew, then all is warm
    count = max(1, round(SECONDS / workers[PLAIN].ask("calls", what, 3)))
    makers = {name: lambda worker=worker: worker.ask("calls", what, count) for name, worker in workers.items()}
    return timing.once_in_turns(makers, rounds)


def _add(found: Rounds, what: str, more: Any) -> None:
    for name in (PLAIN, OURS):
        found.setdefault(what, {}).setdefault(name, []).extend(more[name])


def check_same_program(plain: list[str], ours: list[str]) -> None:
    """The ratio is one between equal programs; only the names of their tensors may differ.

    Raises:
        AssertionError: they are not equal.
    """
    if renumbered("\n".join(plain)) != renumbered("\n".join(ours)):
        raise AssertionError("the program with NormTransform differs from the one without")


def renumbered(trace: str) -> str:
    """The trace with its tensors, and the numbers of tensors, numbered as they come.

    An executor of Thunder's numbers the result of what it claims, which keeps its name where we do it natively.
    """
    tensors = dict.fromkeys(re.findall(r'\b(t\d+|[if]\d+(?=: "(?:int|float) \?)|\w+(?=: "\w+ \w+\[))', trace))
    numbers = {name: f"t{i}" for i, name in enumerate(tensors)}
    # but for the user's lines, which are comments with their path
    return re.sub(r"(?m)^ *# /.*|\b\w+\b", lambda found: numbers.get(found[0], found[0]), trace)


def check_untouched(workers: dict[str, Worker]) -> None:
    """The peer is Thunder alone.

    Raises:
        AssertionError: something of ours was imported there, or nothing here.
    """
    if workers[PLAIN].ask("imported") or not workers[OURS].ask("imported"):
        raise AssertionError("the peer is to be a process without us, the other one a process with us")
