"""Results with fields: ``x.sort().values`` is right in PyTorch, where Thunder's operations return plain tuples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.tracing.guarding.bindable import bindable
import thunder.torch as ltorch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap
from thunder.core.proxies import AnyProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


def with_fields(found: Callable | None, fn: Callable) -> Callable | None:
    """`found`, which stands for `fn` in the interpreter, with results of the class that torch's function returns."""
    if not callable(found) or (kind := _class_of_results(fn)) is None:
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        result = found(*args, **kwargs)
        if not isinstance(result, WrappedValue) or type(result.value) is not tuple or len(result.value) != kind.n_sequence_fields:
            return result
        return wrap(kind(result.value), provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[result.provenance]))

    return call


def without_fields(tree: Any) -> Any:
    """`tree` with plain tuples in place of such results: Thunder's programs cannot return them."""
    is_named = _has_fields
    return tree_map(lambda v: without_fields(tuple(v)) if is_named(v) else v, tree, is_leaf=is_named)


def made_by_operators(epilogue: TraceCtx) -> TraceCtx:
    """An epilogue in which operators make such results: Thunder prints them in a form that does not run."""
    returned = epilogue.bound_symbols[-1]
    makers: list[BoundSymbol] = []

    def convert(value: Any) -> Any:
        if _has_fields(value):
            made = AnyProxy(value)
            cls = type(value)
            make = bindable(f"{cls.__name__}", lambda *values: cls(values))
            makers.append(make(*(convert(v) for v in value), output=made))
            return made
        if type(value) in (list, tuple):
            return type(value)(convert(v) for v in value)
        return {k: convert(v) for k, v in value.items()} if type(value) is dict else value

    with tracectx(epilogue):
        converted = tuple(convert(a) for a in returned.args)
    if not makers:
        return epilogue
    new = from_trace(epilogue)
    new.bound_symbols = [*epilogue.bound_symbols[:-1], *makers, returned.from_bsym(args=converted)]
    return new


def _has_fields(value: Any) -> bool:
    return type(value).__module__ == "torch.return_types"


def _class_of_results(fn: Callable) -> Any:
    if isinstance(fn, Symbol):
        return _classes_of_symbols().get(fn.id) if isinstance(fn.id, str) else None
    try:
        return _classes_of_functions().get(fn)
    except TypeError:  # not hashable
        return None


@functools.cache
def _classes_of_symbols() -> dict[str, Any]:
    """The classes in ``torch.return_types`` by the ids of Thunder's symbols, as in ``torch.linalg.eigh``."""
    names = [n for n in dir(torch.return_types) if hasattr(getattr(torch.return_types, n), "n_sequence_fields")]
    found = {}
    for name in names:
        kind = getattr(torch.return_types, name)
        if name.startswith("linalg_"):
            found[f"torch.linalg.{name.removeprefix('linalg_')}"] = kind
        else:
            found |= {f"torch.{name}": kind, f"torch.Tensor.{name}": kind}
    return found


@functools.cache
def _classes_of_functions() -> dict[Callable, Any]:
    found = {}
    for fn, symbol in ltorch._torch_to_thunder_function_map.items():
        kind = _classes_of_symbols().get(getattr(symbol, "id", None))
        if kind is not None:
            found[fn] = kind
    return found
