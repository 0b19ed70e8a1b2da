"""Parameters that get no gradient while others do: behind units that are never active, or experts that get nothing.

Gradients that are 0 to the last bit in one sample say nothing: what stands before an adapter, or a branch, that starts at 0 has none in the
first step.  So what is said is that they were in all of the last samples, in each of which another parameter had one that was not.
"""

from __future__ import annotations

from typing import Any

from thunder_norm.modular.monitoring.growth import WINDOW


class Dead:
    """Judges records one after the other.

    Attributes:
        counts: name -> in how many samples without a break its gradient was 0.
    """

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts: dict[str, int] = dict(counts or {})

    def judge(self, record: dict[str, Any]) -> str | None:
        """What there is to say about a record of a training monitor, after those before it; of each parameter once, until it has a gradient again."""
        gradients = {name: numbers["gradient"] for name, numbers in record["parameters"].items() if "gradient" in numbers}
        if not any(gradients.values()):  # NaN is one
            return None
        self.counts = {name: self.counts.get(name, 0) + 1 for name, size in gradients.items() if size == 0}
        names = [name for name, count in self.counts.items() if count == WINDOW]
        if not names:
            return None
        others = f" and of {len(names) - 1} more" if names[1:] else ""
        return (
            f"the gradient of {names[0]!r}{others} was 0 in the last {WINDOW} samples (to step {record['step']}), others were not: "
            "nothing that follows is active, or moves with it"
        )
