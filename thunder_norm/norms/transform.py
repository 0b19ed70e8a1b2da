"""The transform that carries norms through a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import Mode, Sensitivity, check_mode, not_composed
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.functions.jitted import SubclassTransform
from thunder_norm.functions.transformed import compiles
from thunder_norm.norms import recurrent_modules  # noqa: F401 - has lookasides
from thunder_norm.norms import traced_initializing as _traced_initializing  # registers what it traces  # noqa: F401
from thunder_norm.norms.flat_programs import FlatModule
from thunder_norm.norms.lifts.annotations import named_annotations
from thunder_norm.norms.lifts.parameters import Policy, check_names, check_policy, tensor_names
from thunder_norm.norms.normed_mode import NormAcquisition, holds_norms, is_normed_call, normed_call
from thunder_norm.norms.overflow import refuse_overflowed
from thunder_norm.norms.scalar_fusion import fuse_scalars
from thunder_norm.subclass.backward.mutations import check_mutations
from thunder_norm.subclass.crossing import boundary_passes
from thunder_norm.subclass.interpreting.interception import is_interpreted
from thunder_norm.tracing.activity import depending
import thunder
from thunder.core.dtypes import to_torch_dtype
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


@compiles(NormedTensor)
class NormTransform(SubclassTransform):
    """Carry norms on NormedTensors; leave programs on plain tensors as they are.

    ``thunder.jit(model, transforms=[NormTransform()])``: called with plain tensors the model runs as without the
    transform (real mode; gradients that torch has a kernel for are that kernel, where no executor fuses); called with a NormedTensor, or through `thunder_norm.normed`, every operation also gives its norm.

    Args:
        parameters: the size of a parameter's norm when an operation consumes it.  ``"measured"``: its exact norm, computed
            in the trace, differentiable in the parameter.  ``"unit"``: 1.  A mapping from names to NormedTensors, numbers or
            0-dim tensors: those, read anew in each call and differentiable; parameters it does not name are measured.
        mode: "bound" (sound), "typical" (expected for independent random inputs) or "modula" (Modula's conventions).
        sensitivity: "global": constants for all tensors within the inputs' norms; "local": constants at the data at hand, where
            those are far better (normalizations, softmax, attention).  Local ones are valid to first order, at this input.
            "composed" is for eager runs and reports (`norm_sensitivity`, `norm_report`).

    Raises:
        NormMismatchError: an unknown policy, mode or sensitivity.
        NormMapKeyError: (when a module is jitted) a name the module does not have, given or in an annotation.
    """

    goes_inside = True

    def __init__(self, *, parameters: Policy = "measured", mode: Mode = "bound", sensitivity: Sensitivity = "global"):
        super().__init__()
        self.parameters = check_policy(parameters)
        self.mode = check_mode(mode)
        self.sensitivity = not_composed(sensitivity, "a trace")
        self._model: torch.nn.Module | None = None

    def transform_module(self, model: ThunderModule) -> None:
        """Check the names of given norms against the module."""
        super().transform_module(model)
        self._model = model._model
        named_annotations(model._model)  # mistakes in them are errors now
        if isinstance(self.parameters, Mapping):
            check_names(self.parameters, model._model, "NormTransform(parameters=...)")

    def new_acquisition(self) -> NormAcquisition:
        """The state for one acquisition."""
        return NormAcquisition(self.parameters, self.mode, self._model, self.sensitivity)

    def is_undone_where_it_raises(self, args: tuple, kwargs: dict) -> bool:
        """So is a call with norms, which parameters have in a trace alone."""
        return is_normed_call() or holds_norms(self._model, args, kwargs)

    def transform_lowered(self, acquisition: NormAcquisition, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """Under `torch.no_grad` perturbations go on, and nothing else does."""
        _, computation, epilogue = traces
        if epilogue is None or torch.is_grad_enabled():
            return traces
        results = boundary_passes.results_and_received(computation, epilogue)
        active = depending(computation, {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad})
        given = {p.name for p in computation.args}
        if torch.is_inference_mode_enabled() and not active.isdisjoint({p.name for p, _ in results} - given):
            raise NormMismatchError(
                "a jitted call with a perturbation_size that requires grad under torch.inference_mode(), where nothing can be "
                "differentiated: call it under torch.no_grad()"
            )
        constants = tuple(r for p, r in results if p.name not in active | given)
        return boundary_passes.pass_through_epilogue(traces, constants, (), "detach", _detached)

    def without_autograd(self, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """Perturbations alone are differentiated."""
        computation = traces[1]
        computation = boundary_passes.of_constants(computation, [p for p in computation.args if not is_norm_scalar(p)])
        check_mutations(computation)
        return traces[0], computation, traces[2]

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Fuse the norm arithmetic of a normed program; leave the others alone."""
        computation_trace = super().transform_trace_post_optimization(computation_trace, **kwargs)
        return fuse_scalars(computation_trace) if is_interpreted() else computation_trace

    def __repr__(self) -> Any:
        return f"NormTransform(parameters={self.parameters!r}, mode={self.mode!r})"


def normed(jitted: Callable) -> Callable:
    """A callable that runs a jitted function or module in normed mode, whatever its inputs.

    A model whose inputs are token ids has nothing to wrap; ``normed(jm)(ids)`` lifts its parameters where they are consumed
    and returns NormedTensors.  It shares parameters, cache and ``thunder.last_traces(jm)`` with `jitted`.

    Raises:
        NormMismatchError: `jitted` was not made by ``thunder.jit(..., transforms=[NormTransform()])``; or, in a call, a bound is not a number
            because one before it is larger than the largest float64.
    """
    if not any(isinstance(t, NormTransform) for t in getattr(jitted, "_lc_transforms", ())):
        raise NormMismatchError(
            f"normed() needs a function made by thunder.jit(..., transforms=[NormTransform()]), got {type(jitted).__name__}"
        )

    flat = _Flat(jitted)

    def call(*args: Any, **kwargs: Any) -> Any:
        with normed_call():
            try:
                result = flat(args, kwargs) if flat.error else jitted(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - raised again, but for one kind
                result = flat(args, kwargs, e)
        return refuse_overflowed(result, (args, kwargs), jitted, has_data=True)

    return functools.update_wrapper(call, jitted, updated=()) if hasattr(jitted, "__name__") else call


@dataclass
class _Flat:
    """What runs for a jitted module that takes derivatives: its operations written out, anew in each call, which sees what has changed.

    Attributes:
        jitted: the module as it is.
        error: what tracing it met, once it has been met.
    """

    jitted: Any
    error: Exception | None = None
    _found: tuple[FlatModule, Callable] | None = None

    def __call__(self, args: tuple, kwargs: dict, error: Exception | None = None) -> Any:
        """The result of a call.

        Raises:
            Exception: `error`, or the first one, where nothing can be written out.
        """
        if error is not None and self.error is not None:
            raise error  # of the operations themselves
        assert (met := error or self.error) is not None
        module = FlatModule.of(self._model(), args, kwargs, met, before=self._found and self._found[0])
        if self._found is None or not module.is_like(self._found[0]):
            own = next(t for t in self.jitted._lc_transforms if isinstance(t, NormTransform))
            transform = NormTransform(parameters=own.parameters, mode=own.mode, sensitivity=own.sensitivity)
            self._found = module, thunder.jit(module, transforms=[transform])
        self.error = self.error or error
        return self._found[1](*args, **kwargs)

    def _model(self) -> torch.nn.Module | None:
        """The module that was jitted, if its tensors are those that the jitted one runs with."""
        if not isinstance(self.jitted, ThunderModule):
            return None
        model = self.jitted._model
        held = {**dict(self.jitted.named_parameters()), **dict(self.jitted.named_buffers())}
        return model if all(held.get(name, t) is t for name, t in tensor_names(model).items()) else None


def _detached(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach() for t in tensors)


def is_norm_scalar(p: Any) -> bool:
    """Whether a proxy is a norm_size or perturbation_size: 0-dim float64."""
    return isinstance(p, TensorProxy) and p.ndim == 0 and to_torch_dtype(p.dtype) is NORM_DTYPE
