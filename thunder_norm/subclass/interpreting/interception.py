"""What the transforms of ours answer to the hooks: which calls of a program are taken over, and what stands for its inputs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import ThunderNormError, UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.subclass.acquiring import values
from thunder_norm.subclass.acquiring.acquisition import ACQUISITION, Acquisition, Phase, Presence
from thunder_norm.subclass.acquiring.integer_values import GIVEN_AGAIN
from thunder_norm.subclass.backward import flags_of_inputs, side_effects, tensor_hooks
from thunder_norm.subclass.backward.differentiation import starts_late
from thunder_norm.subclass.backward.mutations import is_missed
from thunder_norm.subclass.classes import jagged
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import WrapperSpec, check_supported, outer_metadata
from thunder_norm.subclass.classes.wrapper_scan import may_construct_wrappers
from thunder_norm.subclass.interpreting import (
    fully_sharded,
    interpret,
    item_numbers,
    jagged_makers,
    opaque_objects,
    operations,
    plain,
    plain_lengths,
    plain_operations,
    reading,
    selections,
    sequences,
)
from thunder_norm.tracing import hooks
from thunder_norm.tracing.guarding import attempts, changing_numbers, guards
from thunder_norm.tracing.hooks import Participant, lookaside_for, thunders_proxy
from thunder_norm.tracing.provenances import without_unused
from thunder_norm.tracing.python import identities
from thunder_norm.tracing.shared_memory import replaced_memory
from thunder_norm.tracing.torch_functions import known_classes, tensor_methods, torch_arguments
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue, do_raise, wrap_const
from thunder.core.jit_ext import JitCtx, _jit_ctx, get_jit_ctx
from thunder.core.proxies import NumberProxy, ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx
from thunder.extend import FusionExecutor

_INTERPRETED = "_thunder_norm_is_interpreted"
_FROM_THE_FIRST = "_thunder_norm_differentiates_from_the_first"
_ASKS_FOR_HISTORY = "_thunder_norm_asks_for_history"
_ALL_MEMORY = "_thunder_norm_follows_all_memory"
_LENGTHS = "_thunder_norm_total_lengths"  # of nested tensors, that a program was acquired with
_ARE_ITSELF = "_thunder_norm_lengths_themselves"  # for which lengths a program is, is not tried again


def _asked_of_history(args: tuple[WrappedValue, ...]) -> str | None:
    """The name, where it is ``y.requires_grad`` or ``y.grad_fn`` of what the program has computed, or a method that gives a tensor a hook."""
    if len(args) < 2 or type(args[0].value) is not TensorProxy:
        return None
    if not torch.is_grad_enabled() and ProxyTag.DETACHED_AUTOGRAD_GRAPH in args[0].value.tags:
        return None
    name, is_computed = args[1].value, args[0].value.history is None
    return name if name in tensor_hooks.NAMES or (name in ("requires_grad", "grad_fn") and is_computed) else None


class Watching(Participant):
    """A transform that looks after what the program writes and which values it asks for, and leaves wrappers alone."""

    def surrounding(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """What the program can reach is what it was if the acquisition fails."""
        return side_effects.watched(fn, args, kwargs)

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """See `Participant`."""
        asked = _asked_of_history(args) if fn is getattr else "requires_grad" if fn is torch.autograd.grad else None
        if asked is not None:
            vars(get_compile_data()).setdefault(_ASKS_FOR_HISTORY, set()).add(asked)
        found = (
            selections.lookaside(fn, args, kwargs)
            or values.refusal(fn, args)
            or plain.about_plain(None, fn, args)
            or torch_arguments.by_position(fn, args, kwargs)
            or torch_arguments.filled(fn, args, kwargs)
            or torch_arguments.written_into(fn, args, kwargs)
            or lookaside_for(fn, *args, **kwargs)
        )
        return sequences.given_plainly(found, fn, args, kwargs)

    def begins_again(self, found: Any | None) -> bool:
        """What requires grad, hooks, what operations hand back and classes of tensors are known to who interprets subclasses.

        Thunder says of all that is computed that it does not require grad, and that it is another tensor.
        """
        asked = vars(get_compile_data()).pop(_ASKS_FOR_HISTORY, set())
        is_of_objects, is_of_classes = identities.taken_of_computed(), known_classes.taken_met()
        if asked - {"requires_grad"}:  # torch's autograd calls hooks, and has the nodes of its graph
            vars(get_compile_data())[_FROM_THE_FIRST] = True
        return bool(asked) or is_of_objects or is_of_classes

    def write_epilogue(self, ctx: JitCtx, epilogue: TraceCtx, process: Callable[[], None]) -> None:
        """Write what the program has kept."""
        ctx._constraints = without_unused(ctx._constraints, ctx.computation_trace)
        side_effects.write(ctx, epilogue, None, process)
        replaced_memory.write(epilogue)

    def result(self, value: WrappedValue, find: Callable[[WrappedValue], Any]) -> Any:
        """Objects that the program has made are made anew in each call."""
        return side_effects.result(value, find, get_tracectx())


class Interpreting(Watching):
    """A transform that interprets wrapper subclasses while the trace is acquired."""

    interprets_subclasses = True
    opaque = "error"  # what becomes of objects that cannot be taken apart: an error, or "run"

    def has_plain_inputs(self) -> bool:
        """Where there are wrappers, norms among them, inputs are followed by their names."""
        acquisition = finished_acquisition()
        return acquisition is None or not acquisition.has_wrappers

    def new_acquisition(self) -> Acquisition:
        """The state for one acquisition."""
        return Acquisition()

    def begins_again(self, found: Any | None) -> bool:
        """What was followed from where it was known to be needed is to be followed from the first operation on.

        Torch's autograd is, from the first wrapper that meets a gradient, and so is what lies in which memory, where wrappers are
        written into plain tensors of which there are views.
        """
        acquisition = finished_acquisition()
        if acquisition is None:
            return False
        if flags_of_inputs.begins_again(acquisition):
            vars(get_compile_data())[_FROM_THE_FIRST] = True
            return True
        late, misses = acquisition.autograd.is_asked, acquisition.fakes.misses_memory
        if torch.is_grad_enabled():
            is_written = found is not None and acquisition.has_wrappers
            fakes = acquisition.fakes
            followed = [fakes.current(p) for _, p in fakes.pairs()] if acquisition.autograd.is_running else []
            is_missing = is_written and is_missed(found.computation_trace, followed)
            # gradients of wrappers, once they are followed, are followed through the memory that tensors had
            is_late = is_missing and not replaced_memory.replaces_memory(found.computation_trace)
            late = (
                late
                or acquisition.autograd.starts_late
                or is_late
                or ((misses or is_missing) and acquisition.autograd.is_running)
            )
            misses = misses or is_missing
            late = late or (found is not None and starts_late(acquisition, found.computation_trace))
        due = {_FROM_THE_FIRST: late, _ALL_MEMORY: misses}
        vars(get_compile_data()).update({name: True for name, is_due in due.items() if is_due})
        if found is not None and acquisition.lengths.is_on:
            plain_lengths.check(acquisition, found.computation_trace)
        if acquisition.lengths.is_on and acquisition.is_transformed:
            acquisition.lengths.be_one()
        is_given_up = (found is None or acquisition.lengths.is_one) and attempts.give_up()
        return is_given_up or any(due.values())

    def write_epilogue(self, ctx: JitCtx, epilogue: TraceCtx, process: Callable[[], None]) -> None:
        """Write what the program has kept."""
        acquisition = _acquisition_of(self)
        ctx._constraints = without_unused(fully_sharded.without_checks(acquisition, ctx._constraints), ctx.computation_trace)
        flags_of_inputs.write(acquisition, ctx)
        tensor_hooks.write(acquisition, epilogue)
        side_effects.write(ctx, epilogue, acquisition, process)
        replaced_memory.write(epilogue, acquisition.hindrance_to_new_memory)

    def acquired(self, found: Any) -> None:
        """See `Participant`."""
        flags_of_inputs.set_last(found.prologue_trace)

    def proxy(self, x: torch.Tensor, name: str | None, history: Any) -> Any:
        """The proxy of a wrapper is one of ours; of other inputs it is remembered what they are."""
        acquisition = _acquisition_of(self)
        try:
            acquisition.fakes.check_foreign(x)
            if is_wrapper(x):
                side_effects.note_read(type(x), may_change=True)
                make = fully_sharded.gathered if id(x) in acquisition.fully_sharded else interpret.proxy_for_input
                return make(acquisition, x, name, history)
            if self.opaque == "run" and opaque_objects.is_opaque(x):
                return opaque_objects.proxy_for_input(acquisition, x, name, history)
            check_supported(x)
        except (UnsupportedOpError, UnsupportedSubclassError) as e:
            # an exception here would be taken for a crash of the interpreter, which raises this one at its next call
            acquisition.refused.raise_later(acquisition.refuse(e))
            x = torch.empty(())  # what Thunder makes of the refused one does not matter, and may be an error of its own
        p = thunders_proxy(x, name, history)
        if isinstance(p, TensorProxy) and x.layout is torch.strided:
            acquisition.note_plain_input(p, x)
            if acquisition.fakes.shared.holds(x):
                get_jit_ctx().computation_trace.bound_symbols.append(GIVEN_AGAIN.bind(p, output=None))
                operations.catch_up(acquisition, [acquisition.fake_of(p)])
        return p

    def giving_memory(self, put: Callable) -> Callable:
        """See `Participant`: the strides of what the program holds are known."""
        return plain_operations.with_new_memory(_acquisition_of(self), put)

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """See `Participant`."""
        acquisition = _acquisition_of(self)
        reads_no_tensor = fn is getattr and _reads_no_tensor(
            acquisition, args
        )  # half of all calls, and nothing below says anything
        if reads_no_tensor and not isinstance(args[0].value, NumberProxy):
            return lookaside_for(fn, *args, **kwargs)
        if (of_number := item_numbers.lookaside(acquisition, fn, args, kwargs)) is not None:
            return of_number
        if fn is tensor_methods.is_followed:
            return lambda tensor: wrap_const(acquisition.autograd.requires_grad(tensor.value))
        if reads_no_tensor:
            return lookaside_for(fn, *args, **kwargs)
        if acquisition.lengths.is_on:
            plain_lengths.note(acquisition, fn, args, kwargs)
        selected = selections.lookaside(fn, args, kwargs)
        if selected is not None:
            return selected
        if not acquisition.meets_wrappers:
            what = values.needed_for(fn, args)
            if what is not None:
                return _sized(acquisition, fn, args) or reading.lookaside(acquisition, fn, args, what) or values.refusal(fn, args)
            found = reading.lookaside(acquisition, fn, args, ".item()") if reading.asks_for_truth(fn, args) else None
            if found is not None:
                return found
        if acquisition.phase is Phase.WAITING:
            acquisition.phase = Phase.RUNNING
            _begin(acquisition, fn, args)
        if acquisition.presence is Presence.UNKNOWN and type(fn) in _OWN_CODE and may_construct_wrappers(fn):
            acquisition.note_presence(Presence.MENTIONED)
        if type(fn) in _FUNCTIONS and fn in jagged_makers.MAKERS:
            acquisition.note_presence(Presence.EXPECTED)
        hook = fully_sharded.hook(acquisition, fn) if type(fn) is types.FunctionType else None
        hook = hook or tensor_hooks.lookaside(acquisition, fn, args)
        if hook is not None:
            return hook
        if (filled := torch_arguments.filled(fn, args, kwargs)) is not None:
            return filled
        if not acquisition.watches and type(fn) in _FUNCTIONS and fn not in operations.operations():
            # most calls without wrappers
            answer = plain.about_plain(acquisition, fn, args) or plain_operations.of_operator(fn, args)
            found = answer or lookaside_for(fn, *args, **kwargs)
            if plain_operations.is_unknown(fn, kwargs.values(), found):
                # one of torch's that Thunder does not know, nor programs are told of
                return plain_operations.with_fallback(acquisition, fn, args, kwargs, found)
            return plain_operations.with_attributes(acquisition, found, args) if fn is getattr and answer is None else found
        # what is computed into a tensor that is given for it: by the formulas of the operation and of the copy
        found = torch_arguments.written_into(fn, args, kwargs) if acquisition.has_own_formulas else None
        found = found or interpret.lookaside(acquisition, fn, args, kwargs)
        if not found:
            found = plain_operations.keeping_history(acquisition, fn, args)
        if not found:
            found = plain_operations.with_fallback(acquisition, fn, args, kwargs, lookaside_for(fn, *args, **kwargs))
            found = plain.starting_history(acquisition, fn, kwargs, found)
        found = sequences.given_plainly(found, fn, args, kwargs)
        pending = acquisition.refused.take_pending()
        return found if pending is None else do_raise(pending)


def _reads_no_tensor(acquisition: Acquisition, args: tuple[WrappedValue, ...]) -> bool:
    """Whether an attribute is read of something else than a tensor, in a program without wrappers that has begun."""
    if not args or isinstance(args[0].value, TensorProxy) or acquisition.phase is Phase.WAITING:
        return False
    return not acquisition.watches and not selections.are_in_use()


def _sized(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call for an operation on plain tensors that needs values for the size of its result, where these may be taken from the inputs."""
    if (
        not (acquisition.may_replace() and acquisition.sizes.are_known and values.asks_for_size(fn, args))
        or acquisition.is_transformed
    ):
        return None
    torch_fn = operations.torch_callable(fn)
    return None if torch_fn is None else operations.operation_of(acquisition, torch_fn)


