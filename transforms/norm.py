"""The transform that carries norms through a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from thunder.core.module import ThunderModule

from thunder_norm.dispatch import Mode, check_mode
from thunder_norm.normed_mode import NormAcquisition
from thunder_norm.parameters import Annotation, Policy, check_names, check_policy, named_annotations
from thunder_norm.transforms.subclass import SubclassTransform


class NormTransform(SubclassTransform):
    """Carry norms on NormedTensors; leave programs on plain tensors as they are.

    ``thunder.jit(model, transforms=[NormTransform()])``: called with plain tensors the model runs exactly as without the
    transform (real mode); called with a NormedTensor, or through `thunder_norm.normed`, every operation also gives its norm.

    Args:
        parameters: the size of a parameter's norm when an operation consumes it.  ``"measured"``: its exact norm, computed
            in the trace, differentiable in the parameter.  ``"unit"``: 1.  A mapping from names to NormedTensors, numbers or
            0-dim tensors: those, read anew in each call and differentiable; parameters it does not name are measured.
        mode: "bound" (sound), "typical" (expected for independent random inputs) or "modula" (Modula's conventions).

    Raises:
        NormMismatchError: an unknown policy or mode.
        NormMapKeyError: (when a module is jitted) a name the module does not have.
    """

    def __init__(self, *, parameters: Policy = "measured", mode: Mode = "bound"):
        super().__init__()
        self.parameters = check_policy(parameters)
        self.mode = check_mode(mode)
        self._annotations: dict[str, Annotation] = {}

    def transform_module(self, model: ThunderModule) -> None:
        """Check the names of given norms against the module and read its annotations."""
        original: torch.nn.Module = model._model
        if isinstance(self.parameters, Mapping):
            check_names(self.parameters, original, "NormTransform(parameters=...)")
        self._annotations = named_annotations(original)

    def new_acquisition(self) -> NormAcquisition:
        """The state for one acquisition."""
        return NormAcquisition(self.parameters, self.mode, self._annotations)

    def __repr__(self) -> Any:
        return f"NormTransform(parameters={self.parameters!r}, mode={self.mode!r})"
