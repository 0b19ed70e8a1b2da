"""Torch's operator database: second derivatives of each differentiable operator in float64, first ones in complex128.

What is tried, and against what, is said in `tests/transform_coverage.py`, which keeps what each operator came to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.testing._internal.common_methods_invocations import op_db

import tests.transform_coverage as coverage
from tests.op_coverage import op_name

from .program import Kind, Outcome
from .runner import Report

_KINDS: dict[str, Kind] = {"skipped": "no oracle", "passed": "right", "refused": "refused"}


@dataclass(frozen=True)
class Operator:
    """One operator of the database under one nest of transforms."""

    transform: str
    name: str

    def run(self) -> Outcome:
        verdict, reason = coverage.measure(self.transform, _operators()[self.name])
        if verdict in _KINDS:
            return Outcome(_KINDS[verdict], reason)
        return Outcome("wrong" if reason.startswith("AssertionError") else "error", reason)

    def smaller(self) -> Iterable[Operator]:
        return ()

    def source(self) -> str:
        return f"python -m tests.transform_coverage {self.transform} {self.name}"

    def labels(self) -> Sequence[str]:
        return [self.transform, self.name]


@functools.cache
def _operators() -> dict[str, Any]:
    return {op_name(op): op for op in op_db}


def programs() -> Sequence[Operator]:
    """All operators under all nests."""
    return [Operator(t, op_name(op)) for t in coverage.SECOND for op in op_db if coverage.is_tried(op, t)]


def keep(report: Report) -> None:
    """Write what the operators came to into the lists of `tests/transform_coverage`."""
    verdicts = {kind: verdict for verdict, kind in _KINDS.items()}
    for transform in coverage.SECOND:
        of_transform = [r for r in report.results if transform in r.labels]
        coverage.write(transform, {r.labels[1]: (verdicts.get(r.kind, "failed"), r.detail) for r in of_transform})
