"""Programs of a user's ``thunder.jit``: `SubclassTransform`, and what transforms that leave wrappers alone have in common.

Thunder differentiates a jitted program itself.  Where its gradients are wrong, for real numbers only, or there are none, operations have
gradients of ours (`missing_gradients`).  In-place operations on what the program made become operations that
make new tensors: Thunder's backward would read what was written over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from thunder_norm.errors import TransformError, UnsupportedOpError, with_details
from thunder_norm.functions.custom import CustomOperation
from thunder_norm.functions.missing_gradients import with_missing_gradients
from thunder_norm.functions.transformed import Transformed, compiles
from thunder_norm.functions.writes.computed_again import keep_what_is_written
from thunder_norm.functions.writes.functionalization import without_mutations
from thunder_norm.functions.writes.recorded_inputs import handing_on
from thunder_norm.subclass.acquiring import values
from thunder_norm.subclass.acquiring.acquisition import Acquisition, Phase
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.backward.differentiation import differentiate
from thunder_norm.subclass.backward.followed import started_histories
from thunder_norm.subclass.backward.hooks_of_backward import check_hooks_of_inputs
from thunder_norm.subclass.backward.mutations import check_mutations
from thunder_norm.subclass.crossing import boundary, boundary_passes
from thunder_norm.subclass.crossing.broadcast import broadcast_scalars
from thunder_norm.subclass.crossing.cleanup import without_copies
from thunder_norm.subclass.crossing.devices import apart_by_device
from thunder_norm.subclass.crossing.recorded_writes import returning_recorded
from thunder_norm.subclass.crossing.replaced import returning_current
from thunder_norm.subclass.crossing.retained import keeping_gradients
from thunder_norm.subclass.crossing.returned_inputs import returning_inputs
from thunder_norm.subclass.crossing.tape_inputs import hand_on_inputs, tape_of
from thunder_norm.subclass.crossing.turns import awaited, with_all_draws
from thunder_norm.subclass.interpreting import interception
from thunder_norm.subclass.interpreting.opaque_traces import check_computation
from thunder_norm.tracing import compilation, hooks
from thunder_norm.tracing.activity import depending, propagate
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, from_trace, tracectx

# -- transforms that leave wrappers alone ---------------------------------------------------------------------------------


class Watching(interception.Watching):
    """A transform that leaves wrappers alone, of programs that Thunder may differentiate."""

    def acquired(self, found: Any) -> None:
        """Have a program that is to be differentiated be one without in-place operations, and no other be differentiated.

        Its gradients are of the shapes of what they are for.
        """
        trace = found.computation_trace
        if _note_recorded(trace):
            functional(found)
            found.computation_trace = broadcast_scalars(found.computation_trace)
        else:
            found.computation_trace = boundary_passes.of_constants(for_regions(trace), trace.args)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, *, executors_list: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Refuse a program whose numbers are values of tensors, and have gradients be torch's, of inputs that are written into too.

        Numbers are drawn that nobody uses: those that are drawn later are others.
        """
        values.check_numbers(computation_trace)
        if not interception.is_interpreted():
            computation_trace = with_all_draws(computation_trace)
        if not is_grad_enabled():
            return prologue_trace, computation_trace, epilogue_trace
        moved = {p.name for p in computation_trace.args if isinstance(p, TensorProxy) and p.requires_grad}
        acquisition = interception.finished_acquisition()  # of a transform that interprets wrappers, and comes later
        is_ours = acquisition is None or not acquisition.has_wrappers
        if moved and is_ours:
            moving = depending(computation_trace, moved)
            computation_trace = with_missing_gradients(computation_trace, executors_list[0], moving)
        traces = prologue_trace, _with_gradients_of_given(computation_trace), epilogue_trace
        return _with_started(traces, {}) if moved and is_ours else traces


