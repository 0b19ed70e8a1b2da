"""Every change made to Thunder, in one place: put there by the first use of a transform, inert in compilations without one.

*Use* is making a transform of ours (a `Participant`), or a function that one makes (``grad(f)``).  `import thunder_norm` changes nothing.
A compilation has a part of ours if a `Participant` is in its list of transforms, or while the function of a function transform is being
interpreted.  In all others the replaced functions call the original with the same arguments.

=====================  ==================================================  ==============================================
global                 upstream line it relies on (lightning-thunder 0.2.6)  why there is no official hook
=====================  ==================================================  ==============================================
proxy                  JitCtx.proxify: ``p = proxy(uvalue, name=...)``       what stands for an input tensor is fixed there
general_jit_lookaside  thunder_general_jit: ``fn_lookaside=...``             registered lookasides are looked up by function,
                                                                           after Thunder's own, in every compilation;
                                                                           constructors of unknown classes and unknown
                                                                           functions never get there
thunder_general_jit    acquire_initial_trace: ``thunder_general_jit(fn``      nobody is told that an acquisition begins or fails
_elementwise_type_...  elementwise_type_promotion: ``reduce(_elemen...``   the dtypes of results are worked out there
to_dtype               elementwise_type_promotion: ``to_dtype(x, true...``   a tensor that got dimensions still counts as without
process_recorded_...   thunder_general_jit: ``process_recorded_modi...``      what the program writes into objects is only known,
                       ``fications(ctx, epilogue_trace)``                   and the epilogue still open, at this place
is_pycapsule           _call_dispatch: ``not is_pycapsule(slf)``             asks whether a type is a capsule: pybind11's functions,
                                                                           whose ``__self__`` is a record of it, are called as
                                                                           methods of that record, which aborts the process
make_generator         _run_frame: ``return make_generator(frame, ...``    what is thrown into a generator passes it by
build_value_from_...   thunder_general_jit: ``res = build_value_from...``     what the program makes and returns is looked at there,
                                                                           and only tuples, lists, dicts and dataclasses known
insert_alias_updates   apply_transforms_and_build_cache_entry: ``alia...``  takes tensors of one storage for one tensor in any
                                                                           program that writes something in place
=====================  ==================================================  ==============================================

Besides, each for as long as it says and no longer:

- while a trace is acquired with a participant, native equivalents stand in for parts of Thunder's interpreter (`native`, a table in each
  file), and what the program looks at is noted (`guards`);
- while a rule that a user registered for a function transform runs, ``TensorProxy`` has a ``__torch_function__``, so that the rule can be
  written in torch's functions;
- a compilation that is under way at the first use (``grad`` called by a program that is being traced) asks us from there on:
  ``InterpreterCompileCtx._fn_lookaside`` holds what it was begun with;
- what a user registers with `register_lookaside` goes into ``_general_jit_lookaside_map``, Thunder's table for that.

Symbols of ours have rules and tags in Thunder's own tables (``register_grad``, ``NON_FUNCTIONAL_OPS``) under ids of ours, from when they
are made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

import thunder_norm.tracing.libraries  # noqa: F401 - has lookasides
from thunder_norm.errors import TransformError, VersionError
from thunder_norm.tracing import (
    aliases,
    attributes,
    generators,
    guards,
    lookasides,
    named_results,
    native,
    standard_library,
    torch_semantics,
)
from thunder_norm.tracing.bindable import bindable
from thunder_norm.tracing.saved_tensors import releasing_saved
import thunder
import thunder.torch as ltorch
from thunder.core import dtypes, interpreter, jit_ext, utils
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue
from thunder.core.options import SHARP_EDGES_OPTIONS
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx
from thunder.core.transform_common import Transform

_LEADER = "_thunder_norm_leader"  # of a JitCtx: the participant that is asked
_FUNCTIONS = "_thunder_norm_functions"  # of a JitCtx: what to ask inside each function that is being transformed
_IS_OF_USER = "_thunder_norm_is_of_user"  # of a lookaside

_original_proxy = jit_ext.proxy
_original_lookaside = jit_ext.general_jit_lookaside
_original_acquire = thunder.thunder_general_jit
_original_process = jit_ext.process_recorded_modifications
_original_value = jit_ext.build_value_from_wrapped
_original_alias_updates = thunder.insert_alias_updates
_original_promotion = utils._elementwise_type_promotion
_original_dtype = utils.to_dtype
_original_is_capsule = interpreter.is_pycapsule
_original_make_generator = interpreter.make_generator


# -- who has a part -----------------------------------------------------------------------------------------------------


class Participant(Transform):
    """A transform of ours.  Making one puts the hooks in place; of those in a compilation's list one, the leader, is asked.

    The leader is the most derived of those that interpret subclasses, or else the first.
    """

    interprets_subclasses = False
    goes_inside = False  # whether function transforms differentiate inner tensors of wrappers that do not require grad

    def __init__(self) -> None:
        install()

    def begin(self, trace: TraceCtx) -> None:
        """Called once in each compilation, for every participant, when the trace that is being acquired is known."""

    def surrounding(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """A context that the acquisition of the program of `fn` runs in."""
        return nullcontext()

    def proxy(self, x: torch.Tensor, name: str | None, history: Any) -> Any:
        """What stands for an input tensor."""
        return thunders_proxy(x, name, history)

    def lookaside(self, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Any:
        """What the interpreter calls instead of `fn`; None has it interpret or run `fn`."""
        return lookaside_for(fn, *args, **kwargs)

    def write_epilogue(self, ctx: jit_ext.JitCtx, epilogue: TraceCtx, process: Callable[[], None]) -> None:
        """Have the epilogue write what the program has put into objects; ``process()`` is what Thunder writes."""
        process()

    def result(self, value: WrappedValue, find: Callable[[WrappedValue], Any]) -> Any:
        """What the epilogue returns for a value in the result; ``find(value)`` is what Thunder has for it."""
        return find(value)

    def acquired(self, found: Any) -> None:
        """Called with the traces just acquired, before any transform."""

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """The program that runs, forward or backward; a backward lets go of what was saved for nothing."""
        return releasing_saved(computation_trace)


def participants() -> list[Participant]:
    """The transforms of ours in use for the current compilation."""
    return [t for t in getattr(get_compile_data(), "transforms", None) or () if isinstance(t, Participant)]


def leader() -> Participant | None:
    """The participant to ask in the acquisition at hand; None if there is none."""
    ctx = jit_ext.get_jit_ctx()
    found = getattr(ctx, _LEADER, False)
    if found is False:
        ours = participants()
        found = _leading(ours) if ours else None
        setattr(ctx, _LEADER, found)
        for t in ours:
            t.begin(ctx.computation_trace)
    return found


def _leading(ours: list[Participant]) -> Participant:
    interpreting = [t for t in ours if t.interprets_subclasses]
    return max(interpreting, key=lambda t: len(type(t).__mro__)) if interpreting else ours[0]


@contextmanager
def inside_function(ask: Callable[[Callable, tuple, Callable[[], Any]], Any]) -> Iterator[None]:
    """The function of a function transform is being interpreted: ``ask(fn, args, find)`` says what is called instead of `fn`.

    ``find()`` is what would be called otherwise.
    """
    ctx = jit_ext.get_jit_ctx()
    stack = getattr(ctx, _FUNCTIONS, None)
    if stack is None:
        stack = []
        setattr(ctx, _FUNCTIONS, stack)
    stack.append(ask)
    try:
        yield
    finally:
        stack.pop()


def _has_part() -> bool:
    """Whether a participant is in the compilation at hand, or a function is being transformed."""
    if participants():
        return True
    ctx = jit_ext._jit_ctx.get(None)
    return bool(getattr(ctx, _FUNCTIONS, None))


# -- what stands in for Thunder's functions -----------------------------------------------------------------------------


def _acquire(fn: Callable, args: tuple, kwargs: dict, /, **options: Any) -> Any:
    ours = participants()
    if not ours:
        return _original_acquire(fn, args, kwargs, **options)
    with ExitStack() as stack:
        stack.enter_context(guards.noted(fn, args, kwargs))
        if options.get("sharp_edges") is SHARP_EDGES_OPTIONS.ALLOW:  # otherwise Thunder speaks of values of its own helpers too
            stack.enter_context(native.interpreter())
        asked = _leading(ours)
        stack.enter_context(asked.surrounding(fn, args, kwargs))
        stack.enter_context(aliases.noted())
        found = _original_acquire(fn, args, kwargs, **options)
        aliases.guard(found.prologue_trace, found.computation_trace)
        asked.acquired(found)
        return found


def _process_modifications(ctx: jit_ext.JitCtx, epilogue: TraceCtx) -> None:
    asked = leader()
    process = functools.partial(_original_process, ctx, epilogue)
    process() if asked is None else asked.write_epilogue(ctx, epilogue, process)
    guards.add(ctx, functools.partial(bindable, "check_surroundings"))


def _value(wrapped_v: WrappedValue) -> Any:
    asked = leader()
    return _original_value(wrapped_v) if asked is None else asked.result(wrapped_v, _original_value)


def thunders_proxy(x: Any, name: str | None, history: Any) -> Any:
    """What Thunder has for an input."""
    return _original_proxy(x, name=name, history=history)


def _proxy(x: Any, *, name: str | None = None, history: Any = None) -> Any:
    asked = leader() if isinstance(x, torch.Tensor) else None
    if asked is None:
        return thunders_proxy(x, name, history)
    aliases.note(x, history)
    return asked.proxy(x, name, history)


def _lookaside(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    stack = getattr(jit_ext.get_jit_ctx(), _FUNCTIONS, None)
    if not stack:
        return _found(fn, args, kwargs, False)
    return stack[-1](fn, args, lambda: _found(fn, args, kwargs, True))


def _found(fn: Callable, args: tuple, kwargs: dict, is_inside: bool) -> Any:
    asked = leader()
    if asked is not None:
        guards.note_call(fn, args)
        about_python = attributes.lookaside(fn, args) or standard_library.lookaside(fn)
        return about_python or named_results.with_fields(asked.lookaside(fn, args, kwargs), fn)
    if is_inside:
        return named_results.with_fields(lookaside_for(fn, *args, **kwargs), fn)
    return lookasides.of_thunder_norm(fn) or _original_lookaside(fn, *args, **kwargs)


def lookaside_for(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """What is called instead of `fn` on plain tensors where we have a part: ours, or Thunder's, with the results that torch has."""
    own = _of_user(fn) or lookasides.of_thunder_norm(fn) or torch_semantics.lookaside(fn, args)
    return own or lookasides.of_others(fn) or _original_lookaside(fn, *lookasides.shown_to_thunder(fn, args), **kwargs)


