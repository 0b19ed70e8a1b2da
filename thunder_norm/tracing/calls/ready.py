"""Programs that were traced and are ready to be called again.

``thunder.jit`` looks, in each call, for a program whose prologue accepts it.  From the third call on that program is found here, by a
function of fewer calls (`prologue`), and runs without what Thunder puts around it where that has no effect: where no gradients are recorded
and no autocast is on.  Thunder's statistics are kept.  Whatever is not found here goes Thunder's way.  In a program
that is being traced, and where torch follows operations as they run (torch.func, dual numbers, modes), the user's own function runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _contextlib

from thunder_norm.tracing.calls import raising
from thunder_norm.tracing.calls.differentiated import Backward, has_small_results, of_call
from thunder_norm.tracing.calls.jitted_modules import JittedModule
from thunder_norm.tracing.calls.left_to_autograd import left_to_autograd
from thunder_norm.tracing.calls.precision import Precision, precision_of_now
from thunder_norm.tracing.calls.prologue import Inputs, shortened
from thunder_norm.tracing.calls.raising import Raised
from thunder_norm.tracing.calls.replaced import Watched
from thunder_norm.tracing.calls.told_operations import has_modes, without_modes
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.trace import is_tracing

_MOST_FORMS = 4  # of the tensors that one program is called with: other dispatch keys, other classes of parameters


@dataclass(frozen=True)
class _Ready:
    """A program with what accepts a call of it."""

    entry: Any  # Thunder's
    position: int  # in Thunder's cache
    inputs: Inputs
    called: Any  # the entry that Thunder's call goes on with


class ShortCalls:
    """Calls of a jitted function: Thunder's search for the program of a call, and the programs that are found without it.

    ``thunder.jit`` gets it for its own search.  What the user gets is what `whole` makes, which asks Thunder only where nothing is ready.
    """

    def __init__(self, find: Callable, cd: Callable[[], Any], cs: Callable[[], Any]):
        """Of one jitted function.

        Args:
            find: Thunder's search: from arguments to a cache entry, its inputs, and what the prologue gives to the epilogue.
            cd: gives the compile data.
            cs: gives the compile stats.
        """
        self._find, self._cd, self._cs = find, cd, cs
        fn = cd().fn
        self._watched = Watched(fn) if isinstance(fn, torch.nn.Module) else None
        self._ready: tuple[_Ready, ...] = ()
        self._tried: dict[int, tuple[Any, int]] = {}  # entries of Thunder's by their id, and how often they were made ready

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Thunder's search, after which the program that it found may be ready."""
        if self._watched is not None and not self._watched.is_unchanged():
            self._watched.follow(_jitted(self._cd()))
        stats = self._cs()
        misses = stats.cache_misses
        with without_modes():
            entry, *inputs = self._find(*args, **kwargs)
            if stats.cache_misses == misses and _can_be_ready(self._cd(), stats):
                _, times = self._tried.get(id(entry), (entry, 0))
                if times < _MOST_FORMS:
                    self._tried[id(entry)] = entry, times + 1
                    new = _made_ready(entry, self._cd(), stats, args, kwargs)
                    self._ready = self._ready if new is None else (new, *self._ready)
        return raising.watched(of_call(entry, inputs[0]), raising.taken_undo(self._cd())), *inputs

    def _found(self, args: tuple, kwargs: dict) -> tuple[_Ready, tuple] | None:
        """The program that is ready for these arguments, and what its prologue gives."""
        if self._watched is not None and not self._watched.is_unchanged():
            return None
        for n, r in enumerate(self._ready):
            try:
                given = r.inputs(args, kwargs)
            except Exception:  # noqa: BLE001 - what a prologue raises says no
                continue
            if given is None:
                continue
            cache = self._cs().interpreter_cache
            if r.position >= len(cache) or cache[r.position] is not r.entry:
                self._ready = ()  # somebody emptied it
                self._tried.clear()
                return None
            if n:
                self._ready = (r, *self._ready[:n], *self._ready[n + 1 :])
            return r, given
        return None

    def _by_python(self, raised: Raised, args: tuple, kwargs: dict) -> Any:
        """A call whose trace has raised, by the program itself."""
        cd = self._cd()
        return raising.by_python(raised, cd, _jitted(cd), args, kwargs)

    def whole(self, call: Callable, connect: Callable[[Any, Any], Any]) -> Callable:
        """A call from arguments to results.

        Args:
            call: Thunder's.
            connect: Thunder's way from a cache entry and what its computation gave to results with a history.
        """
        found, stats_of, program = self._found, self._cs, self._cd().fn

        def called(*args: Any, **kwargs: Any) -> Any:
            if _is_eager_torchs() or is_tracing():  # in this order: torch.compile of torch 2.11 follows no context variable
                return program(*args, **kwargs)  # a part of another's trace; or torch asks for the program's own operations
            if has_modes():
                with without_modes():
                    ready = found(args, kwargs)
            else:
                ready = found(args, kwargs)
            if ready is None:
                try:
                    return call(*args, **kwargs)
                except Raised as e:
                    raised = e
                return self._by_python(raised, args, kwargs)
            stats = stats_of()
            stats.calls += 1
            stats.last_trace_host_start = perf_counter_ns()
            r, (inputs, to_epilogue) = ready
            with_grad, raised = is_grad_enabled(), None
            try:
                _note_hit(stats, r.entry)
                entry = of_call(r.called, inputs)
                stats.last_trace_host_execution_start = perf_counter_ns()
                try:
                    result = entry.computation_fn(*inputs)
                except Raised as e:
                    raised, result = e, None
                finally:
                    stats.last_trace_host_execution_stop = perf_counter_ns()
                if raised is not None:
                    return self._by_python(raised, args, kwargs)
                if entry.backward_fn:
                    result = connect(entry, result)
                result = entry.epilogue_fn(*to_epilogue, *result)
                if is_grad_enabled() is not with_grad:
                    torch.set_grad_enabled(with_grad)
                stats.last_computation = entry.computation_fn
                return result
            finally:
                stats.last_trace_host_stop = perf_counter_ns()

        return called


