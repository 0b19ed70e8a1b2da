"""Functions in C that Thunder takes for operations on tensors, because they are given some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


def with_tensors_alone(fn: Callable, found: Callable) -> Callable:
    """What Thunder calls for such a function, if it returns tensors: of anything else it would be told what it is of random tensors."""
    if fn not in get_jit_ctx().ad_hoc_executor._lookasides:
        return found

    def call(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        result = found(*args, **kwargs)
        is_raised = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED
        if is_raised or all(isinstance(v, TensorProxy) for v in tree_leaves(result.value)):
            return result
        return do_raise(data_dependent(f"what {fn.__module__}.{fn.__name__}, a function in C that is given it, returns"))

    return call
