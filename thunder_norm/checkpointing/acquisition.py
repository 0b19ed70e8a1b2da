"""Checkpointed regions of the user's program, while Thunder's interpreter goes through it."""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
import torch.utils.checkpoint

from thunder_norm.checkpointing.regions import Region, edge, names_in
from thunder_norm.checkpointing.replays import refused
from thunder_norm.errors import UnsupportedOpError, WrittenOnceWarning, with_details
from thunder_norm.subclass.backward import side_effects
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.subclass.recording.trace import FLATTEN, LEAF
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.hooks.participants import functions_inside
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.writes import copies_in, targets
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    unwrap,
)
from thunder.core.jit_ext import JitCtx, get_jit_ctx
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_STATE = "_thunder_norm_regions"


class _Path:
    """Where in the tree of regions an acquisition is: the numbers of the regions around it, and of the next one."""

    def __init__(self) -> None:
        self.around: list[int] = []
        self.next = [0]

    @staticmethod
    def of(ctx: JitCtx) -> _Path:
        """The state of an acquisition; it lives and dies with it."""
        found = getattr(ctx, _STATE, None)
        if found is None:
            found = _Path()
            setattr(ctx, _STATE, found)
        return found

    def enter(self) -> str:
        """The name of a region that begins here."""
        self.around.append(self.next[-1])
        self.next[-1] += 1
        self.next.append(0)
        return "_".join(["checkpoint", *map(str, self.around)])

    def leave(self) -> None:
        self.around.pop()
        self.next.pop()


def interpret_region(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the interpreter call a function, and let what it records be one region.

    In the program itself its operations are the program's while it is acquired, between the edges of the region: what it asks of tensors
    and does to them is what it would be without.
    """
    ctx = get_jit_ctx()
    trace, path = ctx.computation_trace, _Path.of(ctx)
    if _meets_wrappers():
        return _interpret_call(function, *args, **kwargs)
    name, position, start = path.enter(), _position(), len(trace.bound_symbols)
    if keeps_regions() and len(trace.scopes) == 1:
        trace.bound_symbols.append(edge(name, True).from_bsym(source_filename=position[0], source_positions=position[1]))
        try:
            result = _interpret_call(function, *args, **kwargs)
        finally:
            path.leave()
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED and not _meets_wrappers():
            trace.bound_symbols.append(edge(name, False))
        return result
    try:
        with scope(trace) as bsyms:
            result = _interpret_call(function, *args, **kwargs)
    finally:
        path.leave()
    is_raised = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED  # the program may catch it, and has what was computed by then
    if is_raised or _meets_wrappers():
        _dissolve(trace, bsyms, start)
        return result
    outs = {p.name: p for b in bsyms for p in b.flat_proxy_outs}
    if not keeps_regions():  # otherwise the transform finds out what is used, see `regions.finished`
        write = next((w for b in bsyms for w in copies_in(b) if w.args[1].name not in names_in(bsyms)), None)
        if write is not None:
            return do_raise(refused(write, f"{write.args[1].name} is changed in place in a checkpointed region"))
        returned = {p.name for p in _proxies(result)}
        outs = {name: p for name, p in outs.items() if name in returned}
    region = Region(name, bsyms, outs.values()).symbol()
    trace.peek_scope().append(region.from_bsym(source_filename=position[0], source_positions=position[1]))
    return result


def _meets_wrappers() -> bool:
    """Whether there are wrapper subclasses in the program: they are opened and closed at its edge, not at that of a region."""
    acquisition = current_acquisition()
    return acquisition is not None and acquisition.meets_wrappers


def _dissolve(trace: TraceCtx, bsyms: list[BoundSymbol], start: int) -> None:
    """Write the operations of a region without it, `start` being where the program was when it began."""
    if trace.peek_scope() is not trace.bound_symbols:
        trace.peek_scope().extend(bsyms)
        return
    at_edge = trace.bound_symbols[start:]  # wrappers met for the first time: opened before, closed after
    opened = [b for b in at_edge if b.sym.id in (FLATTEN.id, LEAF.id)]
    closed = [b for b in at_edge if b.sym.id not in (FLATTEN.id, LEAF.id)]
    trace.bound_symbols[start:] = [*opened, *bsyms, *closed]


def _position() -> tuple[Any, Any]:
    return get_interpreterruntimectx().get_current_user_source_location()


def _proxies(result: WrappedValue) -> list[Proxy]:
    """The proxies in what a function returned."""
    return [v for v in _leaves(result.value) if isinstance(v, Proxy)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    return [value]


# -- calls of the user's program that are regions ---------------------------------------------------------------------


def chosen_module(module: Any) -> bool:
    """Whether a transform in use makes the calls of this module regions."""
    cd = get_compile_data()
    transforms = getattr(cd, "transforms", None) or ()
    return any(id(module) in getattr(t, "checkpointed_modules", ()) for t in transforms)


def keeps_regions() -> bool:
    """Whether a transform in use keeps the regions of the user's program."""
    cd = get_compile_data()
    return any(hasattr(t, "checkpointed_modules") for t in getattr(cd, "transforms", None) or ())


@lookasides.instead_of(torch.utils.checkpoint.checkpoint)
def _torch_checkpoint(
    function: WrappedValue,
    *args: WrappedValue,
    use_reentrant: Any = None,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    preserve_rng_state: Any = None,
    early_stop: Any = None,
    **kwargs: WrappedValue,
) -> Any:
    """Called for ``torch.utils.checkpoint.checkpoint``: a region, reentrant or not.

    Thunder's own refuses reentrant ones, and both are one thing in a trace.  The generator's state is always preserved; checks of
    determinism have nothing to check, since what runs twice is one program.
    """
    if context_fn is not None and not keeps_regions():
        contexts = _interpret_call(context_fn)
        if contexts is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return contexts
        seeing = next((c for c in unwrap(contexts) if not isinstance(c, _CHOOSING)), None)
        if seeing is not None:
            return do_raise(_contexts_refused(f"they are a {type(seeing).__name__}, which may do something else"))
    scope_around = get_jit_ctx().computation_trace.peek_scope()
    start = len(scope_around)
    result = _interpreted(function, args, kwargs, context_fn)
    if torch.is_grad_enabled():
        _warn_of_writes(scope_around[start:])
    return result


# contexts that choose what is computed again, and leave what is computed as it is
_CHOOSING = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
    contextlib.nullcontext,
)


