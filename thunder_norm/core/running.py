"""Who runs operations on normed tensors: `dispatch`, which enters itself here so that the tensors below it can reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Runner(NamedTuple):
    """How operations are run.

    Attributes:
        torch_function: ``(func, args, kwargs)``, a function of torch with a normed tensor among its arguments.
        torch_dispatch: the same for an aten overload.
        run_real: the same on plain tensors, as one operation (a trace records it as such).
        runs_model: whether a model is being run for its norms.
    """

    torch_function: Callable[[Any, tuple, dict], Any]
    torch_dispatch: Callable[[Any, tuple, dict], Any]
    run_real: Callable[[Callable, tuple, dict], Any]
    runs_model: Callable[[], bool]


_entered: list[Runner] = []


def run_by(runner: Runner) -> None:
    """Have operations run by `runner` from here on."""
    _entered[:] = [runner]


def runner() -> Runner:
    """What runs operations."""
    return _entered[0]
