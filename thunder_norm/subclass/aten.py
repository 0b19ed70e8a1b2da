"""The one place where recorded torch and aten operations become Thunder's bound symbols.

An operation is written with Thunder's own symbol wherever one gives the same shape, dtype and device as torch's fake kernel
did, so that executors claim and fuse it; any other becomes one opaque primitive that torch runs, differentiated by torch's
own formula.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy

from thunder.core.trace import get_tracectx
from thunder.core.transforms import augmented_forward_impls, backward_impls
from thunder.extend import OperatorExecutor
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder

from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquisition import location_of_user
from thunder_norm.subclass.record import MAX_CONSTANT_NUMEL, Recorded

# Runs the operations Thunder has no symbol for.  Never in an executor list: only what is written here carries it.
fallback_executor = OperatorExecutor("thunder_norm_aten", version="1")

aten = torch.ops.aten


def emit(recorded: Recorded, to_proxy: Callable[[torch.Tensor], TensorProxy]) -> tuple[TensorProxy, ...]:
    """Write one recorded operation into the current trace; returns a proxy for each of its output tensors.

    Raises:
        UnsupportedOpError: the operation cannot be represented (a large constant, a random operation Thunder does not know).
    """
    args, kwargs = tree_map(lambda v: to_proxy(v) if isinstance(v, torch.Tensor) else v, (recorded.args, recorded.kwargs))
    if recorded.func in (aten.lift_fresh.default, aten.lift_fresh_copy.default) and isinstance(args[0], TensorProxy):
        return (args[0],)
    if _is_identity(recorded.func, args, kwargs, recorded.outputs):
        return (args[0],)
    for symbol, symbol_args, symbol_kwargs in _candidates(recorded.func, args, kwargs):
        outputs = _try(symbol, symbol_args, symbol_kwargs, recorded.outputs)
        if outputs is not None:
            return outputs
    if torch.Tag.nondeterministic_seeded in getattr(recorded.func, "tags", ()):
        raise UnsupportedOpError(
            with_details(
                f"random operation {recorded.func} inside a wrapper subclass",
                at=location_of_user(),
                why="Thunder has no symbol for it, and running it again in the backward would draw other numbers",
            )
        )
    outputs = fallback(recorded.func)(*args, **kwargs)
    return tuple(v for v in tree_flatten(outputs)[0] if isinstance(v, TensorProxy))


def _is_identity(func: Callable, args: tuple, kwargs: dict, outputs: tuple[torch.Tensor, ...]) -> bool:
    """Multiplication by the number 1, which generic norm rules produce and a reader of the trace would not write."""
    return (
        func in (aten.mul.Tensor, aten.mul.Scalar)
        and isinstance(args[1], int | float)
        and args[1] == 1
        and not kwargs
        and _same_metadata(args[0], outputs[0])
    )


def constant(t: torch.Tensor) -> TensorProxy:
    """Write a real tensor that was met while recording into the trace, as numbers.

    Raises:
        UnsupportedOpError: it is too large to be written down.
    """
    if t.numel() > MAX_CONSTANT_NUMEL:
        raise UnsupportedOpError(
            with_details(
                f"a constant tensor of shape {list(t.shape)} is used inside an operation on a wrapper subclass",
                at=location_of_user(),
                instead="make it an input, a parameter or a buffer",
            )
        )
    device, dtype = devices.to_device(t.device), dtypes.to_dtype(t.dtype)
    if t.ndim == 0:
        return ltorch.full((), t.item(), device=device, dtype=dtype)
    return ltorch.tensor(t.tolist(), device=device, dtype=dtype)


def _try(symbol: Callable, args: tuple, kwargs: dict, expected: tuple[torch.Tensor, ...]) -> tuple[TensorProxy, ...] | None:
    """Call `symbol` in the trace; keep what it wrote only if every output has the metadata torch computed."""
    trace = get_tracectx()
    scopes = list(trace.scopes)
    scope: list = []
    trace.push_scope(scope)
    try:
        result = symbol(*args, **kwargs)
    except Exception:  # noqa: BLE001 - any failure means this symbol is not the right one; the next candidate is
        trace.scopes[:] = scopes  # Symbol.__call__ leaves its own scope behind when its meta function raises
        return None
    trace.scopes[:] = scopes
    outputs = tuple(v for v in tree_flatten(result)[0] if isinstance(v, TensorProxy))
    if len(outputs) != len(expected) or not all(_same_metadata(p, t) for p, t in zip(outputs, expected, strict=True)):
        return None
    trace.peek_scope().extend(scope)
    return outputs


def _same_metadata(proxy: TensorProxy, fake: torch.Tensor) -> bool:
    return (
        tuple(proxy.shape) == tuple(fake.shape)
        and dtypes.to_torch_dtype(proxy.dtype) == fake.dtype
        and devices.to_torch_device(proxy.device).type == fake.device.type
    )


# -- candidates -------------------------------------------------------------------------------------------------------


def _candidates(func: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[Callable, tuple, dict]]:
    """Thunder callables that may mean the same, best first."""
    if not isinstance(func, torch._ops.OpOverload):
        symbol = torch_to_thunder.get(func) or _of_method(func)
        if symbol is not None:
            yield symbol, args, kwargs
        return
    kwargs = {k: v for k, v in kwargs.items() if v is not None and k not in ("layout", "pin_memory", "memory_format", "implicit")}
    special = _SPECIAL.get(func)
    if special is not None:
        yield special, args, kwargs
        return
    if func.namespace != "aten":
        return
    name = func.overloadpacket.__name__
    for namespace in (torch, torch.nn.functional, torch.Tensor, torch.special):
        symbol = torch_to_thunder.get(getattr(namespace, name, None)) if hasattr(namespace, name) else None
        if symbol is not None:
            yield symbol, args, kwargs


def _of_method(func: Callable) -> Callable | None:
    """Thunder's symbol for a tensor method or property that it knows as a function only."""
    if isinstance(func, types.MethodWrapperType):
        return _PROPERTIES.get(getattr(func.__self__, "__name__", None))
    name = getattr(func, "__name__", "")
    is_method = isinstance(func, types.MethodDescriptorType) and getattr(torch.Tensor, name, None) is func
    return torch_to_thunder.get(getattr(torch, name, None)) if is_method else None