def _contexts_refused(why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            "checkpoint(..., context_fn=...) in a traced program",
            at=location_of_user(),
            why=why,
            instead="nest regions, or CheckpointTransform(memory_budget=...)",
        )
    )


def _warn_of_writes(bsyms: list[BoundSymbol]) -> None:
    written = next((t for b in bsyms for t in targets(b) if t.history is not None), None)
    if written is not None:
        warnings.warn(
            with_details(
                f"a checkpointed region writes into {written.name}, which was there before: once, and not again in the backward as in eager mode",
                at=location_of_user(),
                why="what is computed again is what the backward needs",
                instead="nothing, where once is what you want (running statistics of a batch norm); or write outside of the region",
            ),
            WrittenOnceWarning,
            stacklevel=2,
        )


def _interpreted(function: WrappedValue, args: tuple, kwargs: dict[str, WrappedValue], context_fn: Any) -> Any:
    if not keeps_regions():
        # tensors from around a function that is transformed are none of its region, nor is a wrapper, which opens at the edge of the program
        if functions_inside(get_jit_ctx()) or side_effects.reaches_wrapper():
            return _interpret_call(function, *args, **kwargs)
        return _interpret_computed_again(function, *args, **kwargs)
    if context_fn is not None and context_fn.value is not torch.utils.checkpoint.noop_context_fn:
        return do_raise(_contexts_refused("its contexts choose among kernels as they run"))
    return interpret_region(function, *args, **kwargs)


def _interpret_computed_again(function: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Have the interpreter call a function, and tag what Thunder's backward is to compute again: all but what it takes and returns.

    As ``thunder.core.jit_ext._general_jit_torch_checkpoint_lookaside`` has it, but where the program is, without a scope: there, what
    a region inside another computes would come before what it needs.
    """
    bsyms = get_jit_ctx().computation_trace.peek_scope()
    start = len(bsyms)
    result = _interpret_call(function, *args, **kwargs)
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result
    kept = {p.name for v in (*args, *kwargs.values(), result) for p in _proxies(v)}
    for bsym in bsyms[start:]:
        for p in () if copies_in(bsym) else bsym.flat_proxy_outs:  # what is written is written once
            if p.name not in kept:
                p.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return result


# the same code under another identity: interpreting it does not lead here again
_call = types.FunctionType(torch.nn.Module.__call__.__code__, torch.nn.Module.__call__.__globals__, "_wrapped_call_impl")
_call.__module__, _call.__qualname__ = torch.nn.Module.__call__.__module__, torch.nn.Module.__call__.__qualname__


@lookasides.instead_of(torch.nn.Module.__call__)
def _module_call(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for the call of a module."""
    interpret = interpret_region if chosen_module(module.value) else _interpret_call
    return interpret(_call, module, *args, **kwargs)
