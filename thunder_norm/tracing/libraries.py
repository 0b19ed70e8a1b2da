"""What Thunder's interpreter calls instead of functions that know torch.compile, and take any compiler for it.

They belong to modules that a program may not have imported, and are known by their names.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from thunder_norm.tracing.lookasides import instead_of_named
from thunder.core.interpreter import WrappedValue, _interpret_call, get_interpreterruntimectx, wrap_const


@instead_of_named("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex")
def _indexing() -> Any:
    """Torch's mode lets ``x[i]`` with a tensor `i` be an operation inside ``torch.vmap``: in a trace it is one."""
    return _interpret_call(contextlib.nullcontext)


@instead_of_named("transformers.utils.output_capturing", "CompileableContextVar.set")
def _set_variable(variable: WrappedValue, value: WrappedValue) -> Any:
    """transformers 5 writes a global instead of a context variable where ``torch.compiler.is_compiling()``, and Thunder says it is."""
    return _interpret_call(lambda variable, value: variable.context_var.set(value), variable, value)


@instead_of_named("transformers.utils.import_utils", "is_torchdynamo_compiling")
def _is_compiling() -> Any:
    """Models of transformers compute something else where dynamo compiles: no mask where none is given (LongT5), another scan (Mamba).

    What models share asks whether it may look at values, or keep what it has computed, and may not.
    """
    frames = get_interpreterruntimectx().frame_stack
    is_of_model = bool(frames) and str(frames[-1].globals.value.get("__name__")).startswith("transformers.models.")
    return wrap_const(False) if is_of_model else _interpret_call(torch.compiler.is_compiling)
