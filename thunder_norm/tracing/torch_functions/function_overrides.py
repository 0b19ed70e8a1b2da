"""Classes without dispatch that say in their ``__torch_function__`` what torch's functions do with their tensors.

A trace has plain tensors, and torch's operations on them.  Whether that is what the class does is tried for each operation of a trace: the
torch functions that may stand behind it are called on the meta device with tensors of the class and with plain ones, and the operators that
reach the dispatcher are compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.translation import for_torch
from thunder_norm.trees import map_leaves
from thunder_norm.wrapper_classes import gives_its_class
from thunder.core import devices
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import wrap_const
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_PLACES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch.fft, torch._C._nn)
_READ = "T dtype grad is_leaf is_sparse itemsize layout mT names ndim requires_grad shape".split()
_ASKED: tuple[Callable, ...] = (
    *(functools.partial(lambda name, x: getattr(x, name), name) for name in _READ),
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.is_tensor,
    len,
)
_OPERATORS = {"true_divide": ("truediv", "div"), "div": ("truediv", "div"), "floor_divide": ("floordiv",), "rsub": ("sub",)}
_Log = list[tuple[Any, ...]]
_DISABLED = "_thunder_norm_classes_say_nothing"  # of compile data: where the program has it so


def check(trace: TraceCtx, inputs: Iterable[torch.Tensor]) -> None:
    """Refuse a program with a tensor whose class does something else than torch with it.

    Args:
        trace: the computation that was acquired.
        inputs: the tensors that it was given, parameters and globals among them.

    Raises:
        UnsupportedSubclassError: it does, or it cannot be tried.
    """
    inputs, where = list(inputs), vars(get_compile_data()).pop(_DISABLED, None)
    if where is not None and any(gives_its_class(type(x)) for x in inputs):
        raise UnsupportedSubclassError(
            with_details(
                "DisableTorchFunctionSubclass in a program with tensors of a class that does not dispatch",
                at=where,
                why="a trace calls torch's functions when the program has been gone through, and the class says then what comes out",
                instead="x.as_subclass(torch.Tensor) of what the program is given",
            )
        )
    for x in {type(x): x for x in inputs if _says_itself(type(x))}.values():
        like = torch.empty(2, 3, device="meta")
        for function in _ASKED:
            _compare(x, function, (like,), {})
        for bsym in trace.bound_symbols:
            args, kwargs = on_meta((bsym.args, bsym.kwargs))
            for function in functions_of(bsym):
                if function.__name__.startswith("__"):  # an operator, with its operands alone, or reflected
                    _compare(x, function, args, {})
                    _compare(x, function, args[::-1], {})
                else:
                    _compare(x, function, args, kwargs)


@instead_of(torch._C.DisableTorchFunctionSubclass)
@instead_of(torch._C.DisableTorchFunction)
def _disabled() -> Any:
    """Called where a program has classes say nothing: it has left that before the trace runs."""
    vars(get_compile_data()).setdefault(_DISABLED, location_of_user())
    return wrap_const(contextlib.nullcontext())


def overrides_torch_function(cls: type) -> bool:
    """Whether a class says itself what torch's functions do with it."""
    own = cls.__torch_function__
    return own is not torch._C._disabled_torch_function_impl and getattr(own, "__func__", None) is not _DEFAULT_TORCH_FUNCTION


_DEFAULT_TORCH_FUNCTION = torch.Tensor.__torch_function__.__func__


def _says_itself(cls: type) -> bool:
    """Whether a class of a user's does that does not dispatch: torch's own are known."""
    is_wrapper = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and overrides_torch_function(cls) and cls.__torch_function__.__module__.partition(".")[0] != "torch"


def functions_of(bsym: BoundSymbol) -> list[Callable]:
    """What a program may have called for an operation of its trace, and what may run for it: a function, a method, an operator, in place or not."""
    name = bsym.sym.name.rpartition(".")[2].rstrip("_").removeprefix("torch_")
    names = (name, f"{name}_", *(f"__{kind}{base}__" for base in _OPERATORS.get(name, (name,)) for kind in ("", "r", "i")))
    found = [getattr(place, n, None) for n in names for place in _PLACES]
    return list({id(f): f for f in found if callable(f)}.values())


def on_meta(tree: Any, examples: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Any:
    """Arguments for torch's functions: for proxies the `examples` that have their names, or plain tensors on the meta device."""

    def made(v: Any) -> Any:
        if isinstance(v, TensorProxy):
            if v.name in examples:
                return examples[v.name]
            return torch.empty(tuple(map(int, v.shape)), dtype=for_torch(v.dtype), device="meta")
        return torch.device("meta") if isinstance(v, devices.Device) else for_torch(v)

    return map_leaves(made, tree)


def of_class(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor like a plain one that is of the class of `x`, with its attributes."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.Tensor._make_subclass(type(x), like)
    made.__dict__.update(vars(x))
    return made


def _compare(x: torch.Tensor, function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse where a class does something else than torch with a function."""
    with _disable_current_modes(), torch.no_grad():
        try:
            wanted = _logged(function, *tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, (args, kwargs)))
        except Exception:  # noqa: BLE001 - not what stands behind the operation
            return
        try:
            found = _logged(function, *tree_map(lambda v: of_class(x, v) if isinstance(v, torch.Tensor) else v, (args, kwargs)))
        except Exception as e:
            raise _refused(type(x), function, f"it raises {type(e).__name__}: {e}") from e
    if found != wanted:
        raise _refused(type(x), function, "it computes something else than torch")


def _logged(function: Callable, args: tuple, kwargs: dict[str, Any]) -> _Log:
    """What reaches the dispatcher in a call, and what it returns."""
    log: _Log = []
    with _Logging(log):
        found = function(*args, **kwargs)
    log.append(("returned", _described(found)))
    return log


class _Logging(TorchDispatchMode):
    def __init__(self, log: _Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten.alias.default and func is not torch.ops.aten.detach.default:
            self.log.append((func, _described((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _described(tree: Any) -> str:
    def described(v: Any) -> Any:
        return (tuple(v.shape), v.dtype, v.stride()) if isinstance(v, torch.Tensor) else v

    with torch._C.DisableTorchFunctionSubclass():
        return repr(tree_map(described, tree))


def _refused(cls: type, function: Callable, what: str) -> UnsupportedSubclassError:
    name = getattr(function, "__qualname__", None) or str(getattr(function, "args", function))
    return UnsupportedSubclassError(
        with_details(
            f"{cls.__module__}.{cls.__qualname__} has a __torch_function__ of its own, and a program that does not do what it says",
            of=f"{name}: {what}",
            why="a trace does torch's operations with its tensors, as the class does not dispatch",
            instead="x.as_subclass(torch.Tensor) of what the program is given, or a __torch_dispatch__ and the protocol of wrapper subclasses",
        )
    )
