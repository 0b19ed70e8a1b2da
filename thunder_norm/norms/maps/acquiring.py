"""Acquiring a program of a norm map: what stands for its arguments meanwhile, and which values it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from thunder_norm import first_calls
from thunder_norm.core.context import Mode
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import NormMismatchError, ThunderNormError
from thunder_norm.model_state.initial_buffers import with_initial_buffers
from thunder_norm.model_state.shards import as_one_process, is_collective
from thunder_norm.norms.lifts.parameters import tensor_names
from thunder_norm.norms.maps import refused_maps
from thunder_norm.norms.maps.conditions import ValuesOfCall
from thunder_norm.norms.maps.dynamic_shapes import DynamicDims
from thunder_norm.norms.maps.norm_map_program import Program
from thunder_norm.norms.maps.norm_map_trace import Given
from thunder_norm.norms.maps.sources import OfArgument
from thunder_norm.norms.undisturbed import undisturbed
from thunder_norm.norms.without_data import on_one_device, zeros_like


@dataclass(frozen=True)
class Acquiring:
    """What all programs of a norm map are acquired of."""

    model: Callable
    examples: Sequence[Any]  # the flattened example arguments
    spec: TreeSpec
    dims: DynamicDims
    mode: Mode

    def program(self, leaves: list[Any], given: Given) -> Program:
        """The program for the flattened arguments of a call."""
        # which of its results are differentiated is decided when it is called
        with (
            first_calls.shown("norm map"),
            as_one_process(self.model),
            undisturbed(self.model, leaves),
            with_initial_buffers(self.model),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            try:
                program = self._where_it_is(leaves, given)
            except Exception:  # torch's, of two devices, or ours, of an argument whose values are taken for unknown
                plain = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor)]
                with on_one_device(self.model, plain) as is_mixed:
                    if not is_mixed:
                        raise
                    program = self._where_it_is(leaves, given)
        for s in program.plan.sources:
            # what stood for an argument on meta had values, the argument has none
            if isinstance(s, OfArgument) and s.attribute is None and (t := leaves[s.position]).is_meta:
                tensor = f"{t.dtype} of {tuple(t.shape)}"
                raise refused_maps.depends_on_data("the values of an argument, which is on the meta device", tensor)
        return program

    def _where_it_is(self, leaves: list[Any], given: Given) -> Program:
        """A program that asks for no values, so that it serves all; if there is none, one for the values that it asks for."""
        inputs = self.placeholders(leaves)
        # each rank has its own arguments: one that acquires for the values of its own would wait for the others
        known = [] if is_collective() else [x for x, leaf in zip(inputs, leaves, strict=True) if _has_values(x, leaf)]
        values = ValuesOfCall(known, may_be_read=False)
        try:
            return self._of_values(inputs, values, given)
        except Exception:
            if not values.were_asked_for:
                raise
            return self._of_values(inputs, ValuesOfCall(known, may_be_read=True), given)

    def _of_values(self, inputs: list[Any], known: ValuesOfCall, given: Given) -> Program:
        program = Program.acquire(self.model, inputs, self.spec, given, known, self.mode)
        for other in self.dims.variants(inputs):
            try:
                variant = Program.acquire(self.model, other.inputs, self.spec, given, known, self.mode)
            except ThunderNormError:
                raise
            except Exception as e:
                raise NormMismatchError(
                    f"the model does not run with the dynamic dimension {other.name!r} of size {other.other_size} in place of "
                    f"{other.size}: leave it out of dynamic_shapes"
                ) from e
            program.generalize(variant, other)
        return program

    def placeholders(self, leaves: list[Any]) -> list[Any]:
        """The arguments over backings without memory, on the device of the model's parameters."""
        found: list[Any] = []
        for leaf, example in zip(leaves, self.examples, strict=True):
            x = _placeholder(leaf, example, self.model)
            is_repeated = isinstance(x, torch.Tensor) and any(x is y for y in found)
            found.append(x.view_as(x) if is_repeated else x)  # the next call may give two tensors
        return found


def _placeholder(leaf: Any, example: Any, model: Callable) -> Any:
    """What stands for one argument while the program is acquired: norms over a backing without memory.

    Raises:
        NormMismatchError: a NormedTensor in place of something that is not a floating tensor.
    """
    if not isinstance(example, torch.Tensor):
        if isinstance(leaf, NormedTensor):
            raise NormMismatchError(f"a {type(leaf).__name__} was given in place of {example!r}, which is not a tensor")
        return leaf
    device = _device(example, model)
    if isinstance(leaf, NormedTensor):
        if not has_norm(example):
            raise NormMismatchError(f"a {type(leaf).__name__} was given in place of a tensor of {example.dtype}")
        backing = zeros_like(example, device)
        return type(leaf)._wrap(backing, leaf.norm_size, leaf.perturbation_size, leaf.elem_dims)
    if isinstance(leaf, torch.Tensor) and leaf.device == device:
        return leaf
    return zeros_like(example, device)


def _device(example: torch.Tensor, model: Callable) -> torch.device:
    """Where the program runs: with the parameters, if they are all elsewhere."""
    devices = [t.device for t in tensor_names(model).values()] if isinstance(model, torch.nn.Module) else []
    return example.device if example.device in devices or not devices else devices[0]


def _has_values(placeholder: Any, leaf: Any) -> bool:
    """Whether an argument stands for itself, and has data."""
    is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, NormedTensor)
    return is_plain and leaf.device == placeholder.device and not leaf.is_meta
