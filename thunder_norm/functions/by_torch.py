"""Transforms of torch's that torch runs itself, in programs in which its autograd follows wrappers.

Gradients of such a program are what the classes make of torch's formulas, and so are those of a function that is transformed in it: torch
transforms the function on fakes, and what its classes did with their inner tensors is one operation of the trace.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import InnerDerivativeError, TransformError, with_details
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.backward import side_effects
from thunder_norm.subclass.backward.hooks_of_backward import watching
from thunder_norm.subclass.backward.recipes import Call, NotMakeableError
from thunder_norm.subclass.backward.tensor_hooks import FunctionRecipe
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import operations
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.hooks.participants import functions_inside
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


def transformed(transform: Callable, ours: Callable, func: Callable, *options: Any, **named: Any) -> Callable:
    """``transform(func, *options, **named)``, interpreted: `ours` of the same, or torch's where its autograd follows what it is called with."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_followed(func, args, kwargs):
            return run(transform, func, options, named, args, kwargs)
        return ours(func, *options, **named)(*args, **kwargs)

    return call


def is_followed(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether torch's autograd follows a call of a transformed function; always where torch itself calls it."""
    return True


def run(transform: Callable, func: Callable, options: tuple, named: dict, args: tuple, kwargs: dict) -> Any:
    """The call, by torch."""
    return transform(func, *options, **named)(*args, **kwargs)


@lookasides.instead_of(is_followed)
def _is_followed(func: WrappedValue, args: WrappedValue, kwargs: WrappedValue) -> Any:
    acquisition = current_acquisition()
    if acquisition is None or acquisition.num_levels or functions_inside(get_jit_ctx()):
        return wrap_const(False)
    found = _reachable(func.value).tensors
    members = _members_of(func) if any(map(is_wrapper, found)) or acquisition.autograd.is_running else []
    take_proxies(args, kwargs)
    given = [v for v in tree_leaves((unwrap(args), unwrap(kwargs))) if isinstance(v, TensorProxy)]
    if acquisition.computes_wrappers(func.value, given):
        return do_raise(InnerDerivativeError(_hidden(func.value)))
    recipe = FunctionRecipe(shares=True)
    try:
        recipe.of((func.value,))
    except NotMakeableError:
        return wrap_const(False)
    used = [*given, *members, *(p for p in recipe.arguments.values() if isinstance(p, TensorProxy))]
    has_wrappers = any(isinstance(p, SubclassProxy) for p in used)
    has_history = is_grad_enabled() and any(map(acquisition.autograd.requires_grad, used))
    if not acquisition.autograd.is_running:  # which it is from the first wrapper on that requires grad
        if acquisition.has_own_formulas or has_history or found or not has_wrappers:
            return wrap_const(False)
    if not (has_wrappers or has_history):
        return wrap_const(False)
    # torch would take a parameter that the function finds elsewhere for a constant
    reals = {id(acquisition.fakes.real_input(p)) for p in members}
    return wrap_const(all(id(t) in reals for t in found))


def _hidden(func: Any) -> str:
    return with_details(
        f"a transform of torch's of {getattr(func, '__name__', 'a function')}, in which wrappers would take the place of plain tensors",
        at=location_of_user(),
        why="a transform hides which tensors these are",
        instead="thunder_norm.normed(jitted module), a report or a norm map, which write its operations out",
    )


def _reachable(func: Any) -> Reachable:
    """What a function can reach, through transforms of ours that it is made by too."""
    pending, roots = [func], []
    while pending:
        value = pending.pop()
        if isinstance(value, types.FunctionType) and value.__module__ == __name__:
            pending.extend([cell.cell_contents for cell in value.__closure__ or ()])
        else:
            roots.append(value)
    return Reachable(roots)


def _members_of(func: WrappedValue) -> list[TensorProxy]:
    """What stands for the parameters and buffers of modules that a function closes over, or is a method of."""
    members = _interpret_call(_members, func)
    if members is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        get_interpreterruntimectx().curexc = None
        return []
    take_proxies(members)
    return list({v.name: v for v in tree_leaves(unwrap(members)) if isinstance(v, TensorProxy)}.values())


def _members(func: Any) -> list[torch.Tensor]:
    """Interpreted, so that it is known where each is."""
    pending, seen, found = [func], [], []
    while pending:
        value = pending.pop()
        if any(value is other for other in seen):
            continue
        seen.append(value)
        if isinstance(value, torch.nn.Module):
            found.extend([*value.parameters(), *value.buffers()])
        elif isinstance(value, types.MethodType):
            pending.extend([value.__self__, value.__func__])
        elif isinstance(value, functools.partial):
            pending.extend([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                try:
                    pending.append(cell.cell_contents)
                except ValueError:  # it is not filled yet
                    pass
    return found


@contextlib.contextmanager
def _standing_in(func: Any, fakes: dict[int, torch.Tensor]) -> Iterator[None]:
    """Have modules that a function can reach hold others for some tensors, by their identity."""
    places = [p for p in _reachable(func).places if isinstance(p.held, dict) and any(id(v) in fakes for v in p.held.values())]
    for place in places:
        place.write({name: fakes.get(id(v), v) for name, v in place.held.items()})
    try:
        yield
    finally:
        for place in places:
            place.restore()


@lookasides.instead_of(run)
def _run(
    transform: WrappedValue,
    func: WrappedValue,
    options: WrappedValue,
    named: WrappedValue,
    args: WrappedValue,
    kwargs: WrappedValue,
) -> Any:
    take_proxies(options, named, args, kwargs)
    acquisition = current_acquisition()
    assert acquisition is not None
    recipe = FunctionRecipe(shares=True)
    step = recipe.of((func.value,))
    side_effects.note_read(func.value)
    names, at, of_torch = list(recipe.arguments), location_of_user(), transform.value
    members = _members_of(func)
    reals = [id(acquisition.fakes.real_input(p)) for p in members]

    @functools.wraps(of_torch, updated=())
    def whole(held: Sequence[Any], own: Sequence[Any], options: tuple, named: dict, args: tuple, kwargs: dict) -> Any:
        (native,) = step(Call(dict(zip(names, held, strict=True))))
        with _standing_in(native, dict(zip(reals, own, strict=True))):
            return of_torch(watching(native, at, _refusal), *options, **named)(*args, **kwargs)

    @interpreter_needs_wrap
    def written(options: tuple, named: dict, args: tuple, kwargs: dict) -> Any:
        held = list(recipe.arguments.values())
        return operations.call(acquisition, whole, (held, members, options, named, args, kwargs), {})

    return written(options, named, args, kwargs)


def _refusal(what: str, at: str | None) -> TransformError:
    return TransformError(
        with_details(
            f"a function under a transform of torch's changes {what}",
            at=at,
            why="torch runs it while the trace is acquired, and not in each call",
            instead="let it return what it computes",
        )
    )
