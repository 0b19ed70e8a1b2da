"""What Thunder's interpreter calls instead of functions of libraries that know torch.compile, or choose among kernels.

Those of modules that a program may not have imported are known by their names.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from thunder_norm.tracing.lookasides import instead_of, instead_of_named
from thunder.core.interpreter import WrappedValue, _interpret_call


@instead_of_named("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex")
def _indexing() -> Any:
    """Torch's mode lets ``x[i]`` with a tensor `i` be an operation inside ``torch.vmap``: in a trace it is one."""
    return _interpret_call(contextlib.nullcontext)


@instead_of_named("transformers.utils.output_capturing", "CompileableContextVar.set")
def _set_variable(variable: WrappedValue, value: WrappedValue) -> Any:
    """transformers 5 writes a global instead of a context variable where ``torch.compiler.is_compiling()``, and Thunder says it is."""
    return _interpret_call(lambda variable, value: variable.context_var.set(value), variable, value)


@instead_of(torch.backends.mha.get_fastpath_enabled)
def _fastpath() -> Any:
    """The kernel that torch.nn's transformer layers are in evaluation: a trace has their operations, which executors fuse."""
    return _interpret_call(lambda: False)


@instead_of(torch.nn.modules.transformer._detect_is_causal_mask)
def _is_causal(mask: WrappedValue, *asked: WrappedValue, **named: WrappedValue) -> Any:
    """Whether a mask may be left out for a causal kernel: torch looks at its values, which a trace does not know, unless told."""
    is_causal = named.get("is_causal", asked[0] if asked else None)
    return _interpret_call(lambda: False) if is_causal is None else _interpret_call(lambda value: value is True, is_causal)
