"""From a user's function to a program that can be transformed.

A transformed function met by Thunder's interpreter has its function interpreted on *fresh* proxies, one for each tensor argument,
in a scope of its own.  What was recorded becomes a flat program: a trace that takes a tuple of proxies, first the fresh ones, then
every proxy of the surroundings that the function uses (closure conversion), and returns a tuple of proxies.  Evaluators then write
the transformed program into the surroundings.  A transformed function inside another is therefore plain operations by the time the
outer one sees it; there is no stack of levels at run time.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from thunder_norm.errors import TransformLevelError, with_details
from thunder_norm.functions import completion
from thunder_norm.functions.interpreted import Level, Levels, value_of, values_of, wrapped
from thunder_norm.functions.programs import flat_program, flat_proxies
from thunder_norm.functions.writes.functionalization import without_mutations
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.tracing import hooks
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.views_in_place import keep_histories
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, wrap_const
from thunder.core.jit_ext import JitCtx, get_jit_ctx
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

_RESERVED = ("args", "kwargs", "fn", "obj")  # names in Thunder's prologues


class Interrupted(Exception):
    """The interpreted function raised: the interpreter holds the exception and is to be told so."""


@dataclass(frozen=True)
class Program:
    """A user's function as a flat program.

    Attributes:
        trace: takes ``trace.args`` (the arguments' tensors, then the captured ones), returns a tuple of proxies.
        num_args: how many of ``trace.args`` stand for arguments.
        out_leaves: the function's result, flattened; a proxy there is the next of the trace's results.
        out_spec: the structure of the result.
    """

    trace: TraceCtx
    num_args: int
    out_leaves: tuple[Any, ...]
    out_spec: TreeSpec

    @property
    def captured(self) -> tuple[Proxy, ...]:
        """The proxies of the surroundings that the function uses."""
        return tuple(self.trace.args[self.num_args :])

    def result(self, outs: Sequence[Any]) -> Any:
        """The function's result with `outs` in place of the trace's results."""
        remaining = iter(outs)
        return tree_unflatten([next(remaining) if isinstance(v, TensorProxy) else v for v in self.out_leaves], self.out_spec)


def acquire(
    function: WrappedValue,
    name: str,
    args: Sequence[WrappedValue],
    kwargs: dict[str, WrappedValue],
    shapes: Any = None,
    moved: Sequence[bool] = (),
    is_reverse: bool = False,
) -> Program:
    """Interpret `function` on fresh proxies and return it as a flat program.

    Args:
        function: what to interpret.
        name: of the transform, for messages.
        args: the arguments of the transformed function.
        kwargs: its keyword arguments.
        shapes: a function from the position of an argument's tensor and its proxy to the shape that `function` is to see.
        moved: which of the arguments' tensors the transform is about, if not all mean to `function` what they mean outside.
        is_reverse: whether it differentiates these backward.

    Raises:
        Interrupted: `function` raised.
        TransformLevelError: it uses a value of another transformed function that is over.
    """
    ctx = get_jit_ctx()
    trace = ctx.computation_trace
    levels = Levels.of(ctx)
    values = values_of(args, kwargs)
    flat, spec = tree_flatten(values)
    actual = [v for v in flat if isinstance(v, TensorProxy)]
    paths = _paths(function.value, *values)
    fresh: list[TensorProxy] = []
    for i, v in enumerate(flat):
        if isinstance(v, TensorProxy):
            shape = v.shape if shapes is None else shapes(i, v)
            flat[i] = TensorProxy(like=v, shape=tuple(shape), requires_grad=v.requires_grad, history=None)
            fresh.append(flat[i])
    new_args, new_kwargs = tree_unflatten(flat, spec)
    call_args = [wrapped(v, a) if _has_tensors(v) else a for a, v in zip(args, new_args, strict=True)]
    call_kwargs = {k: wrapped(new_kwargs[k], a) if _has_tensors(new_kwargs[k]) else a for k, a in kwargs.items()}

    given = {p.name: v.name for p, v in zip(fresh, actual, strict=True)}
    of_level = frozenset(p.name for p, is_moved in zip(fresh, moved, strict=bool(moved)) if is_moved)
    with scope(trace) as bsyms, _opened(ctx, Level(name, bsyms, given, of_level, is_reverse)), grad_enabled():
        found = _interpret_call(function, *call_args, **call_kwargs)
        if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            raise Interrupted
        out_leaves, out_spec = tree_flatten(value_of(found))

    keep_histories(bsyms)
    outs = [v for v in out_leaves if isinstance(v, TensorProxy)]
    made = {p.name for b in bsyms for p in b.flat_proxy_outs} | {p.name for p in fresh}
    captured = {p.name: p for b in bsyms for p in b.flat_proxy_args if p.name not in made}
    captured |= {p.name: p for p in outs if p.name not in made}
    _check_levels(levels, captured, bsyms, name)
    levels.closed |= dict.fromkeys(made, name)
    _hand_on_names(ctx, fresh, paths, actual)
    name_printably(captured.values())
    program = flat_program([*fresh, *captured.values()], bsyms, outs)
    return Program(without_mutations(program), len(fresh), tuple(out_leaves), out_spec)


class Call:
    """One call of a transformed function, met by the interpreter."""

    def __init__(self, transformed: WrappedValue, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]):
        self._transformed = transformed
        self._args = args
        self._kwargs = kwargs
        self.name: str = transformed.value.name
        self.function: Callable = transformed.value.function
        self.result_specs: list[TreeSpec] = transformed.value.result_specs
        self.skipped = transformed.value.num_own_arguments
        values, self.kwargs = values_of(args, kwargs)
        self.own, self.args = values[: self.skipped], values[self.skipped :]

    def acquire(self, function: str = "function", args: Sequence[Any] | None = None, **options: Any) -> Program:
        """The attribute `function` of the transformed function as a flat program, for this call's arguments or for `args`.

        The options are those of the function `acquire`.
        """
        found = _interpret_call(getattr, self._transformed, wrap_const(function))
        if args is not None:
            given = tuple(wrapped(a, self._transformed) for a in args)
            return acquire(found, self.name, given, {}, **options)
        return acquire(found, self.name, self._args[self.skipped :], self._kwargs, **options)

    @property
    def tensors(self) -> tuple[TensorProxy, ...]:
        """The tensors among the arguments, in the order of the arguments of `acquire`'s program."""
        return flat_proxies((self.args, self.kwargs))


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(v, TensorProxy) for v in tree_flatten(tree)[0])


