"""Symbols are called: what a call writes into the trace, without contexts, closures and flattening that nothing depends on."""

from __future__ import annotations

import functools
from typing import Any

from thunder_norm.tracing.inferred import Inferred
from thunder_norm.tracing.native.flattening import leaves_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import compile_data
from thunder.core import symbol as thunders
from thunder.core import trace as traces
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx

_current_trace, _compile_data = traces._tracectx.get, compile_data._compile_data.get
_original_call = Symbol.__call__
_original_bind = Symbol.bind


def _call(self: Symbol, *args: Any, **kwargs: Any) -> Any:
    """Thunder's own where there is more to it: autocast, proxies of other classes than tensors."""
    trace, compiled, meta = _current_trace(None), _compile_data()[0], self.meta
    if type(trace) is not TraceCtx or trace._complete or compiled is None or meta is None or compiled.autocast_stack.stack:
        return _original_call(self, *args, **kwargs)
    scopes = trace.scopes
    given: list[Any] | None = []
    if not self.is_prim or not compiled.is_grad_enabled:
        given = leaves_of((*args, *kwargs.values()))
        if given is None:
            return _original_call(self, *args, **kwargs)
    if self.is_prim:
        if scopes[-1] is None:  # inside a primitive, whose operations are not written
            return meta(*args, **kwargs)
        if self.tags and OpTags.AUTO_REGISTERED in self.tags:
            meta = _inferred(self)
        subsymbols: list[BoundSymbol] = []
        scopes.append(None)  # type: ignore[arg-type]
        result = meta(*args, **kwargs)
        scopes.pop()
    else:
        subsymbols = []
        scopes.append(subsymbols)
        result = meta(*args, **kwargs)
        result = _with_copies(result, [x for x in given if isinstance(x, Proxy)])
        scopes.pop()
    if not compiled.is_grad_enabled:
        _detach(result, {x.name for x in given if isinstance(x, TensorProxy)})
    bound = _bound if Symbol.bind is _original_bind else Symbol.bind
    scope = scopes[-1]
    if scope is None:
        raise AssertionError(f"A symbol {self} was called while processing a primitive")
    scope.append(bound(self, *args, **kwargs, output=result, subsymbols=subsymbols))
    return result


@functools.cache
def _inferred(operation: Symbol) -> Inferred:
    """What torch says of the results of an operation that Thunder has registered by its name alone."""
    assert operation.meta is not None
    return Inferred(operation.meta)


def _detach(result: Any, given: set[str]) -> None:
    """Have gradients take what an operation made for constants: it ran where none are recorded."""
    made = leaves_of((result,))
    for x in thunders.tree_flatten(result)[0] if made is None else made:
        if isinstance(x, TensorProxy) and x.name not in given:
            x.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


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
    trace: Any = _current_trace(None)
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
    Replacement(
        Symbol,
        "__call__",
        _call,
        "Symbol.__call__, which flattens arguments and results of each operation; meta_adaptor, which runs torch for each",
    ),
)
