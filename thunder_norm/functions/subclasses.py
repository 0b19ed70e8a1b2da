"""The transform that interprets tensor wrapper subclasses."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.functions.jitted_gradients import functional, with_missing_gradients
from thunder_norm.functions.transformed import compiles
from thunder_norm.subclass import boundary, boundary_passes, interception, values
from thunder_norm.subclass.acquisition import Acquisition, Phase
from thunder_norm.subclass.broadcast import broadcast_scalars
from thunder_norm.subclass.cleanup import without_copies
from thunder_norm.subclass.differentiation import differentiate
from thunder_norm.subclass.mutations import check_mutations
from thunder_norm.subclass.random_ops import check_random
from thunder_norm.subclass.replaced import returning_current
from thunder_norm.tracing import compilation
from thunder.core.proxies import TensorProxy


@compiles(torch.Tensor)
class SubclassTransform(interception.Interpreting):
    """Interpret every traceable wrapper subclass while the trace is acquired.

    ``thunder.jit(f, transforms=[SubclassTransform()])`` accepts instances of any class made with
    ``torch.Tensor._make_wrapper_subclass`` that has ``__torch_dispatch__``, ``__tensor_flatten__`` and
    ``__tensor_unflatten__``: as arguments, as parameters and buffers, constructed inside, and as results.  The computation
    runs on their inner tensors.

    Gradients are PyTorch's where a wrapper requires grad itself: torch's formulas, dispatched to the class again, and the
    backward of every ``torch.autograd.Function`` on the way.  Where no wrapper does, gradients flow into inner tensors that
    require grad, which eager mode has not; a program may not have both.

    Raises (when the jitted function is called):
        UnsupportedSubclassError: a class does not follow the protocol.
        UnsupportedOpError: an operation on a wrapper has no place in a trace.
        DataDependentError: the program needs the value of a tensor.
    """

    def acquired(self, found: Any) -> None:
        """Have a program on plain tensors that is to be differentiated be one without in-place operations."""
        acquisition = interception.finished_acquisition()
        if acquisition is not None and not acquisition.has_wrappers and torch.is_grad_enabled():
            found.computation_trace = functional(found.computation_trace)

    def transform_traces_pre_prologue(
        self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, *, executors_list: Any
    ):
        """Lower wrappers to their inner tensors; see `thunder_norm.subclass.boundary`."""
        acquisition = interception.take_acquisition()
        if acquisition is None:  # another transform of ours has done it
            return prologue_trace, computation_trace, epilogue_trace
        acquisition.phase = Phase.FINISHED
        acquisition.refused.check(acquisition.has_wrappers)
        values.check_numbers(computation_trace)
        traces = returning_current(acquisition, (prologue_trace, computation_trace, epilogue_trace))
        joint = differentiate(acquisition, traces[1]) if acquisition.autograd.is_running else None
        prologue, computation, epilogue = boundary.lower(acquisition, traces, joint, executors_list[0])
        if acquisition.has_wrappers:
            compilation.forget_earlier_traces()  # the first trace users see is the program on plain tensors
            if torch.is_grad_enabled():
                check_mutations(computation)
                check_random(computation)
                computation = with_missing_gradients(computation, executors_list[0])
            traces = prologue, broadcast_scalars(computation), epilogue
            if torch.is_grad_enabled() and not acquisition.is_transformed:
                traces = boundary_passes.detach_inactive(traces)
            return boundary_passes.check_what_leaves(self.transform_lowered(acquisition, traces))
        if torch.is_grad_enabled() and any(isinstance(p, TensorProxy) and p.requires_grad for p in computation.args):
            computation = broadcast_scalars(with_missing_gradients(computation, executors_list[0]))
        return boundary_passes.check_what_leaves((prologue, computation, epilogue))

    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        """Tidy up the program that runs; leave those without wrappers alone."""
        computation_trace = super().transform_trace_post_optimization(computation_trace, **kwargs)
        return without_copies(computation_trace) if interception.is_interpreted() else computation_trace

    def transform_lowered(self, acquisition: Acquisition, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """What a derived transform does once there are only plain tensors left."""
        return traces
