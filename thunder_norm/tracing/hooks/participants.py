"""Who has a part in a compilation: transforms of ours in its list, and functions that are being transformed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing import whereabouts
from thunder_norm.tracing.calls import raising
from thunder_norm.tracing.calls.jitted_modules import present
from thunder_norm.tracing.hooks.lookups import lookaside_for
from thunder_norm.tracing.hooks.replaced import install
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.freed_inputs import freeing_inputs
from thunder_norm.tracing.shared_memory.saved_tensors import releasing_saved
from thunder_norm.tracing.shared_memory.views_of_results import reshaping_results
from thunder_norm.tracing.torch_functions.attention_kernels import with_torchs_masks
from thunder_norm.tracing.torch_functions.known_classes import with_plain_inputs
from thunder.core import jit_ext
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform

_LEADER = "_thunder_norm_leader"  # of a JitCtx: the participant that is asked
_FUNCTIONS = "_thunder_norm_functions"  # of a JitCtx: what to ask inside each function that is being transformed
_original_proxy = jit_ext.proxy


class Participant(Transform):
    """A transform of ours.  Making one puts the hooks in place; of those in a compilation's list one, the leader, is asked.

    The leader is the most derived of those that interpret subclasses, or else the first.
    """

    interprets_subclasses = False
    goes_inside = False  # whether function transforms differentiate inner tensors of wrappers that do not require grad

    def __init__(self) -> None:
        install()

    def transform_module(self, model: ThunderModule) -> None:
        """Called with a module that was jitted: it has the members of the model, unless transforms of others may put theirs in their places."""
        others = (type(t) for t in model._lc_cd.transforms if not isinstance(t, Participant))
        if all(kind.transform_module is Transform.transform_module for kind in others):
            present(model)

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

    def giving_memory(self, put: Callable) -> Callable:
        """What is called for ``x.data = value`` with plain tensors; `put` notes it in the trace."""
        return put

    def write_epilogue(self, ctx: jit_ext.JitCtx, epilogue: TraceCtx, process: Callable[[], None]) -> None:
        """Have the epilogue write what the program has put into objects; ``process()`` is what Thunder writes."""
        process()

    def result(self, value: WrappedValue, find: Callable[[WrappedValue], Any]) -> Any:
        """What the epilogue returns for a value in the result; ``find(value)`` is what Thunder has for it."""
        return find(value)

    def has_plain_inputs(self) -> bool:
        """Whether in the program just acquired inputs are the tensors that they are in the model, and nobody follows them by name."""
        return True

    def acquired(self, found: Any) -> None:
        """Called with the traces just acquired, before any transform."""

    def end(self, found: Any) -> None:
        """Called once for every participant, with the traces just acquired, as the leader has left them."""

    def begins_again(self, found: Any | None) -> bool:
        """Whether the program is to be acquired once more, with what is known by now; `found` are the traces, None if there was an error."""
        return False

    def is_undone_where_it_raises(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call that ends in an exception of the program's leaves objects as they were."""
        return False

    def hindrance_by_python(self, fn: Callable, args: tuple, kwargs: dict) -> str | None:
        """Why a call of the jitted function `fn` would do something else if Python ran it; None if it does the same."""
        return "it is a function under a transform" if any(isinstance(fn, kind) for kind in _BROUGHT) else None

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """The program that runs, forward or backward, which lets go of tensors as soon as nobody needs them, and whose views need no layout."""
        return freeing_inputs(releasing_saved(reshaping_results(with_torchs_masks(with_plain_inputs(computation_trace)))))


_BROUGHT: dict[type, Callable[[], Participant]] = {}


def brings(kind: type, make: Callable[[], Participant]) -> None:
    """Have ``thunder.jit`` compile with what `make` gives where it is given a function of class `kind`, or an executor of that class."""
    _BROUGHT[kind] = make


_JOINING: list[type] = []