def _is_eager_torchs() -> bool:
    """Whether a call is made where torch follows operations as they run, which those of a trace are not.

    Under a transform of torch.func, at a level of dual numbers, and in a mode that is told each function: one that changes what a function
    returns would meet the operations of a trace, and none of its backward.
    """
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    modes = torch._C._len_torch_function_stack()
    return modes > 0 and not all(_is_known(torch._C._get_function_stack_at(n)) for n in range(modes))


def _is_known(mode: TorchFunctionMode) -> bool:
    """Whether it is torch's, as a default device, or one of ours, which follow traces."""
    return type(mode).__module__.partition(".")[0] in ("torch", "thunder_norm")


def _note_hit(stats: Any, entry: Any) -> None:
    """What Thunder notes when it finds a program."""
    stats.cache_hits += 1
    stats.last_traces = entry.computation_traces
    stats.last_prologue_traces = entry.prologue_traces
    stats.last_prologue = entry.prologue_fn
    stats.last_interpreted_instructions = stats.last_interpreter_log = None
    stats.last_prologue_transformation_start = stats.last_prologue_transformation_stop = 0
    stats.last_computation_transformation_start = stats.last_computation_transformation_stop = 0


def _can_be_ready(cd: Any, stats: Any) -> bool:
    """Whether such a call, in the state that the process is in, is one that can be found here."""
    return (
        cd.cache_option is CACHE_OPTIONS.CONSTANT_VALUES
        and not (getattr(cd.fn, "use_ddp", False) or getattr(cd.fn, "use_fsdp", False))
        and (not torch._C._is_any_autocast_enabled() or precision_of_now().is_lowered)
        and not torch._C._len_torch_function_stack()
    )


def _made_ready(entry: Any, cd: Any, stats: Any, args: tuple, kwargs: dict) -> _Ready | None:
    """The program that Thunder found, with a shorter prologue, unless it cannot have one."""
    position = next((n for n, e in enumerate(stats.interpreter_cache) if e is entry), None)
    module = _jitted(cd)
    if position is None or not (module is None or type(module) is ThunderModule or isinstance(module, JittedModule)):
        return None
    inputs = shortened(entry.prologue_traces[-1], module, cd._thunder_module_map, args, kwargs)
    if inputs is None:
        return None
    bare = functools.partial(_bare, with_grad=torch.is_grad_enabled(), precision=precision_of_now())
    called = entry._replace(computation_fn=bare(entry.computation_fn), epilogue_fn=bare(entry.epilogue_fn))
    if isinstance(entry.backward_fn, Backward) and torch.is_grad_enabled():
        if (layer := _left_to_autograd(entry, cd)) is not None:
            called = called._replace(computation_fn=layer, backward_fn=None)
        elif has_small_results(entry.computation_traces[-1]):
            called = called._replace(backward_fn=entry.backward_fn.as_one_node(_bare_in_backward))
    return _Ready(entry, position, inputs, raising.watched(called))


def _left_to_autograd(entry: Any, cd: Any) -> Callable | None:
    """The computation of an entry with the history that torch gives its results, if it is a single layer and nothing asks for another."""
    if (
        entry.backward_fn.stand_ins is not None
        or entry.return_none_instead_of_grads
        or cd.compile_options.get("is_differentiable_outputs") is not None
        or precision_of_now().is_lowered
        or raising.watched(entry) is not entry
    ):
        return None
    return left_to_autograd(entry.computation_traces[-1])


def _jitted(cd: Any) -> Any:
    """What ``thunder.jit`` gave for a module."""
    return cd._thunder_module_map.get(id(cd.fn))


def _inner(fn: Callable) -> Callable | None:
    """A function of Thunder's without its decorators ``torch.no_grad()`` and ``no_autocast``; None if it has others."""
    inner = getattr(fn, "__wrapped__", None)
    if inner is None or fn.__code__.co_filename != _contextlib.__file__ or inner.__code__.co_name != "no_autocast_fn":
        return None
    return inner.__wrapped__


def _bare(fn: Callable, with_grad: bool, precision: Precision) -> Callable:
    """A function of Thunder's without its decorators, for calls with this autocast around them."""
    inner = _inner(fn)
    if inner is None:
        return fn
    bare = precision.left_out(inner)
    if not with_grad:
        return bare
    set_grad_enabled = torch._C._set_grad_enabled

    def without_grad(*args: Any) -> Any:
        set_grad_enabled(False)
        try:
            return bare(*args)
        finally:
            set_grad_enabled(True)

    return without_grad


def _bare_in_backward(fn: Callable) -> Callable:
    """The same of a backward part, which may run in another state than its forward."""
    bare = _inner(fn)
    if bare is None:
        return fn
    is_any_autocast_enabled = torch._C._is_any_autocast_enabled

    def backward(saved: Any, cotangents: Any) -> Any:
        return fn(saved, cotangents) if is_grad_enabled() or is_any_autocast_enabled() else bare(saved, cotangents)

    return backward
