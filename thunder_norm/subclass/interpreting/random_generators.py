"""Operations that draw from a generator of the program's: torch draws in each call, from that generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.interpreting.operations import operation_of, torch_callable
from thunder_norm.tracing.guarding.guards import is_guarded
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, do_raise


def lookaside(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict) -> Callable | None:
    """What to call instead of `fn`, if it is an operation that is given a generator; None for all others."""
    given = kwargs.get("generator") or (args[-1] if args else None)
    if given is None or not isinstance(given.value, torch.Generator):
        return None
    torch_fn = torch_callable(fn)
    if torch_fn is None:
        return None
    if acquisition.num_levels:
        return functools.partial(
            _refused,
            torch_fn,
            "in a function under a transform",
            "such a function is one of its arguments alone, and its derivatives would draw again",
        )
    if not is_guarded(given):
        return functools.partial(
            _refused,
            torch_fn,
            "that the traced program makes",
            "it is another one in each call, and a trace would go on with the numbers of the first",
        )
    return operation_of(acquisition, torch_fn)


def _refused(fn: Callable, whose: str, why: str, *_: Any, **__: Any) -> Any:
    return do_raise(
        UnsupportedOpError(
            with_details(
                f"{fn.__name__}(generator=...) with a generator {whose}",
                at=location_of_user(),
                why=why,
                instead="make the generator outside of the program, and draw from it outside of functions under transforms",
            )
        )
    )
