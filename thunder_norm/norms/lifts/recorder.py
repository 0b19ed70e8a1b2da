"""What is noted while one operation of a normed program runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.recording import trace
from thunder_norm.subclass.recording.record import Recorder


class NormRecorder(Recorder):
    """Notes besides what is lifted for the operation at hand."""

    def __init__(self, acquisition: Acquisition):
        super().__init__(acquisition)
        self.leaves: list[tuple[str, tuple[torch.Tensor, ...], tuple[bool, ...]]] = []
        self.lifts: dict[tuple, NormedTensor] = {}

    def hoist_norm(self, operation: trace.OperationId, make: Callable[[], NormedTensor]) -> NormedTensor:
        """Write what makes a norm before the operation at hand, as an operation of its own."""
        return self.hoist(operation, make, lambda made: [t for t in (made.norm_size, made.perturbation_size) if t is not None])
