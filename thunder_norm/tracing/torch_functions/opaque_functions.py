"""Functions in C that Thunder takes for operations on tensors, because they are given some."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

_METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)
_FOLLOWED = sys.stdlib_module_names | {"optree", "torch"}  # which are interpreted or called natively, or are operations


def refused_method(fn: Callable, args: Sequence[WrappedValue]) -> Callable | None:
    """What refuses a method of a class in C that is given tensors (``np.sin(x)``), for which Thunder looks in no module; None for others."""
    if type(fn) not in _METHODS:
        return None
    owner = fn.__objclass__  # type: ignore[attr-defined]
    # asked first: an object that ``object.__init__`` is given may be registered as a tree, and has nothing yet of what it consists of
    if owner.__module__.partition(".")[0] in _FOLLOWED:
        return None
    if not any(isinstance(v, TensorProxy) for a in args for v in tree_leaves(a.value)):
        return None
    called = args[0].value if fn.__name__ == "__call__" and hasattr(args[0].value, "__name__") else fn
    name = f"{owner.__module__}.{called.__name__}" if called is not fn else f"{owner.__module__}.{owner.__name__}.{fn.__name__}"
    return lambda *_, **__: do_raise(data_dependent(f"what {name}, a function in C that is given it, returns"))


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
