"""Transforms of torch's that torch runs itself, in programs in which its autograd follows wrappers.

Gradients of such a program are what the classes make of torch's formulas, and so are those of a function that is transformed in it: torch
transforms the function on fakes, and what its classes did with their inner tensors is one operation of the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from thunder_norm.errors import TransformError, with_details
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
from thunder.core.interpreter import WrappedValue, interpreter_needs_wrap, unwrap, wrap_const
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
    if acquisition is None or not acquisition.autograd.is_running or acquisition.num_levels or functions_inside(get_jit_ctx()):
        return wrap_const(False)
    take_proxies(args, kwargs)
    given = [v for v in tree_leaves((unwrap(args), unwrap(kwargs))) if isinstance(v, TensorProxy)]
    recipe = FunctionRecipe(shares=True)
    try:
        recipe.of((func.value,))
    except NotMakeableError:
        return wrap_const(False)
    used = [*given, *(p for p in recipe.arguments.values() if isinstance(p, TensorProxy))]
    requires_grad = acquisition.autograd.requires_grad
    is_torchs = any(isinstance(p, SubclassProxy) or (is_grad_enabled() and requires_grad(p)) for p in used)
    # torch would take a parameter that the function finds elsewhere for a constant
    return wrap_const(is_torchs and not Reachable((func.value,)).tensors)


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

    @functools.wraps(of_torch, updated=())
    def whole(held: Sequence[Any], options: tuple, named: dict, args: tuple, kwargs: dict) -> Any:
        (native,) = step(Call(dict(zip(names, held, strict=True))))
        return of_torch(watching(native, at, _refusal), *options, **named)(*args, **kwargs)

    @interpreter_needs_wrap
    def written(options: tuple, named: dict, args: tuple, kwargs: dict) -> Any:
        return operations.call(acquisition, whole, (list(recipe.arguments.values()), options, named, args, kwargs), {})

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