def current_acquisition() -> Acquisition | None:
    """The state of the acquisition at hand: None if nobody interprets subclasses."""
    leader = hooks.leader()
    return _acquisition_of(leader) if isinstance(leader, Interpreting) else None


def _acquisition_of(transform: Interpreting) -> Acquisition:
    ctx = _jit_ctx.get()
    found = getattr(ctx, ACQUISITION, None)
    if found is None:
        found = transform.new_acquisition()
        found.opaque.is_run = transform.opaque == "run"
        found.fakes.user_names = ctx._proxy_swapmap
        setattr(ctx, ACQUISITION, found)
        setattr(get_compile_data(), ACQUISITION, found)
    return found


def finished_acquisition() -> Acquisition | None:
    """The state of the acquisition that has just finished, if it has not been taken."""
    return getattr(get_compile_data(), ACQUISITION, None)


def take_acquisition() -> Acquisition | None:
    """The state of the acquisition that has just finished, handed over once."""
    cd = get_compile_data()
    found = finished_acquisition()
    if found is not None:
        delattr(cd, ACQUISITION)
        setattr(cd, _INTERPRETED, found.has_wrappers)
    return found


def is_interpreted() -> bool:
    """Whether the program being compiled has wrappers in it."""
    return getattr(get_compile_data(), _INTERPRETED, False)


