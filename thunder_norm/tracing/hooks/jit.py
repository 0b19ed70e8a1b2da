"""``thunder``: calls of a jitted function, the acquisition of its trace, and what comes right after it."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from thunder_norm.errors import DataDependentError, ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.tracing import containers, native, own_changes, proxy_names, python, whereabouts
from thunder_norm.tracing.activity import end_at_detached
from thunder_norm.tracing.calls import raising, threads
from thunder_norm.tracing.calls.differentiated import Backward, connect
from thunder_norm.tracing.calls.ready import ShortCalls
from thunder_norm.tracing.calls.told_operations import without_hooks
from thunder_norm.tracing.deep_calls import as_deep_as_eager, with_room
from thunder_norm.tracing.garbage import rarely_collected
from thunder_norm.tracing.guarding import attempts, changing_numbers, contents, guards, overwritten, stored_reads
from thunder_norm.tracing.hooks.participants import (
    Participant,
    brought_by,
    leading,
    participants,
    takes_parameters_once,
    with_leader,
)
from thunder_norm.tracing.hooks.replaced import replaces
from thunder_norm.tracing.shared_memory import alias_updates, aliases, arrays, replaced_memory, tied_inputs, views_of_results
from thunder_norm.tracing.torch_functions import autocast, contexts, lazy_modules, modules, named_results, tensor_classes
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder_norm.tracing.torch_functions.random_numbers import keep_draws
from thunder_norm.tracing.undefined_gradients import leave_undefined
from thunder_norm.user_code import user_line_of
import thunder
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import InterpreterError
from thunder.core.options import CACHE_OPTIONS, SHARP_EDGES_OPTIONS
from thunder.core.trace import TraceCtx
from thunder.transforms import autodiff

# of compile data: what was acquired last
_IS_OF_ONE_CALL = "_thunder_norm_is_of_one_call"
_DIFFERENTIATED = "_thunder_norm_differentiated"
_MET = "_thunder_norm_met"  # what the last acquisition has met beside its arguments
_USE = "_thunder_norm_use"  # has the compilation use another list of transforms

_original_acquire = thunder.thunder_general_jit
_original_alias_updates = thunder.insert_alias_updates
_original_with_cache_info = thunder._with_cache_info_ctx
_original_wraps = thunder.wraps
_original_connect = thunder.connect_to_autograd
_original_differentiate = autodiff.grad_transform_on_trace


@replaces(
    thunder,
    "thunder_general_jit",
    "fn",
    "args",
    "kwargs",
    "sharp_edges",
    "ad_hoc_executor",
    lines="acquire_initial_trace: thunder_general_jit(fn",
)
def _acquire(fn: Callable, args: tuple, kwargs: dict, /, **options: Any) -> Any:
    """The acquisition of a trace, with what we need around it: nobody is told that one begins or fails."""
    ours = participants()
    if not ours:
        return _original_acquire(fn, args, kwargs, **options)
    _check_cache_option()
    asked = leading(ours)
    while True:
        try:
            return _acquired(asked, fn, args, kwargs, options, may_begin_again=True)
        except Exception as e:  # noqa: BLE001 - it failed for what is known only now, perhaps
            lazy = lazy_modules.called_in(e)
            if lazy is not None:
                _undo(get_compile_data())
                lazy.initialize()
                continue
            led = None
            if not isinstance(e, _Again) and not asked.begins_again(None):
                led = None if isinstance(e, ThunderNormError) else _led()
                if led is None:
                    raise
            elif not asked.interprets_subclasses:
                led = _led()
        _undo(get_compile_data())
        if led is None:
            return _acquired(asked, fn, args, kwargs, options, may_begin_again=False)
        asked = led  # who knows more, and may ask for another one


def _led() -> Participant | None:
    """What leads the compilation from now on, where Thunder lacks something and nobody in the list answers for it; None if somebody did."""
    cd = get_compile_data()
    use = getattr(cd, _USE, None)
    found = with_leader(cd.transforms)
    if use is None or len(found) == len(cd.transforms):
        return None
    use(found)
    return leading(participants())


def _undo(cd: Any) -> None:
    """Undo what the last acquisition has left in the user's objects, and where no way leads to from the arguments."""
    for undo in raising.taken_undo(cd):
        undo()
    met = vars(cd).pop(_MET, None)
    if met is not None:
        met.undo()