_PROPERTIES: dict[Any, Callable] = {
    "T": lambda a: ltorch.permute(a, tuple(reversed(range(a.ndim)))),
    "mT": lambda a: ltorch.transpose(a, -2, -1),
}


def _to_copy(a: TensorProxy, *, dtype: Any = None, device: Any = None, non_blocking: bool = False) -> TensorProxy:
    return ltorch.to(a, device, dtype, copy=True) if device is not None else ltorch.to(a, dtype, copy=True)


def _addmm(bias: TensorProxy, a: TensorProxy, b: TensorProxy, *, beta: float = 1, alpha: float = 1) -> TensorProxy:
    weight = _transposed_from(b)
    if weight is not None and bias.ndim == 1 and alpha == beta == 1:
        return ltorch.linear(a, weight, bias)  # what it came from, which executors know
    product = ltorch.matmul(a, b)
    product = product if alpha == 1 else ltorch.mul(product, alpha)
    return ltorch.add(product, bias if beta == 1 else ltorch.mul(bias, beta))


def _transposed_from(p: TensorProxy) -> TensorProxy | None:
    """The matrix whose transpose `p` is, if it was transposed in the operation being written."""
    for scope in get_tracectx().scopes[:0:-1]:
        for bsym in reversed(scope):
            if bsym.output is p:
                return bsym.args[0] if bsym.sym is ltorch.permute and tuple(bsym.args[1]) == (1, 0) else None
    return None


