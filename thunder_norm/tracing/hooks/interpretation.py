"""``thunder.core.jit_ext``: what the interpreter calls and makes of the program's values, from its inputs to its results."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing import attributes, lookasides, own_changes, standard_library
from thunder_norm.tracing.guarding import changing_numbers, guards, questions
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.hooks.lookups import lookaside_for, thunders_lookaside
from thunder_norm.tracing.hooks.participants import functions_inside, has_part, leader, thunders_proxy
from thunder_norm.tracing.hooks.replaced import replaces
from thunder_norm.tracing.provenances import is_parameter_of_module, member_of_module
from thunder_norm.tracing.proxy_names import drop_others_names, is_of_prologues, own_name
from thunder_norm.tracing.python import (
    callbacks,
    conversions,
    copies,
    deques,
    derived,
    identities,
    misused,
    patterns,
    special_methods,
)
from thunder_norm.tracing.python import constructors as constructors_of_python
from thunder_norm.tracing.shared_memory import aliases, arrays, replaced_memory
from thunder_norm.tracing.torch_functions import (
    autocast,
    cached_calls,
    causal_bias,
    constructors,
    function_modes,
    function_overrides,
    higher_order_operators,
    known_arguments,
    known_classes,
    known_values,
    modules,
    named_results,
    packed_sequences,
    quantized,
    scripted,
    sparse,
    torch_arguments,
    torch_neural,
)
from thunder.core import jit_ext
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.trace import TraceCtx, get_tracectx

_original_process = jit_ext.process_recorded_modifications
_original_value = jit_ext.build_value_from_wrapped
_original_available = jit_ext.is_proxy_name_available
_original_member = jit_ext.get_parameter_or_buffer_or_submodule_name_and_root


@replaces(jit_ext, "proxy", "x", "name", "history", lines="JitCtx.proxify: p = proxy(uvalue, name=...)")
def _proxy(x: Any, *, name: str | None = None, history: Any = None) -> Any:
    """What stands for an input tensor, which is fixed there."""
    asked = leader() if isinstance(x, torch.Tensor) else None
    if asked is None:
        return thunders_proxy(x, name, history)
    aliases.note(x, history)
    name = own_name(name, x, jit_ext.get_jit_ctx().computation_trace)
    with known_classes.taken_as_plain(x):
        found = asked.proxy(x, name, history)
    known_classes.mark(found, x)
    if isinstance(found, Proxy) and not isinstance(x, torch.nn.Parameter) and is_parameter_of_module(history):
        # unpack_parameter_or_buffer_or_submodule asserts it; functional_call gives any tensor
        found.tags.add(ProxyTag.STATIC_MEMORY_LOCATION)
    return found


@replaces(jit_ext, "is_proxy_name_available", "name", lines="_maybe_update_proxy_name: and is_proxy_name_available(name)")
def _is_available(name: str | None = None) -> bool:
    """Whether a tensor may have the name of the variable that it is stored in."""
    return _original_available(name) and not (name is not None and is_of_prologues(name) and has_part())


@replaces(
    jit_ext, "general_jit_lookaside", "fn", "args", "kwargs", lines="thunder_general_jit: fn_lookaside=general_jit_lookaside"
)
def _lookaside(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of a function.

    Registered lookasides are looked up by function, after Thunder's own, in every compilation; constructors of unknown classes and
    unknown functions never get there.
    """
    numbers = guards.changing_numbers()
    if numbers is None:
        return _instead(fn, args, kwargs)
    return numbers.lookaside(fn, args, kwargs, lambda: _instead(fn, args, kwargs))


def _instead(fn: Callable, args: tuple, kwargs: dict) -> Any:
    stack = functions_inside(jit_ext.get_jit_ctx())
    if not stack:
        return _found(fn, args, kwargs, False)
    return stack[-1](fn, args, kwargs, lambda: _found(fn, args, kwargs, True))


def _found(fn: Callable, args: tuple, kwargs: dict, is_inside: bool) -> Any:
    asked = leader()
    if fn is getattr and asked is not None:  # more than half of all calls, of which most below have nothing to say
        guards.note_call(fn, args)
        autocast.note_call()
        found = (
            function_modes.lookaside(fn, args)
            or attributes.lookaside(fn, args)
            or function_overrides.lookaside(fn, args, kwargs)
            or asked.lookaside(fn, args, kwargs)
        )
        return found if len(args) > 1 else misused.refusing(fn, found)
    if special_methods.is_compared_by_own_method(fn):
        return None  # its ``__call__`` is interpreted
    if asked is not None:
        if isinstance(fn, weakref.ref):
            return guards.reference_asked(fn)
        guards.note_call(fn, args, kwargs)
        if type(fn) is not FunctionType:
            deques.take(args)
        questions.note_asked(fn, args)
        autocast.note_call()
        in_mode = function_modes.lookaside(fn, args)
        if in_mode is not None:
            return in_mode
        of_class = function_overrides.lookaside(fn, args, kwargs)
        if of_class is not None:
            return of_class
        about_python = (
            attributes.lookaside(fn, args)
            or identities.lookaside(fn, args)
            or (None if _is_told_first(fn, args) else standard_library.lookaside(fn))
            or cached_calls.lookaside(fn, args, kwargs)
            or derived.lookaside(fn, args)
            or callbacks.lookaside(fn, args, kwargs)
            or conversions.lookaside(fn, args, kwargs)
            or patterns.lookaside(fn, args)
            or copies.lookaside(fn, args)
            or special_methods.lookaside(fn, args, kwargs)
            or misused.lookaside(fn)
            or arrays.lookaside(fn, args, kwargs)
            or constructors.lookaside(fn, args, kwargs)
            or constructors_of_python.lookaside(fn)
            or torch_arguments.lookaside(fn, args, kwargs)
            or known_values.lookaside(fn, args)
            or known_arguments.lookaside(fn, args, kwargs)
            or causal_bias.lookaside(fn, args, kwargs)
            or torch_neural.lookaside(fn, args, kwargs)
            or packed_sequences.lookaside(fn, args)
            or scripted.lookaside(fn, args, kwargs)
            or sparse.lookaside(fn, args)
            or quantized.lookaside(fn)
            or higher_order_operators.lookaside(fn)
        )
        about_python = about_python or modules.making(fn, args, kwargs)
        if about_python is replaced_memory.data_assigned:
            return asked.giving_memory(about_python)
        found = about_python or named_results.with_fields(
            derived.as_torch_reads(asked.lookaside(fn, args, kwargs), fn, args, kwargs), fn
        )
        found = found or conversions.written_out(fn)
        return misused.refusing(fn, arrays.following(found, fn, args))
    if is_inside:
        return (
            packed_sequences.lookaside(fn, args)
            or higher_order_operators.lookaside(fn)
            or named_results.with_fields(lookaside_for(fn, *args, **kwargs), fn)
        )
    return lookasides.of_thunder_norm(fn) or thunders_lookaside(fn, *args, **kwargs)