def _begin(acquisition: Acquisition, entry: Callable, args: tuple[WrappedValue, ...]) -> None:
    """Tell the acquisition the arguments of the jitted function.

    Relies on the interpreter's first call: ``fn_2(args, kwargs)``, a closure over the function given to ``interpret``.
    """
    tensors = _tensors_given(entry, args)
    wrappers = [t for t in tensors if is_wrapper(t)]
    if wrappers:
        _note_shared(acquisition, tensors)
        acquisition.note_presence(Presence.EXPECTED)
        _begin_lengths(acquisition, wrappers)
    if acquisition.sizes.are_known and not (acquisition.is_transformed or acquisition.opaque.is_run):
        changing_numbers.begin(acquisition.refuse, acquisition.ask)
    guards.tell_numbers(functools.partial(item_numbers.known_or_refused, acquisition))
    acquisition.fakes.follows_memory = vars(get_compile_data()).pop(_ALL_MEMORY, False)
    is_due = vars(get_compile_data()).pop(_FROM_THE_FIRST, False)
    if is_due or (torch.is_grad_enabled() and any(outer_metadata(x)[2] for x in wrappers)):
        acquisition.differentiate()
    given = [a.value for a in args]
    if [type(v) for v in given] != [tuple, dict]:
        return
    try:
        acquisition.begin(*given)
    except ThunderNormError as e:  # see `Interpreting.proxy`
        acquisition.refused.raise_later(acquisition.refuse(e))


