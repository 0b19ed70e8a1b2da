"""Every change made to Thunder, in one place.

Six module globals of Thunder are replaced by functions that first ask whether one of our transforms is in use for the
compilation at hand, and otherwise call the original with the same arguments.  While a rule that a user registered for a
function transform runs, and only then, ``TensorProxy`` has a ``__torch_function__``, so that the rule can be written in torch's
functions.  While a trace is acquired under a transform of ours, native equivalents stand in for parts of Thunder's interpreter
(`thunder_norm/tracing/native`, a table in each file), and what it looks at is noted (`thunder_norm/tracing/guards.py`).  Nothing else
of Thunder is changed.

=====================  ==================================================  ==============================================
global                 upstream line it relies on (lightning-thunder 0.2.6)  why there is no official hook
=====================  ==================================================  ==============================================
proxy                  JitCtx.proxify: ``p = proxy(uvalue, name=...)``       what stands for an input tensor is fixed there
general_jit_lookaside  thunder_general_jit: ``fn_lookaside=...``             registered lookasides are looked up by function,
                                                                           after Thunder's own; constructors of unknown
                                                                           classes and unknown functions never get there
thunder_general_jit    acquire_initial_trace: ``thunder_general_jit(fn``      nobody is told that an acquisition begins or fails
_elementwise_type_...  elementwise_type_promotion: ``reduce(_elemen...``   the dtypes of results are worked out there
to_dtype               elementwise_type_promotion: ``to_dtype(x, true...``   a tensor that got dimensions still counts as without
process_recorded_...   thunder_general_jit: ``process_recorded_modi...``      what the program writes into objects is only known,
                       ``fications(ctx, epilogue_trace)``                   and the epilogue still open, at this place
=====================  ==================================================  ==============================================
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import thunder
import thunder.torch as ltorch
import torch
from thunder.core import compile_data, dtypes, jit_ext, utils
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue, do_raise, wrap
from thunder.core.options import SHARP_EDGES_OPTIONS
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import ThunderNormError, TransformError, UnsupportedOpError, UnsupportedSubclassError, VersionError
from thunder_norm.subclass import interpret, named_results, operations, plain, plain_operations, side_effects, values
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.boundary_operators import bindable
from thunder_norm.subclass.protocol import check_supported, is_wrapper, outer_metadata
from thunder_norm.subclass.reach import may_construct_wrappers
from thunder_norm.tracing import attributes, guards, native, standard_library, torch_semantics

_ATTRIBUTE = "_thunder_norm_acquisition"
_INTERPRETED = "_thunder_norm_is_interpreted"
_IS_OURS = "_thunder_norm_is_ours"
NUM_LEVELS = "_thunder_norm_num_levels"  # how many functions under function transforms are being acquired

_original_proxy = jit_ext.proxy
_original_lookaside = jit_ext.general_jit_lookaside
_original_acquire = thunder.thunder_general_jit
_original_process = jit_ext.process_recorded_modifications
_original_promotion = utils._elementwise_type_promotion
_original_dtype = utils.to_dtype


def active_transform() -> Any | None:
    """The transform of ours in use for the current compilation, if any."""
    cd = get_compile_data()
    for transform in getattr(cd, "transforms", None) or ():
        if getattr(transform, "interprets_subclasses", False):
            return transform.effective(cd.transforms)
    return None


def is_ours() -> bool:
    """Whether any transform of ours is in use for the current compilation (each installs the patches)."""
    ctx = jit_ext.get_jit_ctx()
    found = getattr(ctx, _IS_OURS, None)
    if found is None:
        transforms = getattr(get_compile_data(), "transforms", None) or ()
        found = any(hasattr(t, "refuses_values") for t in transforms)
        setattr(ctx, _IS_OURS, found)
    return found


def current_acquisition() -> Acquisition | None:
    """The state of the acquisition at hand: None if no transform of ours is in use."""
    ctx = jit_ext.get_jit_ctx()
    found = getattr(ctx, _ATTRIBUTE, False)
    if found is False:
        transform = active_transform()
        found = None if transform is None else transform.new_acquisition()
        setattr(ctx, _ATTRIBUTE, found)
        for watching in getattr(get_compile_data(), "transforms", None) or ():
            if hasattr(watching, "watch_acquisition"):
                watching.watch_acquisition(ctx.computation_trace)
        if found is not None:
            found.user_names = ctx._proxy_swapmap
            setattr(get_compile_data(), _ATTRIBUTE, found)
    return found


def take_acquisition() -> Acquisition | None:
    """The state of the acquisition that has just finished, handed over once."""
    cd = get_compile_data()
    found = getattr(cd, _ATTRIBUTE, None)
    if found is not None:
        delattr(cd, _ATTRIBUTE)
        setattr(cd, _INTERPRETED, found.has_wrappers)
    return found


def is_interpreted() -> bool:
    """Whether the program being compiled has wrappers in it."""
    return getattr(get_compile_data(), _INTERPRETED, False)


def current_stats() -> Any:
    """The lists that the current compilation writes its traces into.

    Relies on ``thunder.core.compile_data._compile_data`` holding the pair (compile data, compile stats).
    """
    _, stats = compile_data._compile_data.get()
    return stats


def forget_earlier_traces() -> None:
    """Drop the traces recorded so far for this compilation: they precede the lowering and still mention wrappers.

    Relies on ``jit`` appending what a transform returns to ``cs.last_traces`` after the call.
    """
    current_stats().last_traces.clear()


# What makes a computation that is to be differentiated one without in-place operations; `jitted_gradients` sets it.
functional: Callable[[TraceCtx], TraceCtx] | None = None


def _acquire(fn: Callable, args: tuple, kwargs: dict, /, **options: Any) -> Any:
    transforms = getattr(get_compile_data(), "transforms", None) or ()
    if not any(hasattr(t, "refuses_values") for t in transforms):
        return _original_acquire(fn, args, kwargs, **options)
    with ExitStack() as stack:
        stack.enter_context(guards.noted(fn, args, kwargs))
        if options.get("sharp_edges") is SHARP_EDGES_OPTIONS.ALLOW:  # otherwise Thunder speaks of values of its own helpers too
            stack.enter_context(native.interpreter())
        if any(getattr(t, "refuses_values", False) for t in transforms):
            stack.enter_context(side_effects.watched(fn, args, kwargs))
        found = _original_acquire(fn, args, kwargs, **options)
        acquisition = getattr(get_compile_data(), _ATTRIBUTE, None)
        if functional is not None and acquisition is not None and not acquisition.has_wrappers and torch.is_grad_enabled():
            found.computation_trace = functional(found.computation_trace)
        return found


def _process_modifications(ctx: Any, epilogue_trace: Any) -> None:
    _original_process(ctx, epilogue_trace)
    side_effects.write(ctx, epilogue_trace, getattr(ctx, _ATTRIBUTE, None) or None)
    guards.add(ctx, functools.partial(bindable, "check_surroundings"))


def _proxy(x: Any, *, name: str | None = None, history: Any = None) -> Any:
    acquisition = current_acquisition() if isinstance(x, torch.Tensor) else None
    if acquisition is None:
        return _original_proxy(x, name=name, history=history)
    try:
        acquisition.check_not_own_fake(x)
        if is_wrapper(x):
            return interpret.proxy_for_input(acquisition, x, name, history)
        check_supported(x)
    except (UnsupportedOpError, UnsupportedSubclassError) as e:
        # an exception here would be taken for a crash of the interpreter, which raises this one at its next call
        acquisition.pending = acquisition.refuse(e)
        x = torch.empty(())  # what Thunder makes of the refused one does not matter, and may be an error of its own
    p = _original_proxy(x, name=name, history=history)
    if isinstance(p, TensorProxy) and x.layout is torch.strided:
        acquisition.strides[p.name] = x.stride()
        acquisition.note_input(p.history, x)
    return p


# What is asked before an operation of a transformed function is Thunder's; `function_transforms.completion` sets it.
completion: Callable[[Callable, tuple, Callable[[], Any]], Any] | None = None


def _lookaside(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    if completion is None or not getattr(jit_ext.get_jit_ctx(), NUM_LEVELS, 0):
        return _found(fn, *args, **kwargs)
    return completion(fn, args, lambda: _found(fn, *args, **kwargs))


def _found(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    ctx = jit_ext.get_jit_ctx()
    acquisition = getattr(ctx, _ATTRIBUTE, None) or current_acquisition()
    if acquisition is not None or is_ours():
        guards.note_call(fn, args)
        about_python = attributes.lookaside(fn, args) or standard_library.lookaside(fn)
        if about_python is not None:
            return about_python
    if acquisition is not None:
        return named_results.with_fields(_interpreted(acquisition, fn, args, kwargs), fn)
    if not is_ours() and not getattr(ctx, NUM_LEVELS, 0):
        return _original_lookaside(fn, *args, **kwargs)
    found = _of_ours(fn, args) if is_ours() else None
    return named_results.with_fields(found or _of_thunder(fn, *args, **kwargs), fn)


def _interpreted(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not acquisition.meets_wrappers:
        refused = values.refusal(fn, args)
        if refused is not None:
            return refused
    if not acquisition.is_started:
        acquisition.is_started = True
        wrappers = _wrappers_given(fn, args)
        acquisition.expects_wrappers = bool(wrappers)
        acquisition.watches |= bool(wrappers)
        if torch.is_grad_enabled() and any(outer_metadata(x)[2] for x in wrappers):
            acquisition.differentiate()
        _begin(acquisition, args)
    if not acquisition.mentions_wrappers and type(fn) in _OWN_CODE and may_construct_wrappers(fn):
        acquisition.mentions_wrappers = acquisition.watches = True
    if not acquisition.watches and type(fn) in _FUNCTIONS and fn not in operations.operations():
        return plain.about_plain(acquisition, fn, args) or _of_thunder(fn, *args, **kwargs)  # most calls without wrappers
    found = interpret.lookaside(acquisition, fn, args, kwargs)
    if not found:
        found = _with_own_lists(_of_thunder(fn, *args, **kwargs), fn, args)
        found = plain_operations.with_fallback(acquisition, fn, args, found)
    if acquisition.pending is None:
        return found
    pending, acquisition.pending = acquisition.pending, None
    return do_raise(pending)


def _of_thunder(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """What Thunder calls instead of `fn`, with the arguments that torch's function has."""
    return torch_semantics.lookaside(fn, args) or _original_lookaside(fn, *args, **kwargs)