# -- the transform that interprets tensor wrapper subclasses ------------------------------------------------------------


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

    Classes that cannot be taken apart, because they lack ``__tensor_flatten__`` and nobody said it for them with
    `register_flatten`, are an error.  With ``opaque="run"`` torch runs their operations on the objects themselves, in the order
    of the program; the trace shows each as one call.  Their results must be of the classes, shapes and dtypes that they were of
    while the trace was acquired.

    Args:
        opaque: what becomes of objects that cannot be taken apart.

    Raises (when the jitted function is called):
        UnsupportedSubclassError: a class does not follow the protocol.
        UnsupportedOpError: an operation on a wrapper has no place in a trace.
        DataDependentError: the program needs the value of a tensor.
    """

    hands_back_inputs = True  # as the very objects

    def __init__(self, *, opaque: Literal["error", "run"] = "error") -> None:
        super().__init__()
        if opaque not in ("error", "run"):
            raise TransformError(with_details(f"opaque={opaque!r}", possible="'error', 'run'"))
        self.opaque = opaque

    def acquired(self, found: Any) -> None:
        """Have a program on plain tensors that is to be differentiated be one without in-place operations."""
        super().acquired(found)
        acquisition = interception.finished_acquisition()
        if acquisition is not None and not (acquisition.has_wrappers or acquisition.opaque.is_met):
            if _note_recorded(found.computation_trace):
                functional(found)
            else:
                found.computation_trace = for_regions(found.computation_trace)

    def transform_traces_pre_prologue(
        self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, *, executors_list: Any
    ):
        """Lower wrappers to their inner tensors; see `thunder_norm.subclass.crossing.boundary`."""
        acquisition = interception.take_acquisition()
        if acquisition is None:  # another transform of ours has done it
            return prologue_trace, computation_trace, epilogue_trace
        try:
            traces = self._lowered(acquisition, (prologue_trace, computation_trace, epilogue_trace), executors_list)
        finally:
            acquisition.forget_inputs()
        return traces if is_grad_enabled() else self.without_autograd(traces)

    def _lowered(self, acquisition: Acquisition, acquired: boundary_passes.Traces, executors_list: Any) -> boundary_passes.Traces:
        computation_trace = acquired[1]
        acquisition.phase, acquisition.finished_trace = Phase.FINISHED, computation_trace
        acquisition.refused.check(acquisition.has_wrappers)
        values.check_numbers(computation_trace)
        check_computation(acquisition, computation_trace)
        traces = returning_current(acquisition, acquired)
        traces = returning_recorded(acquisition, traces)
        joint = differentiate(acquisition, traces[1]) if acquisition.autograd.is_running else None
        check_hooks_of_inputs(acquisition, traces[1])
        traces = keeping_gradients(acquisition, traces)
        started = started_histories(acquisition, traces[1], joint is not None)
        if joint is not None and not joint.made_leaves:
            joint.tape = tape_of(acquisition, traces[1], joint)
        prologue, computation, epilogue = boundary.lower(acquisition, traces, joint, executors_list[0])
        prologue, computation, epilogue = hand_on_inputs((prologue, awaited(acquisition, computation), epilogue), joint)
        if acquisition.has_wrappers:
            compilation.forget_earlier_traces()  # the first trace users see is the program on plain tensors
            if torch.is_grad_enabled():
                check_mutations(computation)
                computation = _with_gradients_of_given(with_missing_gradients(computation, executors_list[0]))
            traces = prologue, apart_by_device(broadcast_scalars(computation)), epilogue
            if not acquisition.is_transformed:
                traces = _with_started(traces, started)
            traces = boundary_passes.check_what_leaves(self.transform_lowered(acquisition, traces))
            return returning_inputs(acquisition, traces) if self.hands_back_inputs else traces
        moved = {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad}
        if is_grad_enabled() and (moved or started):
            moving = depending(computation, moved)
            computation = broadcast_scalars(with_missing_gradients(computation, executors_list[0], moving))
            computation = _with_gradients_of_given(computation)
        traces = prologue, computation, epilogue
        if (moved or started) and not acquisition.is_transformed:
            traces = _with_started(traces, started)
        return boundary_passes.check_what_leaves(traces)

    def without_autograd(self, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """The program of a call under `torch.no_grad`."""
        return traces[0], boundary_passes.of_constants(traces[1], traces[1].args), traces[2]

    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        """Tidy up the program that runs; leave those without wrappers alone."""
        if interception.is_interpreted():
            computation_trace = without_copies(
                computation_trace
            )  # which says anew where names are deleted: regions that do it come last
        return super().transform_trace_post_optimization(computation_trace, **kwargs)

    def transform_lowered(self, acquisition: Acquisition, traces: boundary_passes.Traces) -> boundary_passes.Traces:
        """What a derived transform does once there are only plain tensors left."""
        return traces


hooks.brings(Transformed, SubclassTransform)
hooks.leads(SubclassTransform)


def _with_started(traces: boundary_passes.Traces, started: Mapping[str, bool]) -> boundary_passes.Traces:
    """A program whose results require grad where they do in eager mode, those too that have histories which start in it."""
    if not is_grad_enabled():
        return boundary_passes.with_histories(traces, started)
    prologue, computation, epilogue = traces
    if nowhere := _leading_nowhere(computation):
        traces = prologue, boundary_passes.of_constants(computation, computation.args), epilogue
    return boundary_passes.without_inactive(traces, {**nowhere, **started})


def _leading_nowhere(computation: TraceCtx) -> dict[str, bool]:
    """The results of a program that have histories in eager mode, if none has a gradient for any input.

    The backward of a ``torch.autograd.Function`` may return None alone.  Thunder makes no backward part, and no history, of such a program.
    """
    reached = {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad}
    if not any(isinstance(b.sym.id, CustomOperation) and not all(b.sym.id.has_gradient) for b in computation.bound_symbols):
        return {}
    results = [p for p in tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0] if isinstance(p, TensorProxy)]
    active, given = depending(computation, reached), set(reached)
    for bsym in computation.bound_symbols:
        operation = bsym.sym.id
        if not isinstance(operation, CustomOperation):
            propagate(bsym, reached)
        elif any(has and p.name in reached for has, p in zip(operation.has_gradient, bsym.flat_proxy_args, strict=False)):
            reached |= {p.name for p in bsym.flat_proxy_outs}
    found = {p.name: False for p in results if p.name in active - given}
    return {} if any(p.name in reached - given for p in results) else found


# -- what Thunder differentiates -----------------------------------------------------------------------------------------


def _note_recorded(trace: TraceCtx) -> bool:
    """Whether results of a program on plain tensors have histories, which Thunder is told if they are made in a region with gradients alone."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return torch.is_grad_enabled()
    given = {p.name: p for p in trace.args if isinstance(p, TensorProxy)}
    recorded = depending(trace, {name for name, p in given.items() if p.requires_grad}) - given.keys()
    copies = [p for b in trace.bound_symbols for copy in copies_in(b) for p in copy.flat_proxy_args]
    results = [p for p in tree_flatten(trace.bound_symbols[-1].args)[0] if isinstance(p, Proxy)]
    is_recorded = not recorded.isdisjoint(p.name for p in (*results, *copies))
    # until the program is compiled: what is written from now on is differentiated
    get_compile_data().is_grad_enabled = is_recorded
    return is_recorded