def _slice(a: TensorProxy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorProxy:
    length = a.shape[dim]
    start, end, step = slice(start, end).indices(length)[0], slice(start, end).indices(length)[1], step
    index = [slice(None)] * a.ndim
    index[dim] = slice(start, max(start, end), step)
    return ltorch.getitem(a, tuple(index))


def _softmax(a: TensorProxy, dim: int, half_to_float: bool) -> TensorProxy:
    return ltorch.softmax(a, dim, dtype=dtypes.float32 if half_to_float else None)


def _log_softmax(a: TensorProxy, dim: int, half_to_float: bool) -> TensorProxy:
    return ltorch.log_softmax(a, dim, dtype=dtypes.float32 if half_to_float else None)


def _full_like(a: TensorProxy, value: Any, *, dtype: Any = None, device: Any = None) -> TensorProxy:
    return ltorch.full_like(a, value, dtype=dtype, device=device)


def _convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> TensorProxy:
    return ltorch.convolution(a, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _detach(a: TensorProxy) -> TensorProxy:
    detached = prims.shallow_copy(a)
    detached.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return detached


_SPECIAL: dict[Any, Callable] = {
    aten.t.default: lambda a: ltorch.permute(a, tuple(reversed(range(a.ndim)))),
    aten.mm.default: ltorch.matmul,
    aten.bmm.default: ltorch.matmul,
    aten.addmm.default: _addmm,
    aten._to_copy.default: _to_copy,
    aten.clone.default: lambda a: ltorch.clone(a),
    aten.detach.default: _detach,
    aten.alias.default: prims.shallow_copy,
    aten._unsafe_view.default: ltorch.reshape,
    aten.view.default: ltorch.reshape,
    aten.expand.default: lambda a, size: ltorch.expand(a, tuple(size)),
    aten.slice.Tensor: _slice,
    aten.select.int: ltorch.select,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.convolution.default: _convolution,
    aten.ones_like.default: lambda a, *, dtype=None, device=None: _full_like(a, 1, dtype=dtype, device=device),
    aten.zeros_like.default: lambda a, *, dtype=None, device=None: _full_like(a, 0, dtype=dtype, device=device),
    aten.full_like.default: _full_like,
    aten.amax.default: lambda a, dim=(), keepdim=False: ltorch.amax(a, tuple(dim) or None, keepdim),
    aten.amin.default: lambda a, dim=(), keepdim=False: ltorch.amin(a, tuple(dim) or None, keepdim),
    aten.mean.dim: lambda a, dim, keepdim=False, *, dtype=None: ltorch.mean(a, tuple(dim or ()) or None, keepdim, dtype=dtype),
    aten.sum.dim_IntList: lambda a, dim, keepdim=False, *, dtype=None: ltorch.sum(
        a, tuple(dim or ()) or None, keepdim, dtype=dtype
    ),
}


# -- fallback ---------------------------------------------------------------------------------------------------------


@functools.cache
def fallback(func: Callable) -> Any:
    """One opaque primitive for `func`: torch runs it, torch's own formula differentiates it."""
    call = _with_torch_types(func)
    name = _fallback_name(func)
    symbol = fallback_executor.register_operator(name, meta=_with_plain_outputs(ltorch.meta_adaptor(func)), fn=call)
    augmented_forward_impls[symbol.id] = ltorch.augmented_forward_adaptor(symbol)
    backward_impls[symbol.id] = fallback_executor.register_operator(
        f"{name}_vjp", meta=ltorch.backward_adaptor(call), fn=functools.partial(ltorch._vjp_impl, call)
    )
    return symbol


def _fallback_name(func: Callable) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return str(func).replace(".", "_").replace("::", "_")
    if func.__name__ == "__get__":  # a property of torch.Tensor
        return f"Tensor_get_{func.__self__.__name__}"
    owner = getattr(func, "__module__", None) or "Tensor"  # methods written in C have no module
    return f"{owner}_{func.__name__}".replace(".", "_")


def _with_plain_outputs(meta: Callable) -> Callable:
    """Lists become tuples, numbers stay numbers: what a bound symbol may return."""

    @functools.wraps(meta)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = meta(*args, **kwargs)
        return tuple(result) if isinstance(result, list) else result

    return wrapped


def _with_torch_types(func: Callable) -> Callable:
    """`func` taking Thunder's dtypes and devices too: only the computation trace has them translated, the backward has not."""

    def to_torch(value: Any) -> Any:
        if isinstance(value, dtypes.dtype):
            return dtypes.to_torch_dtype(value)
        return devices.to_torch_device(value) if isinstance(value, devices.Device) else value

    @functools.wraps(func, assigned=("__name__", "__doc__"), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*tree_map(to_torch, args), **tree_map(to_torch, kwargs))
        return tuple(result) if isinstance(result, list) else result

    return call
