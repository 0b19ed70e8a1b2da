"""What is noted while one operation of a normed program runs, and what its rule sees around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core import context
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.subclass import trace
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.record import Recorder
from thunder_norm.tracing.locations import location_of_user


@dataclass(frozen=True)
class LiftedParameter:
    """For the report and for `ModularNorm`: which parameter was taken for what."""

    name: str
    kind: type[NormedTensor]
    elem_dims: tuple[int, ...]


class NormRecorder(Recorder):
    """Notes besides what is lifted for the operation at hand."""

    def __init__(self, acquisition: Acquisition):
        super().__init__(acquisition)
        self.leaves: list[tuple[str, tuple[torch.Tensor, ...], tuple[bool, ...]]] = []
        self.lifts: dict[tuple, NormedTensor] = {}
        self.lifted_parameters: list[LiftedParameter] = []

    def hoist_norm(self, operation: trace.OperationId, make: Callable[[], NormedTensor]) -> NormedTensor:
        """Write what makes a norm before the operation at hand, as an operation of its own."""
        return self.hoist(operation, make, lambda made: [t for t in (made.norm_size, made.perturbation_size) if t is not None])


class TracingEnvironment(context.Environment):
    """What norm rules see around them while tracing: a real operation is recorded as one operation."""

    def __init__(self, acquisition: Acquisition, recorder: Recorder):
        self.acquisition = acquisition
        self.recorder = recorder

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain fakes and record it as one operation."""
        return self.recorder.call(func, args, kwargs)

    def user_location(self) -> str | None:
        """The user's line the interpreter is at."""
        return location_of_user()
