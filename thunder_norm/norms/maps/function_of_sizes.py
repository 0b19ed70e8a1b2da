"""Norm maps as functions of tensors, which transforms of functions take like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.core.tensors import describe
from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.programs import flat_program, is_bookkeeping, replayed
from thunder_norm.functions.transformed import Call, Transformed
from thunder_norm.norms.maps.norm_map import NormMap
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


class SizesFunction(Transformed):
    """The program of a norm map: a function of a dict of tensors, by name, which returns a tuple of norm sizes."""

    name = "norm map"

    def __init__(self, trace: TraceCtx):
        super().__init__(_no_function)
        self.trace = trace
        self.inputs = tuple(p.name for p in trace.args)

    def emit(self, call: Call) -> Any:
        """Write the norm map's program."""
        (sizes,) = call.args
        if not isinstance(sizes, dict) or set(sizes) != set(self.inputs):
            raise TransformError(
                with_details(
                    "the function of a norm map takes a dict with a tensor for each of its inputs",
                    expected=", ".join(self.inputs),
                    got=", ".join(map(str, sizes)) if isinstance(sizes, dict) else f"a {type(sizes).__name__}",
                )
            )
        return replayed(self.trace, [sizes[name] for name in self.inputs])


def function_of_sizes(
    norm_map: NormMap, *args: Any, normed_state_dict: Mapping[str, Any] | None = None, **kwargs: Any
) -> tuple[SizesFunction, dict[str, torch.Tensor]]:
    """The program that a norm map runs for these arguments, as a function of tensors, and the tensors it has now.

    ``function(sizes)`` is the tuple of the norm sizes (and perturbation sizes) of the outputs; ``sizes`` maps the name of each input of
    the program, such as ``x_norm_size``, to its tensor.  Transforms apply: ``vmap(function)`` maps a batch of configurations at once,
    `grad`, `jvp` and `hessian` differentiate.

    Args:
        norm_map: made by `build_norm_map`.
        args: what the norm map would be called with.
        normed_state_dict: as for the norm map.
        kwargs: as for the norm map.

    Raises:
        TransformTypeError: no norm map.
        NormMismatchError, NormMapKeyError: as the norm map.
    """
    if not isinstance(norm_map, NormMap):
        raise TransformTypeError(f"function_of_sizes needs a norm map, made by build_norm_map, got {describe(norm_map)}")
    with torch.enable_grad():  # a program acquired without gradients would be constant for reverse mode
        norm_map(*args, normed_state_dict=normed_state_dict, **kwargs)
    program = norm_map.last_program
    leaves = tree_flatten((args, kwargs))[0]
    trace, outputs = program.plan.replay.trace, program.plan.replay.outputs
    inputs = program.inputs(leaves, norm_map.sizes_given(normed_state_dict))
    operations = [b for b in trace.bound_symbols if not is_bookkeeping(b)]
    formal = [p for p in trace.args if isinstance(p, TensorProxy)]
    flat = flat_program(formal, operations, outputs)
    return SizesFunction(flat), {p.name: t.detach() for p, t in zip(formal, inputs, strict=True)}


def _no_function(sizes: dict) -> Any:
    raise NotImplementedError