def _of_user(fn: Callable) -> Callable | None:
    found = lookasides.look_up(jit_ext._general_jit_lookaside_map, fn)
    return found if hasattr(found, _IS_OF_USER) else None


def _promotion(a: Any, b: Any) -> Any:
    """The type of the result of two operands: torch's wherever we have a part."""
    mended = torch_semantics.mended_promotion(a, b)
    return _original_promotion(a, b) if mended is None or not _has_part() else mended


def _dtype(x: Any, /, *, true_dtype: bool = False) -> Any:
    """The dtype with which `x` takes part in a promotion: a weak one if it has no dimensions *now*."""
    found = _original_dtype(x, true_dtype=true_dtype)
    if not true_dtype or not isinstance(x, TensorProxy) or found.is_weak == (x.ndim == 0) or not _has_part():
        return found
    if _is_made_inside(x):  # Thunder's floor_divide counts on `where(mask, -0.0, 0.0)` being weak
        return found
    return dtypes.to_strong_dtype(found) if x.ndim else dtypes.to_weak_dtype(found)


def _alias_updates(computation_trace: TraceCtx, alias_tensor_indices: list[list[int]]) -> TraceCtx:
    """What is written in place, with the names that it has afterwards; ours are the inputs that share memory."""
    own = aliases.indices(computation_trace) if participants() else None
    return _original_alias_updates(computation_trace, alias_tensor_indices if own is None else own)


