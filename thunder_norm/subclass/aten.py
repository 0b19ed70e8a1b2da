"""The one place where recorded torch and aten operations become Thunder's bound symbols.

An operation is written with Thunder's own symbol wherever one gives the same shape, dtype and device as torch's fake kernel
did, so that executors claim and fuse it; any other becomes one opaque primitive that torch runs, differentiated by torch's
own formula.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import get_tracectx
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder
from thunder.torch.default_torch_ops import torch_auto_registered_ops
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquisition import location_of_user
from thunder_norm.subclass.fallback import fallback, is_random
from thunder_norm.subclass.record import MAX_CONSTANT_NUMEL, Recorded
from thunder_norm.subclass.signatures import arguments_for

aten = torch.ops.aten


def emit(
    recorded: Recorded, to_proxy: Callable[[torch.Tensor], TensorProxy], used: tuple[bool, ...]
) -> tuple[TensorProxy | None, ...]:
    """Write one recorded operation into the current trace; returns a proxy for each of its output tensors marked in `used`.

    Raises:
        UnsupportedOpError: the operation cannot be represented (a large constant).
    """
    args, kwargs = tree_map(lambda v: to_proxy(v) if isinstance(v, torch.Tensor) else v, (recorded.args, recorded.kwargs))
    if recorded.func in (aten.lift_fresh.default, aten.lift_fresh_copy.default) and isinstance(args[0], TensorProxy):
        return (args[0],)
    if _is_identity(recorded.func, args, kwargs, recorded.outputs):
        return (args[0],)
    if not is_random(recorded.func):
        for symbol, symbol_args, symbol_kwargs in _candidates(recorded.func, args, kwargs):
            outputs = _try(symbol, symbol_args, symbol_kwargs, recorded.outputs)
            if outputs is not None:
                return outputs
    elif recorded.func is aten.native_dropout.default:
        used = (True, True)  # its gradient needs the mask
    kwargs = {k: v for k, v in kwargs.items() if k not in _HOW_NOT_WHAT}
    outputs = iter(fallback(recorded.func, used)(*args, **kwargs))
    return tuple(next(outputs) if u else None for u in used)


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
    if torch.is_grad_enabled() and (_name(func) in _WITHOUT_GRADIENT or "rounding_mode" in kwargs or _is_complex((args, kwargs))):
        return
    special = _SPECIAL.get(func)
    if special is not None:
        yield special, args, {k: v for k, v in kwargs.items() if v is not None and k not in _HOW_NOT_WHAT}
        return
    if not isinstance(func, torch._ops.OpOverload):
        symbol = torch_to_thunder.get(func) or _of_method(func)
        if symbol is not None and func not in _auto_registered():
            yield symbol, args, kwargs
        return
    if func.namespace != "aten":
        return
    for namespace in (torch, torch.nn.functional, torch.Tensor, torch.special):
        function = getattr(namespace, _name(func), None)
        symbol = torch_to_thunder.get(function)
        arguments = None if symbol is None or function in _auto_registered() else arguments_for(symbol, func, args, kwargs)
        if arguments is not None:
            yield symbol, *arguments


_HOW_NOT_WHAT = ("layout", "pin_memory", "memory_format", "implicit")

# Thunder's symbols that have no gradient, or a wrong one (prod at zero, the values of index_put).
_WITHOUT_GRADIENT = frozenset(
    "flip fliplr flipud index_add index_put lerp prod remainder __mod__ __rmod__ round trunc fix".split()
)


def _is_complex(tree: Any) -> bool:
    """Whether complex numbers take part: Thunder's gradients forget to conjugate."""
    leaves = tree_flatten(tree)[0]
    return any(isinstance(v, complex) or (isinstance(v, TensorProxy) and dtypes.is_complex_dtype(v.dtype)) for v in leaves)


def _name(func: Callable) -> str:
    return func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", "")


@functools.cache
def _auto_registered() -> frozenset:
    """The functions Thunder takes from torch as they are: `fallback` does the same, with all gradients."""
    return frozenset(itertools.chain(*torch_auto_registered_ops.values()))


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


def _minimum(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    if not torch.is_grad_enabled() or not (dtypes.is_float_dtype(a.dtype) and dtypes.is_float_dtype(b.dtype)):
        return ltorch.minimum(a, b)
    return ltorch.neg(ltorch.maximum(ltorch.neg(a), ltorch.neg(b)))  # which has a gradient


def _copy(a: TensorProxy, value: TensorProxy, non_blocking: bool = False) -> TensorProxy:
    return ltorch.expand(ltorch.to(value, a.device, a.dtype, copy=True), tuple(a.shape))


def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False) -> TensorProxy:
    return ltorch.embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)


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
    aten.minimum.default: lambda a, b: _minimum(a, b),
    torch.minimum: lambda a, b: _minimum(a, b),
    aten.copy.default: _copy,
    aten.embedding.default: _embedding,
    aten.amax.default: lambda a, dim=(), keepdim=False: ltorch.amax(a, tuple(dim) or None, keepdim),
    aten.amin.default: lambda a, dim=(), keepdim=False: ltorch.amin(a, tuple(dim) or None, keepdim),
    aten.mean.dim: lambda a, dim, keepdim=False, *, dtype=None: ltorch.mean(a, tuple(dim or ()) or None, keepdim, dtype=dtype),
    aten.sum.dim_IntList: lambda a, dim, keepdim=False, *, dtype=None: ltorch.sum(
        a, tuple(dim or ()) or None, keepdim, dtype=dtype
    ),
}
