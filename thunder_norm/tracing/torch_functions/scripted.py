"""Programs of torch.jit that a traced program calls: the Python that they were made of stands for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions import known_classes
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise, unwrap
from thunder.core.proxies import Proxy

_PROGRAMS = (torch.jit.ScriptFunction, torch._C.ScriptMethod)


def lookaside(fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is a program of torch.jit and is given what stands for tensors; None for all others.

    ``torch.jit.script`` keeps the function that it was given for torch.compile; ``torch.jit.trace`` keeps none, nor do methods of modules.
    """
    if not isinstance(fn, _PROGRAMS) or not _has_proxies([unwrap(a) for a in (*args, *kwargs.values())]):
        return None
    source = getattr(fn, "_torchdynamo_inline", None)
    if source is None:
        return _refuse
    return functools.partial(_interpreted, source)


def _interpreted(source: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for the program: no class is asked of what it does, and its results are of none."""
    with known_classes.saying_nothing():
        return _interpret_call(source, *args, **kwargs)


def _has_proxies(values: Any) -> bool:
    return any(isinstance(v, Proxy) for v in tree_leaves(values))


def _refuse(*_: WrappedValue, **__: WrappedValue) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                "a traced program calls a compiled program of torch.jit",
                at=location_of_user(),
                why="it takes tensors, which are not there yet, and does not say what it does with them",
                instead="the function or module that torch.jit.trace or torch.jit.script was given",
            )
        )
    )
