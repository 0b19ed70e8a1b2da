"""What `initialize` draws in a trace, on plain tensors: one operation, made by torch in each call, so that the numbers are those of eager."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.initializing import Drawing, check_generator, unit
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.fallback import fallback
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.guards import is_guarded
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx, interpreter_needs_wrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


@lookasides.for_our(unit.body)
@interpreter_needs_wrap
def _unit(kind: Any, shape: tuple[int, ...], elem_dims: tuple[int, ...], generator: Any, device: str) -> TensorProxy:
    at = get_interpreterruntimectx().get_current_user_source_location()
    get_jit_ctx().computation_trace.set_current_source_location(*at)
    (drawn,) = fallback(Drawing(kind, generator), (True,))(shape, elem_dims, device)
    return drawn


@lookasides.for_our(check_generator)
def _check_generator(generator: WrappedValue) -> Any:
    """Traces draw from one generator in every call: one that a program makes would be another in each."""
    is_own = isinstance(generator.value, torch.Generator) and not is_guarded(generator)
    return interpreter_needs_wrap(_refuse if is_own else check_generator)(generator)


def _refuse(generator: torch.Generator) -> None:
    raise UnsupportedOpError(
        with_details(
            "initialize(generator=...) with a generator that the traced program makes",
            at=location_of_user(),
            why="a trace is made once: later calls would go on with the numbers of that generator instead of beginning anew",
            instead="make it outside, and give it as an argument, an attribute or a variable that the program reads",
        )
    )