def functional(found: Any) -> None:
    """Have a computation that Thunder is going to differentiate be without copies into what it made: they would be in its backward's way.

    What autograd records of its inputs is written by the epilogue.
    """
    trace = found.computation_trace
    keep_what_is_written(trace)
    moved = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad}
    if not moved:
        found.computation_trace = for_regions(trace)
        return
    traces, recorded = handing_on((found.prologue_trace, trace, found.epilogue_trace), moved)
    found.prologue_trace, trace, found.epilogue_trace = traces
    with tracectx(from_trace(trace)):
        found.computation_trace = without_mutations(trace, keeps_foreign=True, recorded=recorded)


def for_regions(trace: TraceCtx) -> TraceCtx:
    """A computation that nobody differentiates, without copies into what it made if an executor has regions, which end at a copy.

    It is left as it is where it would be refused: memory that several names share is followed by what runs.
    """
    if not any(getattr(e, "compiles_writes", False) for e in get_compile_data().executors_list):
        return trace
    try:
        constant = boundary_passes.of_constants(trace, trace.args)
        with tracectx(from_trace(constant)):
            return without_mutations(constant, keeps_foreign=True, has_histories=False)
    except (TransformError, UnsupportedOpError):
        return trace


def _with_gradients_of_given(trace: TraceCtx) -> TraceCtx:
    """A computation that returns its differentiated inputs as they were given, and what they became besides.

    Thunder asks for gradients of what an input became in place, which are none, or those of the value after the writing.
    """
    *body, returned = trace.bound_symbols
    given = returned.args[0]
    late = {
        i: p
        for i, (p, a) in enumerate(zip(given["flat_args"], trace.args, strict=False))  # another transform may have added some
        if isinstance(a, TensorProxy) and a.requires_grad and p.name != a.name
    }
    if not late:
        return trace
    new = from_trace(trace)
    with tracectx(new):
        became = tuple(TensorProxy(like=p, requires_grad=False) for p in late.values())
    renewed = prims.update_aliases.bind(tuple(late.values()), output=became)
    arguments = [trace.args[i] if i in late else p for i, p in enumerate(given["flat_args"])]
    new.bound_symbols = [*body, renewed, returned.from_bsym(args=({**given, "flat_args": [*arguments, *became]},))]
    return new