def joins_tied_parameters(kind: type) -> None:
    """Have a parameter with several names be one input of programs whose executors one of class `kind` is among.

    Without it programs have an input for each name, as in Thunder.
    """
    _JOINING.append(kind)


def takes_parameters_once(executors: Sequence[Any]) -> bool:
    """Whether an executor is there for which tied parameters are one input."""
    return isinstance(executors, Sequence) and any(isinstance(e, tuple(_JOINING)) for e in executors)


_LEADERS: list[Callable[[], Participant]] = []


def leads(make: Callable[[], Participant]) -> None:
    """Have what `make` gives lead compilations in whose list no participant interprets subclasses, where Thunder lacks an operation.

    It answers for operations on plain tensors that Thunder has not, or has otherwise, whichever participant is in the list.
    """
    _LEADERS[:] = [make]


def with_leader(transforms: Sequence[Any]) -> list[Any]:
    """A list of transforms with a participant that interprets subclasses, before the first of ours, if there is one."""
    first = next((i for i, t in enumerate(transforms) if isinstance(t, Participant)), None)
    if first is None or any(isinstance(t, Participant) and t.interprets_subclasses for t in transforms):
        return list(transforms)
    return [*transforms[:first], *(make() for make in _LEADERS), *transforms[first:]]


def brought_by(fn: Callable, executors: Sequence[Any]) -> Participant | None:
    """The participant of a compilation that has none in its list: of the function, or else of an executor."""
    for given in (fn, *executors):
        for kind, make in _BROUGHT.items():
            if isinstance(given, kind):
                return make()
    return None


def participants() -> list[Participant]:
    """The transforms of ours in use for the current compilation."""
    return [t for t in getattr(get_compile_data(), "transforms", None) or () if _takes_part(type(t))]


@functools.lru_cache(maxsize=1024)
def _takes_part(kind: type) -> bool:
    """Whether a class of transforms is of ours: asked at each symbol, and of abstract classes isinstance is slow."""
    return issubclass(kind, Participant)


def leader() -> Participant | None:
    """The participant to ask in the acquisition at hand; None if there is none."""
    ctx = jit_ext.get_jit_ctx()
    found = getattr(ctx, _LEADER, False)
    if found is False:
        ours = participants()
        found = leading(ours) if ours else None
        setattr(ctx, _LEADER, found)
        whereabouts.follow()
        raising.follow(ctx)
        for t in ours:
            t.begin(ctx.computation_trace)
    return found


def leading(ours: list[Participant]) -> Participant:
    """The leader of participants."""
    interpreting = [t for t in ours if t.interprets_subclasses]
    return max(interpreting, key=lambda t: len(type(t).__mro__)) if interpreting else ours[0]


@contextmanager
def inside_function(ask: Callable[[Callable, tuple, dict, Callable[[], Any]], Any]) -> Iterator[None]:
    """The function of a function transform is being interpreted: ``ask(fn, args, kwargs, find)`` says what is called instead of `fn`.

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


def functions_inside(ctx: jit_ext.JitCtx | None) -> list[Callable]:
    """What to ask inside each function that is being transformed, the innermost last."""
    return getattr(ctx, _FUNCTIONS, ())


def has_part() -> bool:
    """Whether a participant is in the compilation at hand, or a function is being transformed."""
    if participants():
        return True
    ctx = jit_ext._jit_ctx.get(None)
    return bool(functions_inside(ctx))


def thunders_proxy(x: Any, name: str | None, history: Any) -> Any:
    """What Thunder has for an input.

    Raises:
        UnsupportedOpError: it has no shape yet.
    """
    if is_lazy(x):
        raise UnsupportedOpError(
            with_details(
                "a parameter or buffer of a lazy module, which gets its shape in the first call",
                at=location_of_user(),
                why="a module has its parameters before a trace is acquired, and keeps them",
                instead="call the module itself once, with an input like those to come",
            )
        )
    return _original_proxy(x, name=name, history=history)