class _Again(Exception):
    """What the program has done while it was acquired is undone, and it is acquired once more."""


def _acquired(asked: Participant, fn: Callable, args: tuple, kwargs: dict, options: dict, *, may_begin_again: bool) -> Any:
    contexts.begin()
    with ExitStack() as stack:
        stack.enter_context(as_deep_as_eager())
        stack.enter_context(autocast.acquiring())
        stack.enter_context(whereabouts.shown())
        vars(get_compile_data())[_MET] = stack.enter_context(guards.noted(fn, args, kwargs))
        stack.enter_context(overwritten.noted())
        stack.enter_context(containers.KEPT.in_place())
        stack.enter_context(python.AS_IT_IS.in_place())
        with_own_methods = stack.enter_context(contents.noted())
        stack.enter_context(proxy_names.noted())
        if options.get("sharp_edges") is SHARP_EDGES_OPTIONS.ALLOW:  # otherwise Thunder speaks of values of its own helpers too
            stack.enter_context(native.interpreter())
        stack.enter_context(asked.surrounding(fn, args, kwargs))
        stack.enter_context(aliases.noted())
        stack.enter_context(replaced_memory.noted())
        stack.enter_context(arrays.noted())
        stack.enter_context(raising.noted())
        try:
            found = _original_acquire(fn, args, kwargs, **options)
        except NotImplementedError as e:
            if (known := _asked_in_c(e) or _tensor_from_nowhere(e)) is e:
                raise
            raise known from e
        except InterpreterError as e:  # raised beside the program: while it is answered what a call of it does
            if isinstance(e.__cause__, ThunderNormError | RecursionError):
                raise e.__cause__ from None
            raise (
                _of_unknown_dtype(e, e.__cause__) or _of_unknown_instruction(e, e.__cause__) or _given_to_c(e, e.__cause__)
            ) from e.__cause__
        except KeyError as e:
            raise _of_unknown_dtype(e, e) or e from e.__cause__
        except TypeError as e:
            raise _given_to_c(e, e) from e.__cause__
        finally:
            autocast.end()
        if may_begin_again and asked.begins_again(found):
            raise _Again
        contexts.check_left()
        own_changes.check_taken_out(found.prologue_trace)
        if with_own_methods:
            found.prologue_trace = stored_reads.reading_stored(found.prologue_trace, fn, args, kwargs)
        found.prologue_trace = modules.asking_users(changing_numbers.made_tensors(arrays.reading_memory(found.prologue_trace)))
        found.computation_trace = replaced_memory.resolved(views_of_results.contiguous_where_written(found.computation_trace))
        replaced_memory.guard(found.prologue_trace, found.computation_trace)
        if asked.has_plain_inputs():
            is_once = takes_parameters_once(get_compile_data().executors_list)
            traces = tied_inputs.joined(found.prologue_trace, found.computation_trace, parameters=is_once)
            found.prologue_trace, found.computation_trace = traces
        aliases.guard(found.prologue_trace, found.computation_trace)
        aliases.check_written_once(found.computation_trace)
        tensor_classes.guard(found.prologue_trace)
        asked.acquired(found)
        for participant in participants():
            participant.end(found)
        if not asked.interprets_subclasses and found.epilogue_trace is not None:  # or it is made once there are no wrappers in it
            found.epilogue_trace = named_results.made_by_operators(found.epilogue_trace)
        if guards.is_of_one_call():
            setattr(get_compile_data(), _IS_OF_ONE_CALL, True)
        return found


