"""Methods of torch's tensors that Thunder's tensors lack, although it has, or torch can run, the operation.

In place: the operation out of place, whose result is copied into the tensor, which Thunder knows how to follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.op_names import is_in_place
from thunder_norm.tracing.lookasides import instead_of
import thunder.torch as ltorch
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call
from thunder.core.langctxs import Languages, resolve_language
from thunder.core.proxies import TensorProxy
from thunder.torch import _torch_to_thunder_function_map

# These change what the tensor is, not what is in it; or their namesake without the underscore is something else.
_OTHERS = frozenset(
    "as_strided_ bernoulli_ detach_ rename_ requires_grad_ resize_ resize_as_ set_ share_memory_ squeeze_ swapaxes_ "
    "swapdims_ t_ transpose_ unsqueeze_".split()
)


@functools.cache
def names() -> frozenset[str]:
    """The methods that are called although Thunder does not know them."""
    return frozenset({"copy_", "zero_", "broadcast_to", "fill_diagonal_", "hardshrink", "requires_grad_"} | set(_in_place()))


def _in_place() -> list[str]:
    thunders = resolve_language(Languages.TORCH)
    found = []
    for name in dir(torch.Tensor):
        is_wanted = is_in_place(name) and not name.startswith("_") and name not in _OTHERS
        if is_wanted and not hasattr(TensorProxy, name) and not thunders.has_method(name):
            has_other = hasattr(torch.Tensor, name[:-1]) and hasattr(torch.ops.aten, name)
            found += [name] if has_other or name == "fill_" else []
    return found


# Thunder runs what is cached as it is, and refuses to look into a function of torch that it does not know.
_can_cast = functools.cache(torch.can_cast)


def _copied(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What torch does with the result of an operation that is done in place."""
    if result.shape != tensor.shape:
        raise RuntimeError(f"output with shape {list(tensor.shape)} doesn't match the broadcast shape {list(result.shape)}")
    if not _can_cast(result.dtype, tensor.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {tensor.dtype}")
    return tensor.copy_(result)


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad, as far as who interprets subclasses says; others do not know of what is computed."""
    return False


def _with_zero_gradient(tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """What is written over a tensor, as autograd records it: of the values that were there the derivative is zero."""
    if not is_followed(tensor) or is_followed(written) or not torch.is_grad_enabled():
        return written
    return torch.where(torch.tensor(True, device=tensor.device), written.to(tensor.dtype), tensor)


@instead_of(torch.Tensor.copy_)
def _copy(tensor: WrappedValue, src: WrappedValue, non_blocking: Any = None) -> Any:
    """``tensor.copy_(src)``; the copy has the program's line."""
    written = _interpret_call(_with_zero_gradient, tensor, src)
    return written if written is INTERPRETER_SIGNALS.EXCEPTION_RAISED else _interpret_call(ltorch.copy_, tensor, written)


@instead_of(torch.Tensor.zero_)
def _zero(tensor: WrappedValue) -> Any:
    return _copy(tensor, _interpret_call(torch.zeros_like, tensor))


def _filled(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full_like(tensor, value)
    if value.ndim:
        raise RuntimeError(f"fill_ only supports 0-dimension value tensor but got tensor with {value.ndim} dimensions.")
    return value.to(tensor.device).expand(tensor.shape)


def _filled_diagonal(tensor: torch.Tensor, value: float, wrap: bool = False) -> torch.Tensor:
    if tensor.ndim < 2 or (tensor.ndim > 2 and len(set(tensor.shape)) > 1):
        raise RuntimeError("fill_diagonal_ takes two dimensions, or more of one length")
    device = tensor.device
    rows, columns = torch.arange(tensor.shape[0], device=device), torch.arange(tensor.shape[1], device=device)
    rows = rows.reshape(-1, *[1] * (tensor.ndim - 1))
    period = tensor.shape[1] + 1 if wrap and tensor.ndim == 2 else max(tensor.shape[0], tensor.shape[1], 1)
    is_on = torch.remainder(rows, period) == columns.reshape(-1, *[1] * (tensor.ndim - 2))
    for dim in range(2, tensor.ndim):
        is_on = is_on & (rows == torch.arange(tensor.shape[dim], device=device).reshape(-1, *[1] * (tensor.ndim - 1 - dim)))
    return torch.where(is_on, torch.full_like(tensor, value), tensor)


def _register(name: str) -> None:
    operation = {"fill_": _filled, "fill_diagonal_": _filled_diagonal}.get(name) or getattr(torch.Tensor, name[:-1])

    def in_place(tensor, *args, **kwargs):
        return _copied(tensor, operation(tensor, *args, **kwargs))

    def lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
        return _interpret_call(in_place, *args, **kwargs)

    functions: list[Callable] = [getattr(torch.Tensor, name)]
    function = getattr(torch, name, None)
    if function is not None and function not in _torch_to_thunder_function_map:
        functions.append(function)
    for fn in functions:
        instead_of(fn)(lookaside)


for _name in (*_in_place(), "fill_diagonal_"):
    _register(_name)
