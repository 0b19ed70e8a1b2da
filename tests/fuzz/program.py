"""What a random program is to the tester: something that runs, gets smaller, and can be printed.

A *subject* is a module of this package with a function ``draw(random: random.Random) -> Program``, or, where there is a list of
everything to try instead of a random choice, ``programs() -> Sequence[Program]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from thunder_norm.errors import ThunderNormError

Kind = Literal["right", "wrong", "error", "refused", "no oracle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BAD: tuple[Kind, ...] = ("wrong", "error")


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    right       agrees with the oracle
    wrong       does not
    error       an exception that is none of ours, or none at all within the time limit
    refused     an error class of ours
    no oracle   the oracle failed, or disagrees with its own second opinion
    """

    kind: Kind
    detail: str = ""

    @property
    def headline(self) -> str:
        """The first line of the detail, which begins with the class of an error."""
        return (self.detail.splitlines() or [""])[0][:200]

    def is_like(self, other: Outcome) -> bool:
        """Whether both are the same finding: of one kind, and of one class of errors."""
        return self.kind == other.kind and (
            self.kind not in ("error", "refused") or self.detail.partition(":")[0] == other.detail.partition(":")[0]
        )


class Program(Protocol):
    """One random program with its oracle."""

    def run(self) -> Outcome:
        """What comes of it, the same each time."""
        ...

    def smaller(self) -> Iterable[Program]:
        """Programs to try in its place, each strictly smaller, those that leave out most first."""
        ...

    def source(self) -> str:
        """A program that can be pasted: prints our answer beside the right one."""
        ...

    def labels(self) -> Sequence[str]:
        """The operations it consists of, by which the results are counted."""
        ...


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a program that raised: refused, or an error."""
    kind: Kind = "refused" if isinstance(error, ThunderNormError) else "error"
    return Outcome(kind, f"{type(error).__name__}: {error}".strip())


def beside_compile(outcome: Outcome, is_right: Callable[[Callable], bool]) -> Outcome:
    """`outcome`; of a refusal, with what torch.compile makes of the program: `is_right` runs it compiled and says whether that is eager mode's answer."""
    if outcome.kind != "refused":
        return outcome
    torch._dynamo.reset()
    try:
        runs = is_right(lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    except Exception:  # noqa: BLE001 - it does not
        return outcome
    finally:
        torch._dynamo.reset()
    return Outcome("refused", f"torch.compile runs it: {outcome.detail}") if runs else outcome


def shrunk(
    program: Program, found: Outcome, report: Callable[[Program, Outcome], None] = lambda *_: None, most: int = 300
) -> Program:
    """The smallest program near `program` with the same finding: greedily, after at most `most` runs; `report` is told of each step."""
    runs = 0
    best: Program | None = program
    while best is not None:
        program, best = best, None
        for candidate in program.smaller():
            runs += 1
            if runs > most:
                return program
            outcome = run(candidate)
            if outcome.is_like(found):
                report(candidate, outcome)
                best = candidate
                break
    return program


def run(program: Program) -> Outcome:
    """What comes of a program; what its own `run` lets through is an outcome as well."""
    try:
        return program.run()
    except Exception as e:  # noqa: BLE001 - every end of a program is a result
        return outcome_of(e)