def _of_unknown_dtype(error: BaseException, cause: BaseException | None) -> Exception | None:
    """The error where Thunder looks for a dtype that it has none for; None for any other."""
    if not isinstance(cause, KeyError) or not cause.args or not isinstance(cause.args[0], torch.dtype):
        return None
    return UnsupportedOpError(
        with_details(
            f"a traced function has a tensor of {cause.args[0]}",
            at=user_line_of(error),
            why="Thunder has no such dtype",
            instead="another dtype (int32 holds all of uint16), or compute it outside of the function",
        )
    )


def _of_unknown_instruction(error: BaseException, cause: BaseException | None) -> Exception | None:
    """The error where Thunder's interpreter lacks an instruction; None for any other."""
    if not isinstance(cause, NotImplementedError) or "unimplemented opcode" not in str(cause):
        return None
    return UnsupportedOpError(
        with_details(
            "a traced function has an instruction that is unknown",
            at=user_line_of(cause) or user_line_of(error),
            why=f"Thunder's interpreter does not know what Python compiles it to: {cause}",
            instead="compute it outside of the function",
        )
    )


def _asked_in_c(error: NotImplementedError) -> DataDependentError | None:
    """The error where a function in C asks what stands for a tensor for its value (``array.array("f", x)``); None for any other."""
    found = re.fullmatch(r"casting a TensorProxy to a Python (\w+) is not supported .*", str(error))
    if found is None:
        return None
    return data_dependent(f"a {found[1]}, by a function in C that is given it", at=user_line_of(error))


def _tensor_from_nowhere(error: NotImplementedError) -> Exception:
    """The error where a prologue would have to find a tensor that is in none of its inputs; any other as it is."""
    if "PseudoInst.OPAQUE(" in str(error) or "PseudoInst.NEW(" in str(error):
        return UnsupportedOpError(
            with_details(
                "a traced function uses a tensor that it got from a call which is no part of the trace: an item of a deque that was there before, "
                "a parameter of a module that it makes",
                why="such a call is made once, while the trace is acquired, and later calls would find the same values again",
                instead="keep tensors in a list or dict; make the module, or the tensor, outside of the function, or give the module its tensors "
                "with torch.func.functional_call",
            )
        )
    if re.search(r"PseudoInst\.BINARY_SUBSCR\(\w+, (?!['\d-])|Unpacking from", f"{error} {error.__cause__}"):
        return UnsupportedOpError(
            with_details(
                "a traced function reads a tensor from a dict under a key that is no number and no word",
                why="Thunder finds items of what it is given by numbers and words alone",
                instead="use words as keys, or pass the tensor as an argument",
            )
        )
    if "PseudoInst.CONSTANT(" not in str(error) or "constant of type" not in str(error.__cause__):
        return error
    return UnsupportedOpError(
        with_details(
            "a traced function has a tensor that is a constant to it, as what only functions in C lead to",
            why="Thunder finds tensors in arguments, modules, closures, defaults of parameters and global variables alone",
            instead="pass it as an argument, or take it from a global variable, a closure or a module",
        )
    )


# What torch and pybind11 say of arguments that they do not take.
_IN_C = re.compile(r"must be Tensor, not \w*Proxy|incompatible function arguments(.|\n)*Invoked with: (.|\n)*Proxy")


def _given_to_c(error: Exception, cause: BaseException | None) -> Exception:
    """The error where a program gives a tensor to a function in C that takes torch's alone; any other as it is."""
    if not isinstance(cause, TypeError) or not _IN_C.search(str(cause)):
        return error
    return UnsupportedOpError(
        with_details(
            "a traced function gives a tensor to a function in C that takes torch's alone",
            at=user_line_of(cause),
            why=str(cause).splitlines()[0],
            instead="operations of torch that return tensors, or compute it outside of the function",
        )
    )


