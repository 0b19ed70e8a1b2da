"""Symbols are called: what a call writes into the trace, without contexts, closures and flattening that nothing depends on."""

from __future__ import annotations

from typing import Any

from thunder_norm.tracing.native.flattening import leaves_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import symbol as thunders
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, get_tracectx

_original_call = Symbol.__call__
_original_bind = Symbol.bind


def _call(self: Symbol, *args: Any, **kwargs: Any) -> Any:
    """Thunder's own where there is more to it: autocast, gradients that are off, proxies of other classes than tensors."""
    trace, compiled, meta = get_tracectx(), get_compile_data(), self.meta
    if (
        type(trace) is not TraceCtx
        or trace._complete
        or compiled is None
        or meta is None
        or not compiled.is_grad_enabled
        or compiled.autocast_stack.stack
    ):
        return _original_call(self, *args, **kwargs)
    scopes = trace.scopes
    if self.is_prim:
        if scopes[-1] is None:  # inside a primitive, whose operations are not written
            return meta(*args, **kwargs)
        subsymbols: list[BoundSymbol] = []
        scopes.append(None)  # type: ignore[arg-type]
        result = meta(*args, **kwargs)
        scopes.pop()
    else:
        given = leaves_of((*args, *kwargs.values()))
        if given is None:
            return _original_call(self, *args, **kwargs)
        subsymbols = []
        scopes.append(subsymbols)
        result = meta(*args, **kwargs)
        result = _with_copies(result, [x for x in given if isinstance(x, Proxy)])
        scopes.pop()
    bound = _bound if Symbol.bind is _original_bind else Symbol.bind
    scope = scopes[-1]
    if scope is None:
        raise AssertionError(f"A symbol {self} was called while processing a primitive")
    scope.append(bound(self, *args, **kwargs, output=result, subsymbols=subsymbols))
    return result


def _with_copies(result: Any, given: list[Proxy]) -> Any:
    """The result of a composite operation, of which none is one of its arguments."""
    if type(result) is TensorProxy:
        return _copy_if_given(result, given)
    if type(result) is tuple and all(type(x) is TensorProxy for x in result):
        return tuple([_copy_if_given(x, given) for x in result])
    leaves, spec = thunders.tree_flatten(result)
    return thunders.tree_unflatten([_copy_if_given(x, given) for x in leaves], spec)


def _copy_if_given(x: Any, given: list[Proxy]) -> Any:
    copied = x
    for proxy in given:
        if proxy is x:  # once for each place, as Thunder does
            copied = thunders.prims.shallow_copy(proxy)
    return copied


def _bound(self: Symbol, *args: Any, output: Any, subsymbols: list[BoundSymbol], **kwargs: Any) -> BoundSymbol:
    """``Symbol.bind`` in a trace: the constructor of a bound symbol has a default for each of its fields."""
    args, kwargs = self.normalize(*args, **kwargs)
    trace: Any = get_tracectx()
    made = object.__new__(BoundSymbol)
    made.__dict__.update(
        sym=self,
        args=tuple(args),
        kwargs=kwargs,
        output=output,
        subsymbols=subsymbols,
        header=thunders._bsym_header.get(),
        source_filename=trace._current_source_filename,
        source_positions=trace._current_source_positions,
        tags=set(),
        _call_ctx=None,
        _import_ctx={},
        _object_ctx={},
        _executor=None,
        _line_no=None,
    )
    if self._bind_postprocess:
        self._bind_postprocess(made)
    return made


REPLACEMENTS = (
    Replacement(Symbol, "__call__", _call, "Symbol.__call__, which flattens arguments and results of each operation"),
)
