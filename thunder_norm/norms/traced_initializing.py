"""`initialize` in a trace: one operation, made by torch in each call, so that the numbers are those of eager.

On normed tensors its norm rule and `NormAcquisition` do the same.  A generator is one that the program finds, and leaves in its state
but for what is drawn.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.initializing import Drawing, check_generator, unit
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.fallback import fallback
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.guarding.guards import is_guarded
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, do_raise, get_interpreterruntimectx, interpreter_needs_wrap
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
    if not is_own:
        return interpreter_needs_wrap(check_generator)(generator)
    return _refused(
        "initialize(generator=...) with a generator that the traced program makes",
        "later calls would go on with the numbers of that generator instead of beginning anew",
        "make it outside, and give it as an argument, an attribute or a variable that the program reads",
    )


def _refused(what: str, why: str, instead: str) -> Any:
    why = f"a trace is made once: {why}"
    return do_raise(UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead=instead)))


def _seeding(method: Any) -> None:
    own = interpreter_needs_wrap(method)

    @lookasides.instead_of(method)
    def seed(generator: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        if not is_guarded(generator):  # the program made it
            return own(generator, *args, **kwargs)
        return _refused(
            f"torch.Generator.{method.__name__} in a traced program",
            "later calls would go on with the numbers of the generator instead of beginning where it was set",
            "seed it before the call",
        )


for _method in (torch.Generator.manual_seed, torch.Generator.seed, torch.Generator.set_state):
    _seeding(_method)
