"""Growth that precedes divergence.

Healthy runs grow too: what starts at zero grows by any factor, in the first steps as fast as a power of the step number, and attention
sharpens.  So a factor alone says nothing.  What is said is

- of numbers that are not finite: at once;
- of the largest logit of an attention head: that it is above 50, where the softmax has saturated (exp(-50) is below all float32 resolution),
  has risen between all of the last six samples, and has doubled over them;
- of norms of parameters and of what modules return: that it is above 10 times the first one seen and above 10 (of activations 100), has risen
  between all of the last six samples to three times what it was, and by a factor between samples that does not shrink.  A power of the step number does
  not do that, an exponential does.
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
    said: float = 0.0

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

    def is_new(self, value: float) -> bool:
        """Whether it is worth saying again: it has doubled since."""
        if value < 2 * self.said:
            return False
        self.said = value
        return True


class Growth:
    """Judges records one after the other."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._not_finite: set[str] = set()

    def judge(self, record: dict[str, Any]) -> list[str]:
        """What there is to say about a record of a training monitor, after those before it."""
        step = record["step"]
        found = [text for text in self._nonfinite(record) if text is not None]
        for what, name, value in _numbers(record):
            series = self._series.setdefault((what, name), _Series())
            if not math.isfinite(value):
                series.last.clear()
                continue
            series.add(step, value)
            if _grows(what, series, value) and series.is_new(value):
                (start, before), *_ = series.last
                found.append(f"{what} {name} grew from {before:.4g} to {value:.4g} over {step - start} steps (to step {step})")
        return found

    def _nonfinite(self, record: dict[str, Any]) -> Iterator[str | None]:
        """Each thing that is not finite, once until it is finite again; of activations the first module's."""
        now: dict[str, str] = {}
        for name, numbers in record["parameters"].items():
            for what, text in _OF_PARAMETERS.items():
                if not math.isfinite(numbers.get(what, 0.0)):
                    now[f"{what} {name}"] = f"{text} {name!r}"
        bad = [name for name, numbers in record["activations"].items() if not math.isfinite(numbers["norm"])]
        if bad:
            now["activations"] = (
                f"what {bad[0]!r} returns, and {len(bad) - 1} other modules," if bad[1:] else f"what {bad[0]!r} returns"
            )
        for name, heads in record["attention"].items():
            worst = [i for i, v in enumerate(heads) if math.isnan(v) or v == math.inf]
            if worst:
                now[f"attention {name}"] = f"the attention logits of {name!r}, head {worst[0]},"
        for key, text in now.items():
            if key not in self._not_finite:
                yield f"{text} has entries that are NaN or infinite (step {record['step']})"
        self._not_finite = set(now)


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
    ratios = series.ratios
    if not ratios or min(ratios) <= 1:
        return False
    total = math.prod(ratios)
    if "logit" in what:
        return value > _SATURATED and total > 2
    floor = _ACTIVATION if "returns" in what else _NORM
    half = len(ratios) // 2
    is_steady = statistics.geometric_mean(ratios[-half:]) >= 0.97 * statistics.geometric_mean(ratios[:half])
    return value > max(floor, 10 * (series.first or 0.0)) and total > 3 and is_steady