def _promotion(a: Any, b: Any) -> Any:
    """The type of the result of two operands: torch's wherever a transform of ours has a part in the compilation."""
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


def _is_made_inside(x: TensorProxy) -> bool:
    """Whether the operation that is being written has made `x` on its way."""
    trace = get_tracectx()
    return len(trace.scopes) > 1 and any(out is x for bsym in trace.peek_scope() or () for out in bsym.flat_proxy_outs)


def _has_part() -> bool:
    """Whether a transform of ours is in the compilation at hand, or a transformed function is being acquired."""
    if any(hasattr(t, "refuses_values") for t in getattr(get_compile_data(), "transforms", None) or ()):
        return True
    ctx = jit_ext._jit_ctx.get(None)
    return bool(getattr(ctx, NUM_LEVELS, 0))


def _of_ours(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What any transform of ours calls instead of `fn` on plain tensors."""
    own = plain_operations.own_lookasides.get(fn) if fn is operations.AUTOGRAD_APPLY else None
    refused = (
        values.refusal(fn, args) if any(getattr(t, "refuses_values", False) for t in get_compile_data().transforms) else None
    )
    return own or refused or plain.about_plain(None, fn, args)


def _with_own_lists(found: Any, fn: Callable, args: tuple[WrappedValue, ...]) -> Any:
    """Let an operation keep copies of lists of numbers: Thunder's trace would see the program change them afterwards."""
    if not callable(found) or operations.torch_callable(fn) is None or not any(_is_list_of_ints(a) for a in args):
        return found
    return lambda *args, **kwargs: found(*(_copied(a) if _is_list_of_ints(a) else a for a in args), **kwargs)


def _is_list_of_ints(a: WrappedValue) -> bool:
    return type(a.value) is list and all(type(v) is int for v in a.value)


def _copied(a: WrappedValue) -> WrappedValue:
    return wrap(list(a.value), provenance=a.provenance)


_OWN_CODE = frozenset({types.FunctionType, types.MethodType})
_FUNCTIONS = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})


