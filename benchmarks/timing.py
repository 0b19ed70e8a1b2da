"""Timing peers in turns, and the table of what came out."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Seconds a call of each candidate took, one number for each round; all candidates are timed in each round."""

    rounds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def minimum(self, name: str) -> float:
        return min(self.rounds[name])

    def ratios(self, name: str, peer: str) -> list[float]:
        """Round by round, so that what slows both down at a time cancels."""
        return [a / b for a, b in zip(self.rounds[name], self.rounds[peer], strict=True)]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect before, not during."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What lives now is not looked at by collections inside: they take as long as what is new, not as the libraries that are loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


Clock = Callable[[Callable[[], Any], int], float]
"""How long one of `repeats` calls takes, in seconds."""


def in_turns(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    seconds: float = 0.02,
    warm_up: int = 3,
    clock: Clock | None = None,
) -> Measured:
    """Time each candidate for about `seconds` in each round, in another order each time, after calling each `warm_up` times.

    With `seconds` 0 a round is one call.
    """
    clock = clock or seconds_a_call
    repeats = {name: _repeats(call, seconds, warm_up, clock) for name, call in candidates.items()}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    with frozen():
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                with no_garbage_collection():
                    found[name].append(clock(candidates[name], repeats[name]))
    return Measured(found)


def once_in_turns(makers: Mapping[str, Callable[[], Any]], rounds: int) -> Measured:
    """As `in_turns` for what can only be timed once (a first call): each maker returns the seconds it measured itself."""
    found: dict[str, list[float]] = {name: [] for name in makers}
    names = list(makers)
    for i in range(rounds):
        for name in names[:: 1 if i % 2 == 0 else -1]:
            with no_garbage_collection():
                found[name].append(makers[name]())
    return Measured(found)


def _repeats(call: Callable[[], Any], seconds: float, warm_up: int, clock: Clock) -> int:
    for _ in range(warm_up):
        call()
    if not seconds:
        return 1
    return max(1, round(seconds / clock(call, 3)))


def seconds_a_call(call: Callable[[], Any], repeats: int) -> float:
    """How long one of `repeats` calls takes."""
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


# -- rows and tables ---------------------------------------------------------------------------------------------------


def rows(case: str, measured: Measured, peer: str, *, operations: int | None = None) -> list[dict[str, Any]]:
    """One row for each candidate of a case; `peer` is what ratios are taken to."""
    found = []
    for name in measured.rounds:
        row: dict[str, Any] = {"case": case, "candidate": name}
        row["median_us"] = measured.median(name) * 1e6
        row["minimum_us"] = measured.minimum(name) * 1e6
        if operations is not None:
            row["us_per_operation"] = measured.median(name) * 1e6 / operations
        ratios = measured.ratios(name, peer)
        row["ratio"] = statistics.median(ratios)
        row["ratio_of_minima"] = measured.minimum(name) / measured.minimum(peer)
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
            row["ratio_quartiles"] = [low, high]
        row["peer"], row["rounds"] = peer, len(ratios)
        found.append(row)
    return found


def table(rows_of_suite: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, case by case."""
    cells = [["", "median", "min", "us/op", "ratio", "quartiles", "of minima"]]
    case = None
    for row in rows_of_suite:
        if row["case"] != case:
            case = row["case"]
            cells.append([f"{case}   (ratio to {row['peer']})"])
        per_operation = f"{row['us_per_operation']:.2f}" if "us_per_operation" in row else ""
        quartiles = "{:.3f}-{:.3f}".format(*row["ratio_quartiles"]) if "ratio_quartiles" in row else ""
        cells.append(
            [
                "  " + row["candidate"],
                duration(row["median_us"]),
                duration(row["minimum_us"]),
                per_operation,
                f"{row['ratio']:.3f}",
                quartiles,
                f"{row['ratio_of_minima']:.3f}",
            ]
        )
    full = [line for line in cells if len(line) > 1]
    widths = [max(len(line[i]) for line in full) for i in range(len(full[0]))]
    lines = []
    for line in cells:
        if len(line) == 1:
            lines.append(line[0])
        else:
            numbers = "  ".join(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
            lines.append(f"{line[0].ljust(widths[0])}  {numbers}".rstrip())
    return "\n".join(lines)


def duration(microseconds: float) -> str:
    """A time as text, in the unit that suits it."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    if microseconds >= 1e4:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.1f} us"
