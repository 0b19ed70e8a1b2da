"""Programs of a user's ``thunder.jit``: `SubclassTransform`, and gradients by our rules.

Thunder differentiates a jitted program itself.  Where its gradients are wrong, for real numbers only, or there are none: an operation
on complex numbers, or one that Thunder has no gradient for (round, lerp), becomes one of our own, which consists of it, so that
executors run it as before, and is differentiated as `grad` would.  In-place operations on what the program made become operations that
make new tensors: Thunder's backward would read what was written over.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Literal

import torch

from thunder_norm.errors import TransformError, with_details
from thunder_norm.functions.functionalization import without_mutations
from thunder_norm.functions.opaque import is_opaque
from thunder_norm.functions.programs import flat_program, flat_proxies, is_complex, is_differentiable, renewed_program, replayed
from thunder_norm.functions.registry import decomposed
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.rules import activations
from thunder_norm.functions.rules.dropouts import draws_noise
from thunder_norm.functions.rules.indexing import has_mask
from thunder_norm.functions.transformed import Transformed, compiles
from thunder_norm.subclass import boundary, boundary_passes, interception, values
from thunder_norm.subclass.acquisition import Acquisition, Phase
from thunder_norm.subclass.broadcast import broadcast_scalars
from thunder_norm.subclass.cleanup import without_copies
from thunder_norm.subclass.differentiation import differentiate, has_tape
from thunder_norm.subclass.followed import started_histories
from thunder_norm.subclass.hooks_of_backward import check_hooks_of_inputs
from thunder_norm.subclass.mutations import check_mutations
from thunder_norm.subclass.opaque_traces import check_computation
from thunder_norm.subclass.recorded_writes import returning_recorded
from thunder_norm.subclass.replaced import returning_current
from thunder_norm.subclass.returned_inputs import returning_inputs
from thunder_norm.subclass.tape_inputs import hand_on_inputs, tape_of
from thunder_norm.subclass.trace import OperationId
from thunder_norm.subclass.turns import awaited
from thunder_norm.tracing import compilation, hooks
from thunder_norm.tracing.activity import depending
from thunder_norm.tracing.locations import at_line_of
from thunder_norm.tracing.random_numbers import draws_numbers
from thunder_norm.tracing.recording import print_without_module, scope
from thunder_norm.tracing.torch_semantics import clamp
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import _get_gradfn_and_executor, augmented_forward_impls

# -- transforms that leave wrappers alone ---------------------------------------------------------------------------------


class Watching(interception.Watching):
    """A transform that leaves wrappers alone, of programs that Thunder may differentiate."""

    def acquired(self, found: Any) -> None:
        """Have a program that is to be differentiated be one without in-place operations, and no other be differentiated.

        Its gradients are of the shapes of what they are for.
        """
        trace = found.computation_trace
        found.computation_trace = (
            broadcast_scalars(functional(trace)) if torch.is_grad_enabled() else boundary_passes.of_constants(trace, trace.args)
        )

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Refuse a program whose numbers are values of tensors, and let inputs that are written into keep their gradients."""
        values.check_numbers(computation_trace)
        if torch.is_grad_enabled():
            computation_trace = _with_gradients_of_given(computation_trace)
        return prologue_trace, computation_trace, epilogue_trace


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
        acquisition = interception.finished_acquisition()
        if acquisition is not None and not (acquisition.has_wrappers or acquisition.opaque.is_met) and torch.is_grad_enabled():
            found.computation_trace = functional(found.computation_trace)

    def transform_traces_pre_prologue(
        self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, *, executors_list: Any
    ):
        """Lower wrappers to their inner tensors; see `thunder_norm.subclass.boundary`."""
        acquisition = interception.take_acquisition()
        if acquisition is None:  # another transform of ours has done it
            return prologue_trace, computation_trace, epilogue_trace
        try:
            traces = self._lowered(acquisition, (prologue_trace, computation_trace, epilogue_trace), executors_list)
        finally:
            acquisition.forget_inputs()
        return traces if torch.is_grad_enabled() else self.without_autograd(traces)

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
        started = started_histories(acquisition, traces[1], joint is not None)
        if joint is not None:
            joint.tape = tape_of(acquisition, traces[1], joint)
        prologue, computation, epilogue = boundary.lower(acquisition, traces, joint, executors_list[0])
        prologue, computation, epilogue = hand_on_inputs((prologue, awaited(acquisition, computation), epilogue), joint)
        if acquisition.has_wrappers:
            compilation.forget_earlier_traces()  # the first trace users see is the program on plain tensors
            if torch.is_grad_enabled():
                check_mutations(computation)
                computation = _with_gradients_of_given(with_missing_gradients(computation, executors_list[0]))
            traces = prologue, broadcast_scalars(computation), epilogue
            if torch.is_grad_enabled() and not acquisition.is_transformed:
                traces = boundary_passes.without_inactive(traces, started)
            traces = boundary_passes.check_what_leaves(self.transform_lowered(acquisition, traces))
            return returning_inputs(acquisition, traces) if self.hands_back_inputs else traces
        moved = {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad}
        if torch.is_grad_enabled() and (moved or started):
            moving = depending(computation, moved)
            computation = broadcast_scalars(with_missing_gradients(computation, executors_list[0], moving))
            computation = _with_gradients_of_given(computation)
            if not acquisition.is_transformed:
                prologue, computation, epilogue = boundary_passes.without_inactive((prologue, computation, epilogue), started)
        return boundary_passes.check_what_leaves((prologue, computation, epilogue))

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

