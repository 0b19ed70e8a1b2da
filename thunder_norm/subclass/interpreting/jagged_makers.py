"""The functions of ``torch.nested``, called in a program: each runs on fakes as one operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting.operations import operation_with_history
from thunder_norm.tracing.containers import take_proxies
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.interpreter import WrappedValue, do_raise

MAKERS = frozenset(
    {
        torch.nested.as_nested_tensor,
        torch.nested.nested_tensor,
        torch.nested.narrow,
        torch.nested.nested_tensor_from_jagged,
        torch.nested.masked_select,
        torch.nested.to_padded_tensor,
    }
)


def make(acquisition: Acquisition, fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for one of `MAKERS`."""
    take_proxies(*args, **kwargs)
    given = [value_of(a) for a in args], {name: value_of(v) for name, v in kwargs.items()}
    refused = None if fn is torch.nested.to_padded_tensor else _refused(fn, *given)
    if refused is not None:
        return do_raise(acquisition.refuse(refused))
    acquisition.integers.follow()
    return operation_with_history(acquisition, fn, *args, **kwargs)


def _refused(fn: Callable, args: list, kwargs: dict) -> UnsupportedOpError | None:
    named = _signature(fn).bind(*args, **kwargs).arguments
    first = next(iter(named.values()), None)
    takes_layout = "layout" in _signature(fn).parameters
    if takes_layout and named.get("layout") is not torch.jagged and not (isinstance(first, SubclassProxy) or is_wrapper(first)):
        return UnsupportedOpError(
            with_details(
                f"torch.nested.{fn.__name__} with the strided layout",
                at=location_of_user(),
                why="such a nested tensor is no wrapper of plain tensors",
                instead="layout=torch.jagged",
            )
        )
    if named.get("requires_grad"):
        return UnsupportedOpError(
            with_details(
                f"torch.nested.{fn.__name__} with requires_grad=True",
                at=location_of_user(),
                why="nobody can ask for the gradient of a tensor that is made inside",
                instead="give the nested tensor to the function as an argument",
            )
        )
    return None


@functools.cache
def _signature(fn: Callable) -> inspect.Signature:
    return inspect.signature(fn)
