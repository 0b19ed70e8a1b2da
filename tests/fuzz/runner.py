"""Runs many random programs in worker processes, each under a time limit, and shrinks what is wrong.

Program `i` of a subject comes from ``random.Random(f"{subject} {seed} {i}")`` alone, so that what was found is found again.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import io
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from tests.forks import FORKS

from .program import BAD, KINDS, Outcome, Program, run, shrunk

SUBJECTS = (
    "derivatives",
    "op_db",
    "modules",
    "wrappers",
    "changes",
    "writes",
    "wrapper_writes",
    "made_wrappers",
    "bounds",
    "networks",
    "real",
    "draws",
    "regions",
    "python",
    "refusals",
    "state",
    "optimizers",
    "maps",
    "calls",
)
PROGRAMS_OF_A_PROCESS = 150  # Thunder keeps what it compiled: a process grows by some MiB a program


@dataclass(frozen=True)
class Job:
    """Program `index` of a subject."""

    subject: str
    seed: int
    index: int

    def program(self) -> Program:
        """The program, drawn again."""
        listed = everything(self.subject)
        if listed is not None:
            return listed[self.index]
        return module_of(self.subject).draw(random.Random(f"{self.subject} {self.seed} {self.index}"))


@dataclass
class Result:
    """What came of one program; of what is wrong, the smallest program found that shows it."""

    index: int
    kind: str
    detail: str
    labels: tuple[str, ...] = ()
    source: str = ""
    original: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """The results of a subject."""

    subject: str
    seed: int
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    shown: set[str] = field(default_factory=set)  # refusals, the first of a kind

    @property
    def counts(self) -> dict[str, int]:
        """How many programs came to each outcome."""
        found = collections.Counter(r.kind for r in self.results)
        return {kind: found[kind] for kind in KINDS}

    @property
    def by_label(self) -> dict[str, dict[str, int]]:
        """The counts of the programs that have an operation, for each operation."""
        found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for r in self.results:
            for label in set(r.labels):
                found[label][r.kind] += 1
        return {label: {kind: found[label][kind] for kind in KINDS} for label in sorted(found)}

    @property
    def bad(self) -> list[Result]:
        """What is wrong or ended in an error that is not ours."""
        return [r for r in self.results if r.kind in BAD]

    @property
    def refusals(self) -> dict[str, int]:
        """How often something was refused, for each headline."""
        return dict(collections.Counter(_headline(r.detail) for r in self.results if r.kind == "refused").most_common())

    def as_json(self) -> dict[str, Any]:
        """What is kept of a long run: counts, and each program found."""
        return {
            "subject": self.subject,
            "seed": self.seed,
            "programs": len(self.results),
            "indices": as_ranges(r.index for r in self.results),
            "seconds": round(self.seconds),
            "counts": self.counts,
            "operations": {label: {k: n for k, n in c.items() if n} for label, c in self.by_label.items()},
            "refusals": self.refusals,
            "found": [
                {"index": r.index, "kind": r.kind, "detail": r.detail, "source": r.source, "labels": sorted(set(r.labels))}
                for r in self.bad
            ],
        }

    def table(self) -> str:
        """Counts as text: of all, and of the operations in programs that were not right."""
        lines = [f"{self.subject}, seed {self.seed}: {len(self.results)} programs in {self.seconds:.0f} s"]
        lines += [f"  {n:6d}  {kind}" for kind, n in self.counts.items()]
        notable = {label: c for label, c in self.by_label.items() if any(c[k] for k in KINDS if k != "right")}
        if notable:
            width = max(map(len, notable))
            lines += [
                "",
                "operations in programs that were not all right",
                " " * (width + 2) + "".join(f"{k:>11}" for k in KINDS),
            ]
            lines += [f"  {label:<{width}}" + "".join(f"{c[k] or '':>11}" for k in KINDS) for label, c in notable.items()]
        if self.refusals:
            lines += ["", "refused"] + [f"  {n:4d}  {headline}" for headline, n in self.refusals.items()]
        return "\n".join(lines)


def as_ranges(indices: Iterable[int]) -> str:
    """``"0-3,7"`` for 0, 1, 2, 3 and 7."""
    ranges: list[list[int]] = []
    for i in sorted(set(indices)):
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def of_ranges(text: str) -> list[int]:
    """The numbers in ``"3,7,10-12"``."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [i for end in ends for i in range(int(end[0]), int(end[-1]) + 1)]


def _headline(detail: str) -> str:
    return (detail.splitlines() or [""])[0][:160]


# -- in one process ---------------------------------------------------------------------------------------------------------


def module_of(subject: str) -> Any:
    """The module of a subject."""
    return importlib.import_module(f".{subject}", __package__)


@functools.cache
def everything(subject: str) -> Sequence[Program] | None:
    """All programs of a subject that is a list of them; None for a subject whose programs are drawn."""
    module = module_of(subject)
    return module.programs() if hasattr(module, "programs") else None