def _begin_lengths(acquisition: Acquisition, wrappers: list[torch.Tensor]) -> None:
    """Have the total lengths of nested tensors be symbols, if the program was acquired before, for others."""
    cd = get_compile_data()
    found = tuple([jagged.total_length(x) for x in wrappers if jagged.is_jagged_class(type(x))])
    seen = vars(cd).setdefault(_LENGTHS, set())
    is_alone = type(acquisition) is Acquisition and len(cd.transforms) == 1 and not acquisition.opaque.is_run
    is_alone = is_alone and not (acquisition.is_transformed or any(map(_takes_regions, cd.executors_list)))
    is_other = None not in found and found not in seen and any(len(other) == len(found) for other in seen)
    if found and is_other and is_alone and not vars(cd).get(_ARE_ITSELF):
        attempts.begin(lambda: vars(cd).update({_ARE_ITSELF: True}))
        acquisition.lengths.begin(acquisition.fakes.mode)
    else:
        seen.add(found)


def _takes_regions(executor: Any) -> bool:
    """Whether an executor compiles regions for the shapes that it finds, and takes operations of torch's: not one that knows Thunder's alone."""
    return isinstance(executor, FusionExecutor) and executor.name not in _OF_THUNDERS_SYMBOLS


_OF_THUNDERS_SYMBOLS = ("nvfuser", "torchcompile_xentropy", "torchcompile_cat")


def _tensors_given(entry: Callable, args: tuple[WrappedValue, ...]) -> list[torch.Tensor]:
    """The tensors among the arguments of the jitted function, and the parameters and buffers of the jitted module."""
    tensors = tree_leaves(tuple(a.value for a in args))
    for cell in getattr(entry, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.nn.Module):
            tensors.extend((*cell.cell_contents.parameters(), *cell.cell_contents.buffers()))
    return [t for t in tensors if isinstance(t, torch.Tensor)]


def _note_shared(acquisition: Acquisition, tensors: list[torch.Tensor]) -> None:
    """Look for inputs, and inner tensors of wrappers, that lie in one memory; offsets of nested tensors are not written into."""
    inner = [t for x in tensors if is_wrapper(x) and not is_jagged_class(type(x)) for t in _plain_inside(x)]
    acquisition.fakes.shared.note(
        [*inner, *(t for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))]
    )


def _plain_inside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    try:
        return WrapperSpec.of(x).leaves(x)
    except UnsupportedSubclassError:  # which is said where the program meets it
        return ()


_OWN_CODE = frozenset({types.FunctionType, types.MethodType})
_FUNCTIONS = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})