def _is_told_first(fn: Callable, args: tuple) -> bool:
    """Whether a method takes a number for a place that is one of a tensor: it is asked for, and the method called again."""
    return len(args) > 1 and is_number_of_tensors(args[1].value) and any(fn is method for method in standard_library.AT_PLACES)


@replaces(
    jit_ext,
    "process_recorded_modifications",
    "ctx",
    "epilogue_trace",
    lines="thunder_general_jit: process_recorded_modifications(ctx, epilogue_trace)",
)
def _process_modifications(ctx: jit_ext.JitCtx, epilogue: TraceCtx) -> None:
    """What the program writes into objects is only known, and the epilogue still open, at this place."""
    asked = leader()
    if asked is not None:
        _name_once(ctx, epilogue)
    process = functools.partial(_original_process if asked is None else _processed, ctx, epilogue)
    process() if asked is None else asked.write_epilogue(ctx, epilogue, process)
    if asked is not None:
        known_classes.restore_kept(epilogue)
        changing_numbers.note(ctx._constraints)
        own_changes.let_be(ctx, guards.roots())
        arrays.check(ctx.computation_trace)
        cached_calls.check_unwritten(ctx)
        epilogue.names = set(ctx.computation_trace.names)
    guards.add(ctx, functools.partial(bindable, "check_surroundings"))
    if has_part():
        drop_others_names(ctx.computation_trace, ctx._proxy_swapmap)


def _name_once(ctx: jit_ext.JitCtx, epilogue: TraceCtx) -> None:
    """What the program computes has other names than what it is given and makes, whichever of the two is named first."""
    ctx.computation_trace.names |= epilogue.names
    epilogue.names = ctx.computation_trace.names


def _processed(ctx: jit_ext.JitCtx, epilogue: TraceCtx) -> None:
    """Thunder's part.

    Raises:
        UnsupportedOpError: the program gives modules other members, which a finished trace does not do.
    """
    epilogue.names = set(epilogue.names)  # Thunder adds names to it that the program has by then
    try:
        _original_process(ctx, epilogue)
        _name_once(ctx, epilogue)
    except NotImplementedError as e:
        if not str(e).startswith("Modifications of"):
            raise
        raise UnsupportedOpError(
            with_details(
                "the program changes which modules, parameters or items its modules hold",
                why="a trace is made once, for the modules there are",
                instead="call the module once without thunder.jit, if it does so in its first call; or make the change before",
            )
        ) from e


@replaces(
    jit_ext,
    "get_parameter_or_buffer_or_submodule_name_and_root",
    "provenance",
    lines="unpack_inputs and process_recorded_modifications: typ, name, root_module_provenance = get_parameter_or_...(",
)
def _member(provenance: ProvenanceRecord) -> tuple[str, list[str], ProvenanceRecord]:
    """Where a parameter, buffer or module is; Thunder asserts that modules are in modules, and not also in a list, dict or tuple."""
    if not has_part():
        return _original_member(provenance)
    found = member_of_module(provenance)
    return ("_modules", [], provenance) if found is None else tuple(found)


@replaces(jit_ext, "build_value_from_wrapped", "wrapped_v", lines="thunder_general_jit: res = build_value_from_wrapped(")
def _value(wrapped_v: WrappedValue) -> Any:
    """What the program makes and returns is looked at there, and only tuples, lists, dicts and dataclasses are known.

    A key of a dict that comes with the call (``{}; made[name] = x``) is none of what the epilogue makes: Thunder hashes what stands for it.
    """
    asked = leader()
    if asked is None:
        return _original_value(wrapped_v)
    if own_changes.is_moved(wrapped_v):
        return wrapped_v.value
    for key, wrapped_key in list(getattr(wrapped_v, "key_wrappers", {}).items()):
        is_itself = wrapped_key.provenance.inst is PseudoInst.CONSTANT  # of an enum's member Thunder knows nothing to write
        if is_itself or jit_ext.should_register_for_prologue(
            wrapped_key.provenance
        ):  # which has a guard, as whatever else the program looks at
            del wrapped_v.key_wrappers[key]
    if type(wrapped_v.value) is dict:  # what a function in C has put there is known as it is
        for key, known in list(wrapped_v.item_wrappers.items()):
            if not any(wrapped_v.value.get(key) is v for v in (known.value, known.original_value)):
                del wrapped_v.item_wrappers[key]
    return known_classes.handed_out(asked.result(wrapped_v, _original_value), get_tracectx())
