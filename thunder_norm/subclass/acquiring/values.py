"""Programs that ask for the value of a tensor while their trace is acquired.

Control flow on shapes and metadata is Python's own and traces as written.  A branch on a *value* cannot: Thunder raises an error
without the user's line for a tensor, and silently takes the branch of None for a number made by ``.item()``.  In compilations with a
transform of ours both are refused here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.python.comparisons import COMPARISONS
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.torch import _torch_to_thunder_function_map


def refusal(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn` if it would need the value of a tensor among its (interpreter-wrapped) arguments."""
    what = needed_for(fn, args)
    return None if what is None else lambda *args, **kwargs: do_raise(data_dependent(what))


def needed_for(fn: Callable, args: tuple[WrappedValue, ...]) -> str | None:
    """What `fn` would need the value of a tensor among its (interpreter-wrapped) arguments for; None if it needs none."""
    try:
        reader = _READERS.get(fn)
    except TypeError:  # not hashable
        return None
    if reader is None:
        return None
    what, needs_value = reader
    return what if needs_value([value_of(a) for a in args]) else None


def asks_for_size(fn: Callable, args: tuple[WrappedValue, ...]) -> bool:
    """Whether what `fn` would need a value for is the size of its result alone; see `data_sizes`."""
    if fn not in INDEXING:
        return fn in _SIZED
    key = args[1].value if len(args) > 1 else None
    keys = key if type(key) is tuple else (key,)
    return not any(isinstance(k, slice) and any(map(is_unknown, (k.start, k.stop, k.step))) for k in map(value_of, keys))


def is_unknown(v: Any) -> bool:
    """Whether it is a tensor, or a number that is made of the values of some."""
    return isinstance(v, TensorProxy) or is_unknown_number(v)


def is_unknown_number(v: Any) -> bool:
    """Whether it is a number that is made of the values of tensors."""
    if not isinstance(v, NumberProxy):
        return False
    return v.value is None or any(b.output is v and _bakes(b) for b in reversed(get_jit_ctx().computation_trace.peek_scope()))


def _bakes(bsym: BoundSymbol) -> bool:
    """Whether a known number is made of an unknown one: Thunder turns a comparison with None into a bool."""
    outs = tree_flatten(bsym.output)[0]
    return any(isinstance(v, NumberProxy) and v.value is not None for v in outs) and any(
        isinstance(v, NumberProxy) and v.value is None for v in tree_flatten((bsym.args, bsym.kwargs))[0]
    )


def check_numbers(trace: TraceCtx) -> None:
    """Refuse a program in which an operation has decided something by a number that ``.item()`` made.

    Raises:
        DataDependentError: it has one, ``torch.add(x, y, alpha=z.item())`` for instance.
    """
    at = None
    for bsym in trace.bound_symbols:
        at = location_of(bsym) or at
        if decides(bsym):
            raise data_dependent(f"what {bsym.sym.name} does with a number from .item()", at=at)


def decides(bsym: BoundSymbol) -> bool:
    """Whether an operation has decided something by such a number."""
    return _bakes(bsym) or any(map(decides, bsym.subsymbols))


def _any_unknown(values: list) -> bool:
    return any(is_unknown(v) or (type(v) in (list, tuple) and any(map(is_unknown, v))) for v in values)


def _mask_or_bounds(values: list) -> bool:
    """Whether a tensor is indexed with a mask, or sliced at places that are values."""
    keys = values[1] if type(values[1]) is tuple else (values[1],)
    is_mask = any(isinstance(k, TensorProxy) and k.dtype in (dtypes.bool8, dtypes.uint8) for k in keys)
    return isinstance(values[0], TensorProxy) and (is_mask or _bounds(values))


def _bounds(values: list) -> bool:
    """Whether a tensor is sliced at places that are values, or written into between such."""
    keys = values[1] if type(values[1]) in (list, tuple) else (values[1],)
    return isinstance(values[0], TensorProxy) and any(
        isinstance(k, slice) and any(is_unknown(value_of(v)) for v in (k.start, k.stop, k.step)) for k in keys
    )