# -- gradients by our rules ---------------------------------------------------------------------------------------------


def with_missing_gradients(trace: TraceCtx, executor: Any, moving: Set[str] | None = None) -> TraceCtx:
    """The same computation, whose operations on complex numbers, and those without a gradient of Thunder's, have gradients of ours.

    Args:
        trace: a computation that Thunder is going to differentiate.
        executor: what the gradients are registered with; of the compilation at hand, so that they live as long.
        moving: the names of what is differentiated; None if that may be anything.
    """
    if not any(_is_concerned(b, moving) or draws_noise(b) for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = with_gradients(trace.bound_symbols, executor, new, moving)
    return new


def with_gradients(
    bsyms: Sequence[BoundSymbol], executor: Any, trace: TraceCtx, moving: Set[str] | None = None
) -> list[BoundSymbol]:
    """The same operations; those that Thunder would not differentiate right, or not at all, have gradients of ours.

    `trace` knows the names of what is new; of arguments that are not among `moving` there is no gradient.
    """
    found: list[BoundSymbol] = []
    for bsym in bsyms:
        if not isinstance(bsym.sym.id, OperationId) and draws_noise(bsym):
            with tracectx(trace), langctx(Languages.TORCH), at_line_of(trace, bsym):
                parts = decomposed(bsym) or bsym.subsymbols
            found += with_gradients(parts, executor, trace)
        elif not _is_concerned(bsym, moving):
            found.append(bsym)
        elif (
            isinstance(bsym.sym.id, OperationId) and bsym.subsymbols
        ):  # of a wrapper: what it does to one inner tensor is its own
            found.append(bsym.from_bsym(subsymbols=with_gradients(bsym.subsymbols, executor, trace)))
        elif _asks_for_what_may_be_unused(bsym):
            found += _with_a_dimension_between(bsym, executor, trace)
        else:
            found.append(_with_gradient(bsym.sym.name, [bsym], flat_proxies(bsym.output), executor, moving))
    return found


def functional(trace: TraceCtx) -> TraceCtx:
    """A computation that Thunder is going to differentiate, without copies into what it made: they would be in its backward's way."""
    if not any(isinstance(p, TensorProxy) and p.requires_grad for p in trace.args):
        return trace
    with tracectx(from_trace(trace)):
        return without_mutations(trace, keeps_foreign=True)


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


def _is_concerned(bsym: BoundSymbol, moving: Set[str] | None = None) -> bool:
    if bsym.sym.id in _NO_OPERATIONS or not any(map(is_differentiable, bsym.flat_proxy_args)):
        return False
    if has_tape(bsym) is not None:  # what it hands on has the gradients that torch's autograd has made
        return False
    tensors = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    is_of_complex = any(map(is_differentiable, bsym.flat_proxy_outs)) and any(map(is_complex, tensors))
    if moving is not None and is_opaque(bsym) and {p.name for p in bsym.flat_proxy_args if is_differentiable(p)} - moving:
        return True  # Thunder asks torch for the gradients of all, and torch may have none of a weight or a target
    return is_of_complex or _lacks_gradient(bsym) or _has_a_gradient_that_fails(bsym) or _has_another_gradient(bsym)


_NO_OPERATIONS = frozenset(
    {prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UPDATE_ALIASES, prims.PrimIDs.COPY_, prims.PrimIDs.ITEM}
)


def _has_another_gradient(bsym: BoundSymbol) -> bool:
    """Whether Thunder's gradient is not torch's.

    It is NaN for products with a zero, 0 to the power of 0, atan2(0, 0) and where exponentials overflow, 0 where clamp meets its bounds,
    and left out for the values of ``index_put``, and for what is rounded, where torch has zeros.  A ``max_pool1d`` becomes a product with
    zeros and ones, where infinite padding is NaN.
    """
    if bsym.sym.id in activations.IDS:
        return True
    if bsym.sym.id is prims.PrimIDs.COPY_WITH_SETITEM:  # Thunder takes no entries by a mask
        return isinstance(bsym.args[2], TensorProxy) and has_mask(bsym.args[1])
    if bsym.sym.id is prims.PrimIDs.POW:
        return isinstance(bsym.args[1], TensorProxy)
    if bsym.sym.id in _WITH_ANOTHER_GRADIENT:
        return True
    return _is_taken_apart(bsym) and any(map(_has_another_gradient, bsym.subsymbols))


_ROUNDING = (prims.PrimIDs.CEIL, prims.PrimIDs.FLOOR, prims.PrimIDs.ROUND, prims.PrimIDs.TRUNC)
_WITH_ANOTHER_GRADIENT = frozenset(
    {prims.PrimIDs.PROD, prims.PrimIDs.ATAN2, prims.PrimIDs.INDEX_PUT, clamp.id, ltorch.max_pool1d.id, *_ROUNDING}
)


def _is_taken_apart(bsym: BoundSymbol) -> bool:
    """Whether Thunder differentiates what the operation consists of."""
    return not bsym.sym.is_prim and _get_gradfn_and_executor(bsym)[0] is None


def _has_a_gradient_that_fails(bsym: BoundSymbol) -> bool:
    """Whether Thunder's gradient fails: of several results without dimensions, or of what it had registered for torch to run.

    Of the latter it does for tensors given by name (``pos_weight``) or in a list (``hstack``, which then has no gradient, silently), for
    None among the results (attention without its weights), and for integers without dimensions among them (``cholesky_ex``).  Of what draws
    random numbers (``dropout2d``) it has torch draw others.
    """
    if _asks_for_what_may_be_unused(bsym):
        return True
    if not is_opaque(bsym):
        return False
    if draws_numbers(bsym):
        return True
    in_lists = [a for a in bsym.args if isinstance(a, Sequence) and not isinstance(a, str)]
    if any(map(is_differentiable, flat_proxies((in_lists, bsym.kwargs)))):
        return True
    outs = bsym.output if isinstance(bsym.output, Sequence) else (bsym.output,)
    return any(map(is_differentiable, outs)) and not all(map(is_differentiable, outs))


def _asks_for_what_may_be_unused(bsym: BoundSymbol) -> bool:
    """Whether Thunder's rule asks for the cotangents of several results, one of them without dimensions.

    Of a result that nothing uses Thunder writes ``zeros(*shape)``, which is then ``torch.zeros()``, an error.
    """
    if not is_opaque(bsym) and bsym.sym.id is not prims.PrimIDs.VAR_MEAN:
        return _is_taken_apart(bsym) and any(map(_asks_for_what_may_be_unused, bsym.subsymbols))
    outs = [p for p in bsym.flat_proxy_outs if is_differentiable(p)]
    return len(outs) > 1 and any(p.ndim == 0 for p in outs)


def _lacks_gradient(bsym: BoundSymbol) -> bool:
    """Whether Thunder's differentiation would come to a primitive that it has no rule for, be it that there is no gradient (isfinite)."""
    if bsym.sym.id in _NO_OPERATIONS or bsym.sym.id in augmented_forward_impls or _get_gradfn_and_executor(bsym)[0] is not None:
        return False
    if not any(map(is_differentiable, bsym.flat_proxy_args)) or not bsym.flat_proxy_outs:
        return False
    return any(map(_lacks_gradient, bsym.subsymbols)) if bsym.subsymbols else bsym.sym.is_prim


def _with_a_dimension_between(bsym: BoundSymbol, executor: Any, trace: TraceCtx) -> list[BoundSymbol]:
    """The operation with one dimension in place of none in its results, then what takes it away: nobody asks for that unless it is used."""
    outs = flat_proxies(bsym.output)
    with tracectx(trace), langctx(Languages.TORCH):
        with scope(trace) as made:
            between = [ltorch.reshape(p, (1,)) if p.ndim == 0 else p for p in outs]
        with scope(trace) as taken_away:
            again = {variableify(ltorch.reshape(b, ())): p for b, p in zip(between, outs, strict=True) if b is not p}
    whole = _with_gradient(bsym.sym.name, [bsym, *made], between, executor)
    return [whole, *(b.from_bsym_swap_proxies(again) for b in taken_away)]


def _with_gradient(
    name: str, bsyms: Sequence[BoundSymbol], outs: Sequence[TensorProxy], executor: Any, moving: Set[str] | None = None
) -> BoundSymbol:
    """Operations, the first of which uses all that they do, as one with a gradient of ours."""
    inputs = list({p.name: p for p in flat_proxies((bsyms[0].args, bsyms[0].kwargs))}.values())
    program = flat_program(inputs, bsyms, outs)
    wanted = [is_differentiable(p) and (moving is None or p.name in moving) for p in inputs]

    @langctx(Languages.TORCH)
    def meta(*args: TensorProxy) -> tuple[TensorProxy, ...]:
        return replayed(program, args)

    @langctx(Languages.TORCH)
    def joint(*args: TensorProxy) -> tuple[TensorProxy, ...]:
        results, pullback = evaluate_vjp(renewed_program(program), args, wanted)
        cotangents = [prims.get_grad(r) if is_differentiable(r) else None for r in results]
        for a, g, is_wanted in zip(args, pullback(cotangents), wanted, strict=True):
            if is_wanted:
                prims.put_grad(a, ltorch.zeros_like(a) if g is None else g)
        return results

    symbol = Symbol(
        name=name, meta=meta, id=f"thunder_norm.{name}.{len(executor.implmap)}", _bind_postprocess=print_without_module
    )
    executor.register_implementation(symbol, execution_transform=meta, grad_transform=joint)
    return bsyms[0].from_bsym(sym=symbol, args=tuple(inputs), kwargs={}, output=tuple(outs), subsymbols=list(bsyms))