@contextlib.contextmanager
def _opened(ctx: JitCtx, level: Level) -> Iterator[None]:
    opened = Levels.of(ctx).opened
    of_wrappers = current_acquisition()
    opened.append(level)
    if of_wrappers is not None:
        of_wrappers.num_levels += 1
        of_wrappers.lengths.be_one()  # what is transformed is an operation of Thunder's
    try:
        with hooks.inside_function(completion.lookaside):
            yield
    finally:
        opened.pop()
        if of_wrappers is not None:
            of_wrappers.num_levels -= 1


@contextlib.contextmanager
def grad_enabled() -> Iterator[None]:
    """Inside a transformed function gradients are recorded, whatever holds outside; what it sets itself is undone."""
    cd = get_compile_data()
    saved, saved_torch = cd.is_grad_enabled, torch.is_grad_enabled()
    cd.is_grad_enabled = True
    torch.set_grad_enabled(True)  # what ``with torch.no_grad():`` in the function goes back to at its end
    try:
        yield
    finally:
        cd.is_grad_enabled = saved
        torch.set_grad_enabled(saved_torch)


def reopen(proxies: Sequence[Any]) -> None:
    """Results of a transformed function belong to its surroundings."""
    closed = Levels.of(get_jit_ctx()).closed
    for p in proxies:
        if isinstance(p, Proxy):
            closed.pop(p.name, None)


def forget_replaced(used: Set[str]) -> None:
    """Do not have calls look at parameters that others stood for, unless they are among the tensors that are `used`.

    For the outermost function, at its end: what is not used then never will be.
    """
    ctx = get_jit_ctx()
    unused = Levels.of(ctx).replaced - used
    ctx._constraints[:] = [c for c in ctx._constraints if not any(isinstance(v, TensorProxy) and v.name in unused for v in c)]


def keep(value: WrappedValue) -> None:
    """Have the interpreter remember what it knows of a value for the rest of the acquisition."""
    Levels.of(get_jit_ctx()).kept.append(value)


def _check_levels(levels: Levels, captured: dict[str, Proxy], bsyms: Sequence[BoundSymbol], name: str) -> None:
    for p in captured.values():
        owner = levels.closed.get(p.name)
        if owner is not None:
            at = next((location_of(b) for b in bsyms if any(q.name == p.name for q in b.flat_proxy_args)), None)
            raise TransformLevelError(
                with_details(
                    f"{p.name} belongs to a function under {owner} that has returned; it means nothing here, in a function under {name}",
                    at=at,
                    instead=f"return the value from the function under {owner} (has_aux=True returns more than the result)",
                )
            )


def _hand_on_names(ctx: JitCtx, fresh: Sequence[TensorProxy], paths: Sequence[str], actual: Sequence[TensorProxy]) -> None:
    """Let an argument of the surroundings without a name of the user's have the one that the function calls it by."""
    renamed = ctx._proxy_swapmap
    trace = ctx.computation_trace
    for inner, path, outer in zip(fresh, paths, actual, strict=True):
        known = renamed.get(variableify(inner))
        if variableify(outer) in renamed or (known is None and outer.history is None):
            continue
        if known is not None:
            del renamed[variableify(inner)]
            trace.names.discard(known.name)
        name = path if known is None else known.name
        if name.isidentifier() and name not in trace.names and name not in _RESERVED:
            with tracectx(trace):
                renamed[variableify(outer)] = outer.replace_name(name)


def name_printably(proxies: Iterable[Proxy]) -> None:
    """Give a name that Python can read to what Thunder named after a key of a dict, as ``t_0_0.weight``, and nobody since."""
    ctx = get_jit_ctx()
    renamed = ctx._proxy_swapmap
    wrong = [p for p in proxies if isinstance(p, TensorProxy) and not p.name.isidentifier()]
    for p in wrong:
        if variableify(p) not in renamed:
            with tracectx(ctx.computation_trace):
                renamed[variableify(p)] = p.replace_name(re.sub(r"\W+", "_", p.name), disambiguate=True)
    if wrong:  # of inputs that the computation does not use Thunder does not rename the checks
        names = {p.name: renamed[variableify(p)] for p in wrong}
        ctx._constraints[:] = [tuple(names.get(v.name, v) if isinstance(v, Proxy) else v for v in c) for c in ctx._constraints]


def _paths(function: Any, args: tuple, kwargs: dict) -> list[str]:
    """Names for the tensors among the arguments: ``params_0_weight`` for ``params["0.weight"]``."""
    while hasattr(function, "function"):  # a transformed function takes what its function takes
        function = function.function
    try:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        names = []
    found = []
    for path, v in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(v, TensorProxy):
            is_keyword, first, rest = path[0].idx, path[1], path[2:]
            if is_keyword:
                name = str(first.key)
            else:
                name = names[first.idx] if first.idx < len(names) else f"arg{first.idx}"
            found.append(re.sub(r"\W+", "_", name + keystr(rest).replace("']", "").replace("]", "")))
    return found