def _index_unknown(values: list) -> bool:
    key = values[1] if len(values) > 1 else None
    places = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    return type(values[0]) in (list, tuple) and any(map(is_unknown, places))


INDEXING = (TensorProxy.__getitem__, torch.Tensor.__getitem__)
SETTING = (TensorProxy.__setitem__, torch.Tensor.__setitem__)
MAKERS = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.eye)  # of sizes alone
# Thunder would write of what stands for a value
TEXTS = (str, repr, ascii, format, str.format, str.__mod__)


def _readers() -> dict[Any, tuple[str, Callable[[list], bool]]]:
    found: dict[Any, tuple[str, Callable[[list], bool]]] = {}
    for fn in (bool, operator.truth, operator.not_):
        found[fn] = "a condition", lambda values: any(map(is_unknown, values))
    for fn in (int, float, complex, operator.index, range, max, min, sorted, all):
        found[fn] = f"{fn.__name__}()", _any_unknown
    found |= dict.fromkeys(TEXTS, ("the text of a value", _any_unknown))
    for fn in COMPARISONS.values():
        found[fn] = "a comparison", lambda values: any(map(is_unknown_number, values))
    for fn in NUMBERS_ALONE:
        found[fn] = fn.__name__, lambda values: any(map(is_unknown_number, values))
    for fn in (list.__getitem__, tuple.__getitem__):
        found[fn] = "an index of a sequence", _index_unknown
    indexed = "the shape of a tensor: it is indexed with a mask, or with a slice from or to a value"
    found |= dict.fromkeys(INDEXING, (indexed, _mask_or_bounds))
    found |= dict.fromkeys(SETTING, ("the places that are written: a slice from or to a value", _bounds))
    for fn in (torch.nonzero, torch.argwhere, torch.masked_select, torch.unique, torch.unique_consecutive, torch.bincount):
        for name in {fn, getattr(torch.Tensor, fn.__name__, fn), *symbols_of(fn)}:
            found[name] = f"the shape of what torch.{fn.__name__} returns", _any_unknown
    for fn in (torch.equal, torch.allclose, torch.is_nonzero):
        for name in {fn, getattr(torch.Tensor, fn.__name__), *symbols_of(fn)}:
            found[name] = f"what torch.{fn.__name__} returns", _any_unknown
    for fn in (torch.Tensor.tolist, torch.Tensor.numpy):
        for name in {fn, *symbols_of(fn)}:
            found[name] = f".{fn.__name__}()", _any_unknown
    for name in {torch.arange, *symbols_of(torch.arange)}:
        found[name] = "the length of what torch.arange returns", _any_unknown
    for fn in MAKERS:
        found |= dict.fromkeys({fn, *symbols_of(fn)}, (f"the size of what torch.{fn.__name__} returns", _any_unknown))
    for name in {torch.where, *symbols_of(torch.where)}:
        found[name] = "the shape of what torch.where(condition) returns", lambda values: len(values) == 1
    return found


def symbols_of(fn: Callable) -> list[Any]:
    """What Thunder has for a function of torch."""
    symbol = _torch_to_thunder_function_map.get(fn)
    return [symbol] if isinstance(symbol, Symbol) else []


# what Thunder does with numbers that it knows alone
NUMBERS_ALONE: dict[Callable, Callable] = {
    NumberProxy.__floordiv__: operator.floordiv,
    NumberProxy.__rfloordiv__: lambda a, b: b // a,
    NumberProxy.__mod__: operator.mod,
    NumberProxy.__rmod__: lambda a, b: b % a,
    NumberProxy.__lshift__: operator.lshift,
    NumberProxy.__rlshift__: lambda a, b: b << a,
    NumberProxy.__rshift__: operator.rshift,
    NumberProxy.__rrshift__: lambda a, b: b >> a,
    NumberProxy.__invert__: operator.invert,
    round: round,
    divmod: divmod,
}

_READERS = _readers()
_SIZED = frozenset(
    name
    for fn in (
        torch.nonzero,
        torch.argwhere,
        torch.masked_select,
        torch.unique,
        torch.unique_consecutive,
        torch.bincount,
        torch.where,
    )
    for name in (fn, getattr(torch.Tensor, fn.__name__, fn), *symbols_of(fn))
)