def _check_cache_option() -> None:
    """Refuse traces that are to serve other sizes and numbers.

    Raises:
        UnsupportedOpError: the function was jitted with ``cache="symbolic values"``.
    """
    if get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES:
        raise UnsupportedOpError(
            with_details(
                'a transform of thunder_norm in thunder.jit(..., cache="symbolic values")',
                why="Thunder does not guard what control flow asks of sizes and numbers: a call with others would take the branches of the first",
                instead='use cache="constant values" (the default) or cache="no caching"',
            )
        )


@replaces(
    thunder,
    "insert_alias_updates",
    "computation_trace",
    "alias_tensor_indices",
    lines="apply_transforms_and_build_cache_entry: insert_alias_updates(",
)
def _alias_updates(computation_trace: TraceCtx, alias_tensor_indices: list[list[int]]) -> TraceCtx:
    """What is written in place, with the names that it has afterwards; ours are the inputs that share memory.

    Thunder takes tensors of one storage for one tensor in any program that writes something in place, and loses the last writes into views
    of inputs where the program is differentiated; its pass takes a time that grows with the third power of the writes.
    """
    if not participants():
        return _original_alias_updates(computation_trace, alias_tensor_indices)
    own = aliases.indices(computation_trace)
    computation_trace = aliases.with_results_named_as_written(computation_trace)
    updated = alias_updates.insert_alias_updates(computation_trace, alias_tensor_indices if own is None else own)
    return updated if updated is computation_trace else aliases.with_last_writes(updated)


