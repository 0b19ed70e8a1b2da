"""What the interpreter is told to do instead of what cannot be right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from thunder_norm.errors import InnerDerivativeError, UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of, instead_of_named
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder.core.interpreter import (
    WrappedValue,
    do_raise,
    interpreter_needs_wrap,
)


def refuse_value(acquisition: Acquisition, fn: Callable, obj: WrappedValue, *args: Any, **kwargs: Any) -> Any:
    """The value of a tensor decides what the program does."""
    if fn is bool:
        what = "a tensor was used as a condition"
    elif isinstance(fn, type):
        what = f"a tensor was turned into a Python {fn.__name__}"
    else:
        what = "the value of a tensor was asked for (.item() or .tolist())"
    return do_raise(acquisition.refuse(data_dependent_on_wrapper(what)))


def refuse_make_wrapper(acquisition: Acquisition, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """A wrapper is made without its class."""
    return do_raise(
        acquisition.refuse(
            UnsupportedSubclassError(
                with_details(
                    f"torch.Tensor.{fn.__name__} is called in the jitted function",
                    at=location_of_user(),
                    why="what it makes has no inner tensors yet",
                    instead="call the class, whose constructor runs as one operation; the class must define __torch_dispatch__, "
                    "__tensor_flatten__ and __tensor_unflatten__",
                )
            )
        )
    )


def refuse_functorch(acquisition: Acquisition, *args: Any, **kwargs: Any) -> Any:
    """A transform of torch.func runs inside."""
    return do_raise(
        acquisition.refuse(
            UnsupportedOpError(
                with_details(
                    "a torch.func transform is applied inside a jitted function that meets wrapper subclasses",
                    at=location_of_user(),
                    why="torch.func needs tensors, and while a trace is acquired there are proxies",
                    instead="use the function transforms of thunder_norm.transforms",
                )
            )
        )
    )


@instead_of_named("torch.distributed.tensor", "distribute_tensor")
def refuse_distribution(*args: Any, **kwargs: Any) -> Any:
    """A tensor is sent to the other ranks."""
    return do_raise(
        UnsupportedOpError(
            with_details(
                "distribute_tensor in a jitted function",
                at=location_of_user(),
                why="what it makes is a leaf, as a parameter is: its communication is not differentiated",
                instead="distribute the tensor before the call, or DTensor.from_local(...).redistribute(...)",
            )
        )
    )


FUNCTORCH_LEVELS = tuple(
    getattr(torch._C._functorch, f"_{name}_increment_nesting")
    for name in ("grad", "vmap", "jvp", "func")
    if hasattr(torch._C._functorch, f"_{name}_increment_nesting")
)


_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def is_derivative(fn: Callable) -> bool:
    """Whether it is torch's autograd, which works on the graph of what has run."""
    return any(fn is derivative for derivative in _DERIVATIVES)


def refuse_derivative(acquisition: Acquisition | None, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for torch's autograd in a program."""
    error = InnerDerivativeError(
        with_details(
            "torch.autograd.grad where nobody follows what it is of, or .backward(), inside a traced program",
            at=location_of_user(),
            why="there is no graph while a trace is acquired but with SubclassTransform or NormTransform, outside of functions under transforms",
            instead="torch.autograd.grad there, thunder_norm.transforms.grad or vjp, or take the derivative outside",
        )
    )
    return do_raise(error if acquisition is None else acquisition.refuse(error))


for _function in _DERIVATIVES:
    instead_of(_function)(functools.partial(refuse_derivative, None))


@instead_of(torch.autograd.graph.register_multi_grad_hook)
def refuse_hook_of_several(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """A hook is to be called once several gradients are there, in an order that a trace does not keep."""
    return do_raise(
        UnsupportedOpError(
            with_details(
                "register_multi_grad_hook in a jitted function",
                at=location_of_user(),
                instead="tensor.register_hook, or call it outside of the jitted function",
            )
        )
    )


@instead_of(torch._C._autograd._push_saved_tensors_default_hooks)
@interpreter_needs_wrap
def pack_saved_tensors(pack: Callable, unpack: Callable) -> Any:
    """The program says how torch's autograd saves tensors; torch's own ways hand back what they are given.

    Raises:
        UnsupportedOpError: what the program's functions make of tensors would be lost.
    """
    if pack.__module__.partition(".")[0] != "torch":
        raise UnsupportedOpError(
            with_details(
                "saved_tensors_hooks in a jitted function",
                at=location_of_user(),
                why="what the backward needs of the forward is chosen when the trace is compiled",
                instead="enter the context around the call of the jitted function",
            )
        )
    return torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