def run_job(job: Job, shrink: bool = True, tell: Any = None) -> Result:
    """Run a program in this process, and shrink it if it is wrong or ends in an error; `tell` is given what is known so far."""
    start = time.perf_counter()
    with _quiet():
        try:
            program = job.program()
        except Exception as e:  # noqa: BLE001 - a fault of the subject, shown as one
            return Result(job.index, "error", f"while drawing: {type(e).__name__}: {e}")
        found = run(program)
        first = Result(job.index, found.kind, found.detail, tuple(program.labels()))
        first.seconds = time.perf_counter() - start
        if found.kind not in BAD:
            return first
        first.source = first.original = program.source()
        if tell is not None:
            tell(first)
        if shrink:

            def report(smaller: Program, outcome: Outcome) -> None:
                first.source, first.detail = smaller.source(), outcome.detail
                if tell is not None:
                    tell(first)

            shrunk(program, found, report)
    return first


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


# -- in many ----------------------------------------------------------------------------------------------------------------


def _work(pipe: connection.Connection, shrink: bool) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            job = pipe.recv()
            pipe.send((False, None))  # the process has started: from here on the time counts
            torch.manual_seed(0)
            pipe.send((True, run_job(job, shrink, lambda so_far: pipe.send((False, so_far)))))


class _Worker:
    """A process that runs programs, one at a time."""

    def __init__(self, shrink: bool):
        self.pipe, other = FORKS.Pipe()
        self.process = FORKS.Process(target=_work, args=(other, shrink), daemon=True)
        self.process.start()
        other.close()
        self.done = 0
        self.job: Job | None = None
        self.so_far: Result | None = None
        self.heard = float("inf")

    def give(self, job: Job) -> None:
        self.job, self.so_far = job, None
        self.pipe.send(job)

    def hear(self) -> Result | None:
        """What the process says; the result if it is the last word on the program."""
        try:
            is_last, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self.given_up("the process died")
        self.heard = time.monotonic()
        if not is_last:
            self.so_far = result
            return None
        self.done, self.heard = self.done + 1, float("inf")
        return result

    def given_up(self, why: str) -> Result:
        """The result of a program that does not come to an end: what was known of it, if it was being shrunk."""
        job = self.job
        self.stop()
        assert job is not None
        return self.so_far or Result(job.index, "error", why)

    def stop(self) -> None:
        self.done = PROGRAMS_OF_A_PROCESS
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_many(
    subject: str,
    indices: Iterable[int],
    seed: int = 0,
    *,
    jobs: int = 2,
    limit: float = 300.0,
    seconds: float = float("inf"),
    shrink: bool = True,
    show: Any = print,
) -> Report:
    """Run programs of a subject in `jobs` processes.

    `limit` seconds for each program (and for each that is tried while shrinking), `seconds` for all; what is under way when the time
    is over, or at Ctrl-C, is left.
    """
    report, start = Report(subject, seed), time.monotonic()
    remaining = iter(indices)
    workers: list[_Worker] = []
    try:
        while True:
            is_over = time.monotonic() - start > seconds
            if not is_over:
                _hand_out(workers, remaining, subject, seed, jobs, shrink)
            workers = [w for w in workers if w.job is not None]
            if not workers or is_over:
                break
            ready = connection.wait([w.pipe for w in workers], timeout=1.0)
            for worker in workers:
                result = None
                if worker.pipe in ready:
                    result = worker.hear()
                elif time.monotonic() - worker.heard > limit:
                    result = worker.given_up(f"time: no result within {limit:g} s")
                if result is not None:
                    worker.job = None
                    report.results.append(result)
                    _show(result, report, show)
    except KeyboardInterrupt:
        show("interrupted: these are the programs that came to an end")
    finally:
        for worker in workers:
            worker.stop()
    report.results.sort(key=lambda r: r.index)
    report.seconds = time.monotonic() - start
    return report


def _hand_out(workers: list[_Worker], remaining: Iterator[int], subject: str, seed: int, jobs: int, shrink: bool) -> None:
    """Give each idle worker a program, a new one in the place of those that have run many."""
    for worker in [w for w in workers if w.job is None and w.done >= PROGRAMS_OF_A_PROCESS]:
        if worker.process.is_alive():
            worker.stop()
        workers.remove(worker)
    idle = [w for w in workers if w.job is None]
    while len(idle) + sum(w.job is not None for w in workers) < jobs or idle:
        index = next(remaining, None)
        if index is None:
            break
        if idle:
            worker = idle.pop()
        else:
            worker = _Worker(shrink)
            workers.append(worker)
        worker.give(Job(subject, seed, index))
    for worker in idle:
        worker.stop()


def _show(result: Result, report: Report, show: Any) -> None:
    if result.kind in BAD:
        show(f"\n# {report.subject}, seed {report.seed}, program {result.index}: {result.kind}: {result.detail}\n{result.source}")
    elif result.kind == "refused" and _headline(result.detail) not in report.shown:
        report.shown.add(_headline(result.detail))
        show(f"# {report.subject}, seed {report.seed}, program {result.index}: refused: {_headline(result.detail)}")
    if len(report.results) % 50 == 0:
        show(f"{report.subject}: {len(report.results)} done, " + ", ".join(f"{n} {k}" for k, n in report.counts.items() if n))
        sys.stdout.flush()


def indices_of(subject: str, programs: int | None) -> Iterable[int]:
    """The programs to run: `programs` of them, without end, or the whole list where there is one."""
    listed = everything(subject)
    if listed is not None:
        return range(len(listed) if programs is None else min(programs, len(listed)))
    return itertools.count() if programs is None else range(programs)