def _wrappers_given(entry: Callable, args: tuple[WrappedValue, ...]) -> list[torch.Tensor]:
    """The wrappers among the arguments of the jitted function, and the parameters and buffers of the jitted module.

    Relies on the interpreter's first call: ``fn_2(args, kwargs)``, a closure over the function given to ``interpret``.
    """
    tensors = tree_leaves(tuple(a.value for a in args))
    for cell in getattr(entry, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.nn.Module):
            tensors.extend((*cell.cell_contents.parameters(), *cell.cell_contents.buffers()))
    return [t for t in tensors if is_wrapper(t)]


def _begin(acquisition: Acquisition, args: tuple[WrappedValue, ...]) -> None:
    """Tell the acquisition the arguments of the jitted function; relies on the interpreter's first call, as `_wrappers_given`."""
    values = [a.value for a in args]
    if [type(v) for v in values] != [tuple, dict]:
        return
    try:
        acquisition.begin(*values)
    except ThunderNormError as e:  # see `_proxy`
        acquisition.pending = acquisition.refuse(e)


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
        _original_promotion: ["a", "b"],
        _original_dtype: ["x", "true_dtype"],
    }
    for function, parameters in expected.items():
        found = list(inspect.signature(function).parameters)
        if found != parameters:
            raise VersionError(f"{function.__module__}.{function.__name__} takes {found}, expected {parameters}")


def install() -> None:
    """Put the functions in place; done once, when a transform of ours is first made."""
    if jit_ext.proxy is not _proxy:
        check_patch_points()
        jit_ext.proxy = _proxy
        jit_ext.general_jit_lookaside = _lookaside
        jit_ext.process_recorded_modifications = _process_modifications
        utils._elementwise_type_promotion = _promotion
        utils.to_dtype = _dtype
        setattr(thunder, "thunder_general_jit", _acquire)  # noqa: B010 - pyright knows of no such assignment
