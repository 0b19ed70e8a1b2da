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

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.fallback import Written, fallback, fallback_executor, is_random
from thunder_norm.subclass.acquiring.lengths import is_symbolic
from thunder_norm.subclass.recording.aten_table import ON_NUMBERS, SPECIAL
from thunder_norm.subclass.recording.decompositions import decompose, decomposition_of, differentiate
from thunder_norm.subclass.recording.einsum_strides import is_made_of_einsum
from thunder_norm.subclass.recording.record import MAX_CONSTANT_NUMEL, Recorded, Step
from thunder_norm.subclass.recording.signatures import arguments_for
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.recording import scope
from thunder_norm.trees import map_tensors
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder
from thunder.torch.default_torch_ops import torch_auto_registered_ops

aten = torch.ops.aten

# What torch.tensor calls on the numbers that it is given.
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


def emit(
    recorded: Recorded, to_proxy: Callable[[torch.Tensor], TensorProxy], used: tuple[bool, ...]
) -> tuple[TensorProxy | None, ...]:
    """Write one recorded operation into the current trace; returns a proxy for each of its output tensors marked in `used`.

    Raises:
        UnsupportedOpError: the operation cannot be represented (a large constant).
    """
    args, kwargs = map_tensors(to_proxy, (recorded.args, recorded.kwargs))
    if isinstance(recorded.func, Step):
        return recorded.func.emit(*args)
    if recorded.func in LIFTS and isinstance(args[0], TensorProxy):
        return (args[0],)
    has_lengths = any(map(is_symbolic, (*recorded.inputs, *recorded.outputs)))  # which Thunder's symbols take for numbers
    if not (has_lengths or is_random(recorded.func)):
        for symbol, symbol_args, symbol_kwargs in _candidates(recorded.func, args, kwargs):
            outputs = _try(symbol, symbol_args, symbol_kwargs, recorded.outputs)
            if outputs is not None:
                return outputs
    elif recorded.func is aten.native_dropout.default:
        used = (True, True)  # its gradient needs the mask
    # how a result lies in memory is what a view of it relies on
    kwargs = {k: v for k, v in kwargs.items() if k not in _HOW_NOT_WHAT or (k == "memory_format" and v is not None)}
    if not has_lengths and decomposition_of(recorded.func) is not None:
        expected = tuple(t for t, u in zip(recorded.outputs, used, strict=True) if u)
        written = _try(fallback(recorded.func, used, WRITTEN), args, kwargs, expected)
        if written is not None:
            outputs = iter(written)
            return tuple(next(outputs) if u else None for u in used)
    outputs = iter(fallback(recorded.func, used)(*args, **kwargs))
    return tuple(next(outputs) if u else None for u in used)


def _write_decomposed(func: Callable, args: tuple, kwargs: dict) -> list[TensorProxy]:
    """The tensors that `func` returns, written in the operations it decomposes into."""
    log, results, env = decompose(func, args, kwargs)
    _write(log, env)
    return [env[id(t)] for t in results]


def _write_gradients(
    func: Callable, args: tuple, kwargs: dict, results: tuple[TensorProxy, ...], cotangents: list[TensorProxy | None]
) -> list[TensorProxy | None] | None:
    """The gradients of `func` to its floating inputs by torch's formula; None if that cannot be written down."""
    try:
        log, gradients, env = differentiate(func, args, kwargs, results, cotangents)
    except RuntimeError:  # no derivative, or a formula that works in place: torch itself will run it
        return None
    _write(log, env)
    return [None if g is None else env[id(g)] if id(g) in env else constant(g) for g in gradients]


WRITTEN = Written(_write_decomposed, _write_gradients)


def _write(log: list[Recorded], env: dict[int, TensorProxy]) -> None:
    """Write recorded operations into the trace; adds the proxies of what they return to `env`."""

    def to_proxy(t: torch.Tensor) -> TensorProxy:
        return env[id(t)] if id(t) in env else constant(t)

    for recorded in log:
        outputs = emit(recorded, to_proxy, (True,) * len(recorded.outputs))
        env.update({id(t): p for t, p in zip(recorded.outputs, outputs, strict=True)})


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


