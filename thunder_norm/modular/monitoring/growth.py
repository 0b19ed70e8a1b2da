"""Growth that precedes divergence.

Healthy runs grow too: what starts at zero grows by any factor, in the first steps as fast as a power of the step number, and attention
sharpens.  So a factor alone says nothing.  What is said is

- of numbers that are not finite: at once;
- of the largest logit of an attention head: that it is above 50, where the softmax has saturated (exp(-50) is below float32's resolution),
  has risen between all of the last six samples, and has doubled over them;
- of norms of parameters and of what modules return: that it is above 10 (of modules 100) and ten times the first one seen, has risen between
  all of the last six samples to three times what it was, and by factors that do not shrink.  A power of the step number, up to the
  third, does not do that, an exponential does;
- of all of these: that it is above 100 times the first one seen, and ten times the sizes above, however few samples there are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WINDOW = 6  # samples that growth is judged by

_SATURATED = 50.0
_NORM = 10.0
_ACTIVATION = 100.0


@dataclass
class _Series:
    """The last values of one number, with their steps."""

    first: float | None = None
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, step: int, value: float) -> None:
        self.last.append((step, value))
        if self.first is None and value > 0:
            self.first = value

    @property
    def ratios(self) -> list[float]:
        """By how much it grew between samples; none before there are enough of them, or if it ever was not positive."""
        values = [v for _, v in self.last]
        if len(values) < WINDOW or min(values) <= 0:
            return []
        return [b / a for a, b in zip(values, values[1:], strict=False)]


class Growth:
    """Judges records one after the other."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._not_finite: set[str] = set()
        self._said: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """All that was seen, in strings, numbers, lists and dicts."""
        series = [[what, name, s.first, [list(v) for v in s.last]] for (what, name), s in self._series.items()]
        return {"series": series, "not_finite": sorted(self._not_finite), "said": dict(self._said)}

    @staticmethod
    def of(state: dict[str, Any]) -> Growth:
        """One that goes on from a `state`."""
        found = Growth()
        for what, name, first, last in state["series"]:
            found._series[what, name] = _Series(first, deque(((step, value) for step, value in last), maxlen=WINDOW))
        found._not_finite, found._said = set(state["not_finite"]), dict(state["said"])
        return found

    def judge(self, record: dict[str, Any]) -> list[str]:
        """What there is to say about a record of a training monitor, after those before it."""
        step = record["step"]
        found = list(self._nonfinite(record))
        growing: dict[str, list[tuple[float, str]]] = {}
        for what, name, value in _numbers(record):
            series = self._series.setdefault((what, name), _Series())
            if not math.isfinite(value):
                series.last.clear()
                continue
            series.add(step, value)
            if _grows(what, series, value):
                (start, before), *_ = series.last
                text = f"{what} {name} grew from {before:.4g} to {value:.4g} over {step - start} steps (to step {step})"
                growing.setdefault(what, []).append((value, text))
        for what, texts in growing.items():  # of each kind the largest number; again when that has doubled
            largest, text = max(texts)
            if largest >= 2 * self._said.get(what, 0.0):
                self._said[what] = largest
                found.append(text + (f"; {len(texts) - 1} more grow" if texts[1:] else ""))
        return found

    def _nonfinite(self, record: dict[str, Any]) -> Iterator[str]:
        """What is not finite, of each kind the first, once until all are finite again."""
        now: dict[str, list[str]] = {}
        for what, text in _OF_PARAMETERS.items():
            bad = [name for name, numbers in record["parameters"].items() if not math.isfinite(numbers.get(what, 0.0))]
            now[text] = [repr(name) for name in bad]
        now["what a module returns,"] = [
            repr(n) for n, numbers in record["activations"].items() if not math.isfinite(numbers["norm"])
        ]
        heads = [(name, i, v) for name, values in record["attention"].items() for i, v in enumerate(values)]
        now["the attention logits of"] = [f"head {i} of {name!r}" for name, i, v in heads if math.isnan(v) or v == math.inf]
        for text, names in now.items():
            if names and text not in self._not_finite:
                others = f" and {len(names) - 1} others" if names[1:] else ""
                yield f"{text} {names[0]}{others}: entries are NaN or infinite (step {record['step']})"
        self._not_finite = {text for text, names in now.items() if names}


_OF_PARAMETERS = {"norm": "parameter", "gradient": "the gradient of", "update": "the update of"}


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, numbers in record["parameters"].items():
        yield "the norm of parameter", repr(name), numbers["norm"]
    for name, numbers in record["activations"].items():
        yield "the norm of what a module returns,", repr(name) + ",", numbers["norm"]
    for name, heads in record["attention"].items():
        for i, value in enumerate(heads):
            yield "the largest attention logit of", f"head {i} of {name!r}", value


def _grows(what: str, series: _Series, value: float) -> bool:
    floor = _SATURATED if "logit" in what else _ACTIVATION if "returns" in what else _NORM
    first, ratios = series.first or 0.0, series.ratios
    if first and value > max(100 * first, 10 * floor) and value > series.last[0][1]:
        return True
    if not ratios or min(ratios) <= 1:
        return False
    total = math.prod(ratios)
    if "logit" in what:
        return value > floor and total > 2
    half = len(ratios) // 2
    is_steady = statistics.geometric_mean(ratios[-half:]) >= 0.97 * statistics.geometric_mean(ratios[:half])
    return value > max(floor, 10 * first) and total > 3 and is_steady
