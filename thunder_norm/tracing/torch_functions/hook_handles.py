"""Handles of hooks that a program gives to modules: torch counts them in a class attribute, which is another number in each call."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.hooks import RemovableHandle

from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const


@instead_of(RemovableHandle.__init__)
def _made(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _interpret_call(_begin, *args, **kwargs)


def _begin(handle: RemovableHandle, hooks_dict: Any, *, extra_dict: Any = None) -> None:
    """As torch does it.  A trace keeps the number: no hook of another has it, and dicts of hooks are compared in each call."""
    handle.hooks_dict_ref = weakref.ref(hooks_dict)
    handle.id = _next_number()
    extra_dicts = extra_dict if isinstance(extra_dict, list) else [] if extra_dict is None else [extra_dict]
    handle.extra_dict_ref = tuple([weakref.ref(d) for d in extra_dicts])


def _next_number() -> int:
    number = RemovableHandle.next_id
    RemovableHandle.next_id += 1
    return number


@instead_of(_next_number)
def _taken() -> WrappedValue:
    return wrap_const(_next_number())