def captured(t: torch.Tensor) -> TensorProxy:
    """Write a real tensor that an operation took from its surroundings into the trace: itself, which others may change meanwhile."""
    return _capture(t)()


def _capture(t: torch.Tensor) -> Callable[[], TensorProxy]:
    known = _captures.get(t)
    if known is None:
        shape, dtype, device = tuple(t.shape), dtypes.to_dtype(t.dtype), devices.to_device(t.device)

        def run() -> torch.Tensor:
            if (tuple(t.shape), t.dtype) != (shape, dtypes.to_torch_dtype(dtype)):
                raise UnsupportedOpError(
                    f"a tensor of shape {list(shape)} that a wrapper class uses has changed its shape or dtype"
                )
            return t.detach()

        def meta() -> TensorProxy:
            return TensorProxy(shape=shape, device=device, dtype=dtype, requires_grad=False)

        known = _captures[t] = fallback_executor.register_operator(f"captured_{next(_counter)}", meta=meta, fn=run)
    return known


_counter = itertools.count()
_captures: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _try(symbol: Callable, args: tuple, kwargs: dict, expected: tuple[torch.Tensor, ...]) -> tuple[TensorProxy, ...] | None:
    """Call `symbol` in the trace; keep what it wrote only if every output has the metadata torch computed."""
    trace = get_tracectx()
    try:
        with scope(trace) as written:
            result = symbol(*args, **kwargs)
    except Exception:  # noqa: BLE001 - any failure means this symbol is not the right one; the next candidate is
        return None
    results = (result,) if isinstance(result, TensorProxy) else tree_flatten(result)[0]
    outputs = tuple(v for v in results if isinstance(v, TensorProxy))
    if len(outputs) != len(expected) or not all(_same_metadata(p, t) for p, t in zip(outputs, expected, strict=True)):
        return None
    trace.peek_scope().extend(written)
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
    on_numbers = ON_NUMBERS.get(func)
    if on_numbers is not None and not kwargs and all(map(_is_number, args)):
        yield on_numbers, tuple(float(a) if isinstance(a, int) else a for a in args), {}
        return
    if _name(func) in _NOT_EXECUTED:
        return
    if torch.is_grad_enabled() and (_name(func) in _WITHOUT_GRADIENT or "rounding_mode" in kwargs or _is_complex((args, kwargs))):
        return
    if func in _BY_POSITION and args[0].dtype is dtypes.bool8:
        return
    special = SPECIAL.get(func)
    if special is not None:
        left_out = () if func is aten.clone.default else _HOW_NOT_WHAT
        yield special, args, {k: v for k, v in kwargs.items() if v is not None and k not in left_out}
        return
    if not isinstance(func, torch._ops.OpOverload):
        if func in (torch.Tensor.view, torch.Tensor.view_as) and is_made_of_einsum(args[0]):
            yield ltorch.reshape, (args[0], *([*args[1].shape] if func is torch.Tensor.view_as else args[1:])), kwargs
            return
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


def _is_number(a: Any) -> bool:
    """Whether an argument is a number that needs no promotion beside others of this kind: Python's, or of float64, as sizes are."""
    if isinstance(a, TensorProxy):
        return a.ndim == 0 and a.dtype is dtypes.float64
    return isinstance(a, float | int) and not isinstance(a, bool)


# Thunder finds where the largest is by `argmax`, which torch has not for bool.
_BY_POSITION = frozenset({aten.max.dim, aten.min.dim})

_HOW_NOT_WHAT = ("layout", "pin_memory", "memory_format", "implicit")

# The checker of Thunder's symbol takes fewer arguments than the symbol, and no executor has one of float32.
_NOT_EXECUTED = frozenset({"_grouped_mm"})

# Thunder's symbols that have no gradient, or a wrong one (prod at zero, the values of index_put).
_WITHOUT_GRADIENT = frozenset(
    "ceil flip fliplr flipud floor index_add index_put lerp prod remainder __mod__ __rmod__ round trunc fix".split()
)


def _is_complex(tree: Any) -> bool:
    """Whether complex numbers take part: Thunder's gradients forget to conjugate."""
    if isinstance(tree, TensorProxy):
        return dtypes.is_complex_dtype(tree.dtype)
    if isinstance(tree, (tuple, list, dict)):
        return any(map(_is_complex, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, complex)


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
