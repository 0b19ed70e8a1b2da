"""Functions and modules that torch.compile has wrapped: in a traced program what it was given stands for them, as within torch.compile.

Interpreted as they are they would turn Dynamo on, for whatever runs natively meanwhile.
"""

from __future__ import annotations

import types

from thunder_norm.tracing.lookasides import instead_of_named
from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const

_MARK = "_torchdynamo_wrapper_id"  # whose the attributes are: ``functools.wraps`` copies them to functions of users
_GIVEN = "_torchdynamo_orig_callable"


def given_to_compiler(fn: WrappedValue) -> WrappedValue | None:
    """What ``torch.compile``, or ``torch.compiler.disable``, was given when it made `fn`; None for all other functions."""
    function = fn.value
    if type(function) is not types.FunctionType or function.__dict__.get(_MARK) != id(function):
        return None
    return _interpret_call(getattr, fn, wrap_const(_GIVEN))


@instead_of_named("torch._dynamo.mutation_guard", "_GenerationTracker.tag")
@instead_of_named("torch._dynamo.mutation_guard", "GenerationTracker.tag")  # of torch 2.11
def _tag(*_: WrappedValue) -> WrappedValue:
    """Called where a program makes a module, once Dynamo has compiled something: it counts modules in a dict that loses those that are freed."""
    return wrap_const(None)
