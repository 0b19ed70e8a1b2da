"""torch.autograd.Function of normed tensors in traces: norms by the rules of its forward, gradients of what it returns by its backward.

A straight-through estimator has a forward without a derivative: gradients of the backing that a rule's operations have are not its.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.autograd_functions import FunctionCall
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.fallback import is_random
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting import operations
from thunder_norm.subclass.recording import trace
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

_IS_FORWARD = "_thunder_norm_is_forward"


class _Unknown(torch.autograd.Function):
    """Hands on a tensor that the function called `name` made of others, whose gradients are not known."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedOpError(
            with_details(
                f"the gradient of what {ctx.name} makes of a normed tensor",
                why="its forward draws random numbers, and a backward written beside its norm would be that of other ones",
                instead="draw them outside, and give them to it; or call it without norms",
            )
        )


def function_of(fn: Callable) -> type[torch.autograd.Function] | None:
    """The class whose ``apply`` an operation is."""
    cls = getattr(fn, "__self__", None)
    is_function = isinstance(cls, type) and issubclass(cls, torch.autograd.Function)
    return cls if is_function and getattr(fn, "__func__", None) is operations.AUTOGRAD_APPLY else None


def is_forward(fn: Callable) -> bool:
    """Whether it is what `apply` runs: operations that may have rules."""
    return getattr(fn, _IS_FORWARD, False)


def is_normed(value: Any) -> bool:
    """Whether a proxy stands for a normed tensor."""
    return isinstance(value, SubclassProxy) and isinstance(value.fake, NormedTensor)


def apply(acquisition: Acquisition, cls: type[torch.autograd.Function], args: tuple, kwargs: dict) -> Any:
    """Write ``cls.apply(*args)`` into the trace, of arguments with normed tensors among them; returns its result."""

    def forward(*own_args: Any, **own_kwargs: Any) -> Any:
        return cls.apply(*own_args, **own_kwargs)

    forward.__name__ = cls.__name__
    setattr(forward, _IS_FORWARD, True)
    result = operations.call(acquisition, forward, args, kwargs)
    plain_args, plain_kwargs = tree_map(
        lambda v: trace.leaf_proxies(acquisition, v.fake)[0] if is_normed(v) else v, (args, kwargs)
    )
    inputs = [v for v in tree_leaves((plain_args, plain_kwargs)) if isinstance(v, TensorProxy)]
    if not is_grad_enabled() or not (acquisition.num_levels or any(map(acquisition.autograd.requires_grad, inputs))):
        return result
    call = FunctionCall(cls, plain_args, plain_kwargs)
    outputs = [p for p in tree_leaves(result) if isinstance(p, TensorProxy)]
    if any(is_random(r.func) for r in call.forward):
        backings = [trace.leaf_proxies(acquisition, p.fake)[0] if is_normed(p) else p for p in outputs]
        is_inexact = [dtypes.is_inexact_dtype(t.dtype) for t in backings]
        values = [
            FunctionCall(_Unknown, (cls.__name__, t, *inputs), {}).write() if moves else t
            for t, moves in zip(backings, is_inexact, strict=True)
        ]
    else:
        written = zip(tree_leaves(result), tree_leaves(call.write()), strict=True)
        values = [q for p, q in written if isinstance(p, TensorProxy)]
    new = {}
    for output, value in zip(outputs, values, strict=True):
        if is_normed(output):
            acquisition.fakes.bind(output.fake.backing, value)
        elif dtypes.is_inexact_dtype(output.dtype) and isinstance(value, TensorProxy) and value is not output:
            acquisition.lifting.take_norm_of(acquisition.fake_of(output), acquisition.fake_of(value))
            new[output.name] = value
    trace.rebind(acquisition)
    return tree_map(lambda v: new.get(v.name, v) if isinstance(v, TensorProxy) else v, result)