@replaces(
    thunder,
    "_with_cache_info_ctx",
    "fn",
    lines="jit: @_with_cache_info_ctx, around its search for a program, once the list of transforms is known",
)
def _with_cache_info(fn: Callable) -> Callable:
    """A call of a jitted function, from arguments to a program and its inputs; `fn` is what ``thunder.jit`` is about to return.

    Each call of Thunder's builds a key, makes contexts and runs the prologue check by check (`calls`).
    """
    find = _original_with_cache_info(fn)
    around = inspect.getclosurevars(fn).nonlocals
    if not {"weakref_cd", "weakref_cs"} <= around.keys() or not _has_participant(around):
        return find

    threads.divide(around["weakref_cd"]())
    one_at_a_time = threading.RLock()

    def attempted(*args: Any, **kwargs: Any) -> Any:
        try:
            return with_room(find, *args, **kwargs)
        except Exception:
            # what was tried for more calls than this one may have failed for that, and in a pass of Thunder's
            if not attempts.give_up(around["weakref_cd"]()):
                raise
        _undo(around["weakref_cd"]())
        around["weakref_cs"]().cache_misses -= 1  # of this call it is still the first
        return with_room(find, *args, **kwargs)

    def compiling(*args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            return found_or_compiled(*args, **kwargs)

    def found_or_compiled(*args: Any, **kwargs: Any) -> Any:
        with native.compiler(), rarely_collected(), without_hooks():
            try:
                entry, *inputs = attempted(*args, **kwargs)
            except Exception as e:
                raised = raising.raised_in_acquisition(around["weakref_cd"](), e)
                if raised is e:
                    raise
                _undo(around["weakref_cd"]())
                raise raised from None
            finally:
                around["weakref_cd"]().is_grad_enabled = torch.is_grad_enabled()
        attempts.end(around["weakref_cd"]())
        acquired = vars(around["weakref_cd"]())
        if (met := acquired.pop(_MET, None)) is not None and met.drawn:
            raising.note_undo(around["weakref_cd"](), met.undo)
        program, is_of_one_call = acquired.pop(_DIFFERENTIATED, None), acquired.pop(_IS_OF_ONE_CALL, False)
        cache = around["weakref_cs"]().interpreter_cache
        if entry.backward_fn is not None and program is not None:
            runs = entry.computation_traces[-1], entry.backward_traces[-1]
            found = entry._replace(backward_fn=Backward.of(entry.backward_fn, program, *runs))
            cache[:] = [found if e is entry else e for e in cache]
            entry = found
        if is_of_one_call:
            cache.pop()
        return entry, *inputs

    return ShortCalls(compiling, around["weakref_cd"], around["weakref_cs"])


@replaces(thunder, "wraps", "wrapped", "assigned", "updated", lines="jit: @wraps(fn), around a call from arguments to results")
def _wraps(wrapped: Callable, *args: Any, **kwargs: Any) -> Callable:
    """What the user gets of ``thunder.jit``: a call that is short from its beginning to its end.

    Thunder wraps its search and the computation in functions that note times, which take longer than a small program.
    """
    decorate = _original_wraps(wrapped, *args, **kwargs)
    return lambda function: decorate(_whole(function))


def _whole(function: Callable) -> Callable:
    """The call of a jitted function, if the search in it is ours; any other as it is."""
    call = _closed_over(function, "fn")
    timed = _closed_over(call, "get_computation_and_inputs")
    search = _closed_over(_closed_over(timed, "get_computation_and_inputs_fn"), "fn")  # in the language of the program
    connect_results = _closed_over(call, "maybe_connect_to_autograd")
    if not isinstance(search, ShortCalls) or connect_results is None:
        return function
    return search.whole(function, connect_results)


def _closed_over(function: Any, name: str) -> Any:
    """What a function has under a name of a function around it; None if it has none."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _has_participant(around: dict[str, Any]) -> bool:
    """Whether one is in the list of transforms, which what is compiled or an executor may bring; the user's list stays as it is."""
    cd = around["weakref_cd"]()
    builds = around.get("apply_transforms_and_build_cache_entry")
    has_list = builds is not None and "transforms" in builds.__code__.co_freevars

    def use(transforms: list[Any]) -> None:
        assert builds is not None, "asked before"
        cell = builds.__closure__[builds.__code__.co_freevars.index("transforms")]
        cell.cell_contents = cd.transforms = transforms

    if any(isinstance(t, Participant) for t in cd.transforms):
        if has_list:
            setattr(cd, _USE, use)
        return True
    if cd.cache_option is CACHE_OPTIONS.SYMBOLIC_VALUES:
        return False
    brought = brought_by(cd.fn, cd.executors_list)
    if brought is None or not has_list:
        return False
    use([*cd.transforms, brought])
    return True


@replaces(
    autodiff,
    "grad_transform_on_trace",
    "trace",
    "args",
    "kwargs",
    lines="apply_transforms_and_build_cache_entry: grad_transform_on_trace(computation_trc)",
)
def _differentiate(trace: TraceCtx, /, *args: Any, **kwargs: Any) -> TraceCtx:
    """The program that Thunder differentiates: what is differentiated again where somebody asks for it."""
    if participants():
        keep_draws(trace)
        end_at_detached(trace)
        setattr(get_compile_data(), _DIFFERENTIATED, trace)
        return leave_undefined(_original_differentiate(trace, *args, **kwargs))
    return _original_differentiate(trace, *args, **kwargs)


@replaces(
    thunder,
    "connect_to_autograd",
    "backward_fn",
    "flat_args",
    "flat_output",
    "saved_tensors",
    "saved_other",
    "return_none_instead_of_grads",
    "disable_split_autograd",
    "is_differentiable_outputs",
    lines="maybe_connect_to_autograd: connect_to_autograd(backward_fn=cache_entry.backward_fn, ...",
)
def _connect_to_autograd(*, backward_fn: Callable, **parts: Any) -> None:
    """The history of a program's results: one that can be differentiated again, of one node where one is enough."""
    if not isinstance(backward_fn, Backward) or parts["return_none_instead_of_grads"]:
        _original_connect(backward_fn=backward_fn, **parts)
        return
    backward = backward_fn.as_one_node() if parts["disable_split_autograd"] else backward_fn
    tensors = parts["flat_args"], parts["flat_output"], parts["saved_tensors"], parts["saved_other"]
    connect(backward, *tensors, parts["is_differentiable_outputs"])