def _is_capsule(x: Any) -> bool:
    """Whether the ``__self__`` of a function in C is no object that it is a method of."""
    return _original_is_capsule(x) or (type(x).__module__ == "pybind11_builtins" and _has_part())


def _make_generator(frame: Any, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for a generator."""
    make = generators.make_generator if _has_part() else _original_make_generator
    return make(frame, compilectx, runtimectx)


def _is_made_inside(x: TensorProxy) -> bool:
    """Whether the operation that is being written has made `x` on its way."""
    trace = get_tracectx()
    return len(trace.scopes) > 1 and any(out is x for bsym in trace.peek_scope() or () for out in bsym.flat_proxy_outs)


# -- putting them there -------------------------------------------------------------------------------------------------


REPLACED = (
    (thunder, "thunder_general_jit", _acquire),
    (jit_ext, "proxy", _proxy),
    (jit_ext, "general_jit_lookaside", _lookaside),
    (jit_ext, "process_recorded_modifications", _process_modifications),
    (jit_ext, "build_value_from_wrapped", _value),
    (thunder, "insert_alias_updates", _alias_updates),
    (utils, "_elementwise_type_promotion", _promotion),
    (utils, "to_dtype", _dtype),
    (interpreter, "is_pycapsule", _is_capsule),
    (interpreter, "make_generator", _make_generator),
)


def check_patch_points() -> None:
    """Verify that the installed Thunder has the globals we replace, with the signatures we rely on.

    Raises:
        VersionError: it does not.
    """
    expected = {
        _original_proxy: ["x", "name", "history"],
        _original_lookaside: ["fn", "args", "kwargs"],
        _original_acquire: ["fn", "args", "kwargs", "sharp_edges", "ad_hoc_executor"],
        _original_process: ["ctx", "epilogue_trace"],
        _original_value: ["wrapped_v"],
        _original_alias_updates: ["computation_trace", "alias_tensor_indices"],
        _original_promotion: ["a", "b"],
        _original_dtype: ["x", "true_dtype"],
        _original_is_capsule: ["x"],
        _original_make_generator: ["frame", "compilectx", "runtimectx"],
    }
    for function, parameters in expected.items():
        found = list(inspect.signature(function).parameters)
        if found != parameters:
            raise VersionError(f"{function.__module__}.{function.__name__} takes {found}, expected {parameters}")


def install() -> None:
    """Put the functions in place, once; a compilation that is under way asks them from here on."""
    if jit_ext.proxy is _proxy:
        return
    check_patch_points()
    for module, name, function in REPLACED:
        setattr(module, name, function)
    under_way = interpreter.get_interpretercompilectx_if_available()
    if under_way is not None and under_way._fn_lookaside is _original_lookaside:
        under_way._fn_lookaside = _lookaside


_install_natively = interpreter.make_opaque(install)  # Thunder's interpreter runs it as it is


def first_use(function: Callable) -> Callable:
    """Have a call of `function` put the hooks in place first, also where Thunder's interpreter makes the call."""

    @functools.wraps(function)
    def use(*args: Any, **kwargs: Any) -> Any:
        _install_natively()
        return function(*args, **kwargs)

    return use


def register_for_all(fn: Callable, lookaside: Callable) -> None:
    """Have every compilation call `lookaside` instead of `fn`, also those without a transform of ours."""
    setattr(lookaside, _IS_OF_USER, True)
    jit_ext.register_general_jit_lookaside(fn)(lookaside)


def is_replaced_for_all(fn: Callable) -> bool:
    """Whether Thunder, a user or we have something to call instead of `fn`."""
    return fn in jit_ext._general_jit_lookaside_map or lookasides.is_registered(fn)


@contextmanager
def torch_functions_on_proxies() -> Iterator[None]:
    """Let torch's functions, called on proxies meanwhile, record Thunder's operations."""
    if "__torch_function__" in vars(TensorProxy):  # a rule inside a rule
        yield
        return
    setattr(TensorProxy, "__torch_function__", classmethod(_record))  # noqa: B010 - pyright knows no such attribute
    try:
        yield
    finally:
        delattr(TensorProxy, "__torch_function__")


def _record(cls: type, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    operation = ltorch._torch_to_thunder_function_map.get(function)
    if operation is None:
        raise TransformError(f"{getattr(function, '__qualname__', function)} is not an operation that Thunder records")
    return operation(*args, **(kwargs or {}))
